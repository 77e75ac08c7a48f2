// Lanes between an accelerator and its disk: a worker thread with a side stream, which moves one
// chunk after the other through pinned memory of its own.
//
// Note: order
//  1. A copy comes after what the page's stream, and the current one, had queued when it was
//     submitted: out, because that makes the bytes; in, because that may still use the memory.
//     The lane's seconds begin behind that.
//  2. It has ended when the device is done with its last chunk. Until then whoever waits stands
//     still, as on the CPU; behind it no stream has anything to wait for.
//  3. A device that fails leaves no copy that anybody trusts. The stream is waited for first, if it
//     can be: what it still copies to is about to be freed.
#pragma once

#include "tiers/thread_lane.h"

namespace delta {

class StagedLane : public ThreadLane {
 public:
  // `staging`: pinned memory of Bounce::kBytes. It goes back when the lane stops; what is copied
  // later takes memory of the moment.
  StagedLane(c10::Device device, std::shared_ptr<Block> staging);
  ~StagedLane() override { StagedLane::stop(); }

  void submit(const TransferPtr& transfer) override;
  void stop() override;
  c10::StreamId stream_id() const override { return stream_.id(); }

 private:
  int write(Transfer& transfer, Bounce& bounce) override { return move(transfer, bounce); }
  int read(Transfer& transfer, Bounce& bounce) override { return move(transfer, bounce); }
  Bounce& bounce() override { return bounce_; }
  void await_turn(Transfer& transfer) override;
  int move(Transfer& transfer, Bounce& bounce);
  int move_chunk(Transfer& transfer, int64_t at, int64_t bytes, Bounce& bounce);
  void note_what_comes_before(Transfer& transfer) const;

  const c10::Device device_;
  const c10::Stream stream_;
  const pid_t process_;  // a forked child has no device
  std::shared_ptr<Block> staging_;
  Bounce bounce_;
};

}  // namespace delta

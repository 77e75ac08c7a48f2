// Lanes of an accelerator: a side stream each, on whatever device type has streams and events.
//
// Note: order between streams (numbers of the rules in brackets are those of the races that other
// offloaders ran into)
//  1. Out: the side stream waits for what compute has queued until now, copies, and marks the end.
//     The memory is freed only after its own stream was made to wait for that mark [3, 6].
//  2. In: the destination is allocated on compute's current stream; the side stream waits for what
//     that has queued until now, which includes whoever had the memory before, and for the end of
//     the copy out [4]. Whoever uses it waits for the mark, on the stream that is current then [1].
//  3. A block of host memory goes back when the mark was reached, not when it was queued [5].
//  4. Memory that was used on more than one stream is never freed here: see Page::many_streams.
#pragma once

#include <deque>

#include "lanes.h"

namespace delta {

class StreamLane : public Lane {
 public:
  explicit StreamLane(c10::Device device);
  ~StreamLane() override { StreamLane::stop(); }

  void submit(const TransferPtr& transfer) override;
  void wait(Transfer& transfer) override;
  bool cancel(Transfer&) override { return false; }
  void poll() override;
  void stop() override;

 private:
  void copy(Transfer& transfer);

  const c10::Device device_;
  const c10::Stream stream_;
  std::deque<TransferPtr> queue_;
};

// The id of the stream that is current on this thread; kNoStream on devices without any.
c10::StreamId current_stream_id(c10::Device device);

}  // namespace delta

// Lanes of an accelerator: a side stream each, on whatever device type has streams and events.
//
// Note: order between streams
//  1. Memory belongs to the stream that it was allocated on and goes back there, at once. A page
//     whose storage the session did not see being made is never freed here, for nobody knows that
//     stream; nor is one that was used on more than one: see Page::many_streams.
//  2. Out: the side stream waits for what the page's stream, and the current one, have queued until
//     now, copies, and marks the end. The memory is freed only after the page's stream was made to
//     wait for that mark.
//  3. In: the destination is allocated on the page's stream; the side stream waits for what that
//     one has queued until now, which includes whoever had the memory before, and for the end of
//     the copy out. Whoever uses it waits for the mark, on the stream that is current then;
//     and on another stream than the page's, for that one too.
//  4. A block of host memory goes back when the mark was reached, not when it was queued.
//  5. A device that fails leaves no copy that anybody trusts: all that was under way has failed.
//     The stream is waited for first, if it can be: what it still copies to is about to be freed.
//  6. A lane that is to be slower than its link copies more before it marks the end: the same once
//     more, from the same place to the same place, or, where that is less than a megabyte, bytes
//     that nobody needs. Each copy is queued under the session's lock: `crossings` is small.
#pragma once

#include <sys/types.h>

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>

#include "tiers/lanes.h"
#include "tiers/stream_spans.h"

namespace delta {

class StreamLane : public Lane {
 public:
  // `crossings`: how often each byte crosses the link; at least 1, and often no whole number.
  // `unused`: host memory of kUnusedBytes for that, pinned; null where that is 1.
  StreamLane(c10::Device device, StreamSpans& spans, double crossings = 1,
             std::shared_ptr<Block> unused = nullptr);
  ~StreamLane() override { StreamLane::stop(); }

  void submit(const TransferPtr& transfer) override;
  void wait(Transfer& transfer) override;
  bool cancel(Transfer&) override { return false; }
  void poll() noexcept override;
  void finish(Transfer& transfer) override;
  void stop() override;
  bool host_waits() const override { return false; }
  c10::StreamId stream_id() const override { return stream_.id(); }

  static constexpr int64_t kUnusedBytes = 1 << 20;

 private:
  void queue_more(const Transfer& transfer);
  void copy(Transfer& transfer);
  void await_stream() noexcept;
  void fail_all() noexcept;  // under the mutex

  const c10::Device device_;
  StreamSpans& spans_;
  const double crossings_;
  const std::shared_ptr<Block> unused_here_;
  at::Tensor unused_there_;
  const c10::Stream stream_;
  const pid_t process_;  // a forked child has no device
  std::deque<TransferPtr> queue_;
};

}  // namespace delta

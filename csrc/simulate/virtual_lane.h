// A copy lane on a virtual clock: one copy after the other, at the speed of its link. It behaves as
// tiers/thread_lane.h with a throttle does.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

namespace delta {

struct VirtualCopy {
  int64_t bytes = 0;
  int64_t value = -1;
  double submitted_s = 0;
  double begin_s = 0;
  double end_s = 0;
  bool begun = false;
  bool cancelled = false;
  bool forgotten = false;  // nobody needs it, and it has begun

  bool ended(double now_s) const { return cancelled || (begun && end_s <= now_s); }
};
using VirtualCopyPtr = std::shared_ptr<VirtualCopy>;

class VirtualLane {
 public:
  explicit VirtualLane(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  VirtualCopyPtr submit(int64_t value, int64_t bytes, double now_s);
  bool cancel(VirtualCopy& copy, double now_s);  // false: it has begun
  // What has ended by now, in that order; each copy is returned once.
  std::vector<VirtualCopyPtr> take_ended(double now_s);
  // When a copy ends, if none before it is cancelled any more.
  double end_of(const VirtualCopy& copy) const;
  VirtualCopyPtr first() const { return queue_.empty() ? nullptr : queue_.front(); }

  int64_t queued_bytes(double now_s) const;
  double seconds_per_byte() const { return 1 / bytes_per_s_; }

 private:
  // When the next copy of the queue begins that has not, if the worker is free from then on, and
  // the link from then on.
  static double begin_of(const VirtualCopy& copy, double worker_free_s, double link_free_s);
  double seconds_of(const VirtualCopy& copy) const {
    return static_cast<double>(copy.bytes) / bytes_per_s_;
  }
  void begin_next(double now_s);

  double bytes_per_s_;
  double free_at_s_ = -1e9;
  std::deque<VirtualCopyPtr> queue_;  // those that have not been taken
};

}  // namespace delta

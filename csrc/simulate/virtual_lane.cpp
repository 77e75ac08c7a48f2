#include "simulate/virtual_lane.h"

#include <algorithm>
#include <limits>

namespace delta {
namespace {

constexpr double kSlackSeconds = 200e-6;  // as Throttle::claim grants, for the processor's delay

}  // namespace

VirtualCopyPtr VirtualLane::submit(int64_t value, int64_t bytes, double now_s) {
  auto copy = std::make_shared<VirtualCopy>();
  copy->value = value;
  copy->bytes = bytes;
  copy->submitted_s = now_s;
  queue_.push_back(copy);
  return copy;
}

// Begins what would have begun by now, each copy when the one before it has ended.
void VirtualLane::begin_next(double now_s) {
  double worker_free_s = 0;
  for (const auto& copy : queue_) {
    if (copy->cancelled) {
      continue;
    }
    if (!copy->begun) {
      const double picked_s = std::max(copy->submitted_s, worker_free_s);
      if (picked_s > now_s) {
        return;
      }
      copy->begun = true;
      copy->begin_s = std::max(picked_s - kSlackSeconds, free_at_s_);
      copy->end_s = copy->begin_s + static_cast<double>(copy->bytes) / bytes_per_s_;
      free_at_s_ = copy->end_s;
    }
    worker_free_s = copy->end_s;
  }
}

bool VirtualLane::cancel(VirtualCopy& copy, double now_s) {
  begin_next(now_s);
  copy.cancelled = copy.cancelled || !copy.begun;
  return copy.cancelled;
}

std::vector<VirtualCopyPtr> VirtualLane::take_ended(double now_s) {
  begin_next(now_s);
  std::vector<VirtualCopyPtr> ended;
  while (!queue_.empty() && queue_.front()->ended(now_s)) {
    ended.push_back(std::move(queue_.front()));
    queue_.pop_front();
  }
  return ended;
}

double VirtualLane::end_of(const VirtualCopy& copy) {
  begin_next(std::numeric_limits<double>::infinity());
  return copy.end_s;
}

int64_t VirtualLane::queued_bytes(double now_s) const {
  int64_t sum = 0;
  for (const auto& copy : queue_) {
    sum += copy->ended(now_s) ? 0 : copy->bytes;
  }
  return sum;
}

}  // namespace delta

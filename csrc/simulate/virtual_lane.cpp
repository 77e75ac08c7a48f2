#include "simulate/virtual_lane.h"

#include <algorithm>

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

double VirtualLane::begin_of(const VirtualCopy& copy, double worker_free_s, double link_free_s) {
  return std::max(std::max(copy.submitted_s, worker_free_s) - kSlackSeconds, link_free_s);
}

// Begins what would have begun by now, each copy when the one before it has ended.
void VirtualLane::begin_next(double now_s) {
  double worker_free_s = 0;
  for (const auto& copy : queue_) {
    if (copy->cancelled) {
      continue;
    }
    if (!copy->begun) {
      if (std::max(copy->submitted_s, worker_free_s) > now_s) {
        return;
      }
      copy->begun = true;
      copy->begin_s = begin_of(*copy, worker_free_s, free_at_s_);
      copy->end_s = copy->begin_s + seconds_of(*copy);
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

double VirtualLane::end_of(const VirtualCopy& copy) const {
  double end_s = copy.end_s;
  double link_free_s = free_at_s_;
  double worker_free_s = 0;
  for (const auto& each : queue_) {
    if (each->cancelled) {
      continue;
    }
    end_s =
        each->begun ? each->end_s : begin_of(*each, worker_free_s, link_free_s) + seconds_of(*each);
    link_free_s = std::max(link_free_s, end_s);
    worker_free_s = end_s;
    if (each.get() == &copy) {
      break;
    }
  }
  return end_s;
}

int64_t VirtualLane::queued_bytes(double now_s) const {
  int64_t sum = 0;
  for (const auto& copy : queue_) {
    sum += copy->ended(now_s) ? 0 : copy->bytes;
  }
  return sum;
}

}  // namespace delta

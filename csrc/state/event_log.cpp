#include "state/event_log.h"

#include <algorithm>
#include <limits>

namespace delta {
namespace {

// Whose ids follow each other in the order in which they were packed.
class Gone {
 public:
  explicit Gone(const std::vector<Event>& events) {
    for (const auto& each : events) {
      if (is(each, EventKind::Packed)) {
        first_ = std::min(first_, each.page);
      }
    }
    for (const auto& each : events) {
      if (is(each, EventKind::Released) && each.page >= first_) {
        const auto place = static_cast<size_t>(each.page - first_);
        gone_.resize(std::max(gone_.size(), place + 1));
        gone_[place] = true;
      }
    }
  }

  bool has(int64_t page) const {
    const auto place = static_cast<size_t>(page - first_);
    return page >= first_ && place < gone_.size() && gone_[place];
  }

  static bool is(const Event& event, EventKind kind) {
    return event.kind == static_cast<int32_t>(kind);
  }

 private:
  int64_t first_ = std::numeric_limits<int64_t>::max();
  std::vector<bool> gone_;  // by id, from the first on
};

}  // namespace

bool EventLog::forget_gone() {
  const Gone gone(events_);
  bool unmet = false;
  for (const auto& each : events_) {
    unmet |= Gone::is(each, EventKind::Shortfall);
  }
  if (unmet) {
    return false;  // what was there at that moment is to be told
  }
  events_.erase(
      std::remove_if(events_.begin(), events_.end(),
                     [&gone](const Event& each) { return each.page < 0 || gone.has(each.page); }),
      events_.end());
  return events_.size() < kFewEvents;
}

}  // namespace delta

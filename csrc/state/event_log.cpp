#include "state/event_log.h"

#include <algorithm>
#include <limits>

namespace delta {
namespace {

bool is(const Event& event, EventKind kind) { return event.kind == static_cast<int32_t>(kind); }

// The pages that were packed and released among these events, in order. Pages have numbers in the
// order in which they were packed.
std::vector<int64_t> came_and_went(const std::vector<Event>& events) {
  int64_t first = std::numeric_limits<int64_t>::max();
  std::vector<int64_t> gone;
  for (const auto& each : events) {
    if (is(each, EventKind::Packed)) {
      first = std::min(first, each.page);
    } else if (is(each, EventKind::Released) && each.page >= first) {
      gone.push_back(each.page);
    }
  }
  std::sort(gone.begin(), gone.end());
  return gone;
}

}  // namespace

bool leave_out_gone(std::vector<Event>& events) {
  if (std::any_of(events.begin(), events.end(),
                  [](const Event& each) { return is(each, EventKind::Shortfall); })) {
    return false;
  }
  const std::vector<int64_t> gone = came_and_went(events);
  const auto left_out = [&gone](const Event& each) {
    return each.page < 0 || std::binary_search(gone.begin(), gone.end(), each.page);
  };
  events.erase(std::remove_if(events.begin(), events.end(), left_out), events.end());
  return events.size() < kFewEvents;
}

}  // namespace delta

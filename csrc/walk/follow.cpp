#include "walk/follow.h"

#include <algorithm>

#include "walk/tuning.h"

namespace delta {
namespace {

void follow_as_written(const Plan& plan, size_t value, const Moment& now, Row& row) {
  const int64_t interval = plan.interval_at(value, now.position());
  const int64_t exit = interval < 0 ? kStays : plan.exit[static_cast<size_t>(interval)];
  row.planned = exit != kStays;
  if (row.planned) {
    row.exit = static_cast<Exit>(exit);
  }
  row.weight = plan.weight[value] * (row.planned ? kTuning.planned_weight : 1);
  row.return_tick = -1;  // until it leaves
}

}  // namespace

void follow(const Plan& plan, size_t value, const Moment& now, Row& row) {
  if (plan.as_written) {
    follow_as_written(plan, value, now, row);
    return;
  }
  const int64_t exit = plan.exit_of(value);
  row.planned = exit != kStays;
  if (row.planned) {
    row.exit = static_cast<Exit>(exit);
  }
  const bool goes = row.rebuilt ? plan.dropped_twice[value] != 0 : row.planned;
  row.weight = plan.weight[value] * (goes ? kTuning.planned_weight : 1);
  const int64_t at = plan.copy_back_of(value);
  row.return_tick = at == kNever ? -1 : at + now.begin_tick;
}

int64_t next_use(const Plan& plan, size_t value, const Moment& now, Row& row) {
  const int64_t begin = plan.use_offsets[value];
  const int64_t end = plan.use_offsets[value + 1];
  const int64_t position = now.position();
  while (begin + row.next_use_cursor < end &&
         plan.uses[static_cast<size_t>(begin + row.next_use_cursor)] < position) {
    ++row.next_use_cursor;
  }
  if (begin + row.next_use_cursor >= end) {
    return -1;
  }
  return plan.uses[static_cast<size_t>(begin + row.next_use_cursor)] + now.begin_tick;
}

int64_t distance(Distance which, int64_t next, const Moment& now, const Row& row) {
  constexpr int64_t done = 1 << 20;
  int64_t found = 1;
  if (which == Distance::Staleness) {
    found = now.tick - row.last_use;
  } else if (which == Distance::NextUse) {
    if (next >= 0) {
      found = next - now.tick;
    } else if (now.phase == Phase::Forward) {
      found = now.tick - row.packed_at;
    } else {
      found = row.packed_at <= now.frontier ? now.frontier - row.packed_at : done;
    }
  }
  return std::max<int64_t>(1, found);
}

Exit default_exit(bool drops, bool swaps, double again_s, double copy_back_s) {
  if (!swaps || !drops) {
    return swaps ? Exit::Swap : Exit::Drop;
  }
  return again_s < copy_back_s ? Exit::Drop : Exit::Swap;
}

double default_weight(DefaultWeight which, int64_t bytes, double again_s) {
  const double most = static_cast<double>(std::max<int64_t>(1, bytes));
  switch (which) {
    case DefaultWeight::One:
      return 1;
    case DefaultWeight::PerByte:
      return 1 / most;
    default:
      return again_s / most;
  }
}

}  // namespace delta

// The constants of the walk. Nobody changes them in a running program: the runtime and whoever
// simulates it decide by the same ones.
#pragma once

#include <cstddef>
#include <cstdint>

namespace delta {

struct Tuning {
  // The walk.
  int64_t retry_ticks = 256;        // before a page is looked at again that could not go
  int64_t slack_bytes = 64 * 1024;  // allocator rounding of a handful of blocks
  int64_t ask_interval_ticks = 64;  // between two times that a policy in Python is asked

  // By a plan. Its pages go first: so heavy are they beside all others.
  double planned_weight = 1e-4;

  // The lanes.
  double horizon_s = 0.03;           // of lane time that unplanned copies back may take up
  int64_t horizon_bytes = 16 << 20;  // the same, before the lane's speed is known
  double early_write_back = 0.5;     // share of the budget from which unplanned pages are written
  size_t most_looked_at = 32;        // of those that wait to be written, at one boundary
};

inline constexpr Tuning kTuning{};

}  // namespace delta

// What the walk decides by: of a page, of a step, as plain numbers. So it decides alike for a page
// with memory behind it and for one that is only thought of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace delta {

enum class Phase : int32_t { Forward = 0, Backward = 1 };

// How a page leaves device memory.
enum class Exit : int8_t { Drop = 0, Swap = 1 };

// How far away the next use of a page is thought to be.
enum class Distance : int32_t { None = 0, Staleness = 1, NextUse = 2 };
// Weight of a page that no policy has seen yet.
enum class DefaultWeight : int32_t { SecondsPerByte = 0, PerByte = 1, One = 2 };

// How far a step has come.
struct Moment {
  int64_t tick = 0;        // ops so far, of all steps
  int64_t begin_tick = 0;  // of the step
  Phase phase = Phase::Forward;
  int64_t frontier = 0;  // tick at which the page that was unpacked last had been packed

  int64_t position() const { return tick - begin_tick; }
};

using ReturnOrder = std::pair<int64_t, int64_t>;  // ticks: of the copy back, of the next use

// One page with tickets.
struct Row {
  int64_t id = -1;
  int64_t bytes = 0;
  int32_t tickets = 0;
  double weight = 0;       // smallest goes first
  Exit exit = Exit::Drop;  // by the policy
  bool planned = false;    // to leave, by the plan
  bool rebuilt = false;    // it is there since ops were run again
  int64_t packed_at = 0;   // tick of the first save
  int64_t last_use = 0;    // tick
  int64_t retry_tick = 0;  // not a candidate before
  int32_t frees = 0;       // times that its device copy went, and the one below stayed
  int32_t next_use_cursor = 0;
  int64_t return_tick = -1;  // at which it is to be copied back; -1: not planned
  ReturnOrder return_order;  // its place among those that are swapped out
  size_t tier = 0;           // that its copy below is in, or was last; nearest first
};

}  // namespace delta

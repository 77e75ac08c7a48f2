// A plan, as the session carries it out: what is to become of each value of a step that comes
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace delta {

constexpr int64_t kStays = -1;  // the exit of a value that the plan does not move
constexpr int64_t kNever = -1;  // the tick of a copy back that there is none of

// Columns over the values of a recorded step, and over the intervals that a plan keeps them on the
// device for. delta_runtime/core/plan.py says what they mean. Ticks count from the step's begin.
//
// Note: what is carried out of a plan
//   1. A value leaves when room is needed: what a plan moves goes before all else, in the order of
//      the weights. So neither the begin nor the end of an interval is read.
//   2. What was copied starts to come back at its tick.
//   3. What is dropped twice goes again before all else when it was rebuilt.
//   4. One gap for each value; a plan with more is refused.
//   5. Of a step of the same ops on other shapes it says what leaves first, and how.
//   This holds for plans that are not to be carried out as written. For those that are, see the
//   Note in rebuild/plan_actions.h.
struct Plan {
  std::vector<uint64_t> fingerprint;  // of each value
  std::vector<uint64_t> maker;        // hash of the name of the op that made it
  std::vector<int64_t> bytes;
  std::vector<double> weight;
  std::vector<int8_t> dropped_twice;  // whether it goes again when it was rebuilt early
  std::vector<int64_t> use_offsets;   // CSR into uses
  std::vector<int64_t> uses;          // ticks at which autograd asked for it, increasing
  std::vector<int64_t> interval_offsets;
  std::vector<int64_t> begin;  // of each interval
  std::vector<int64_t> end;
  std::vector<int64_t> exit;  // an Exit each, or kStays
  std::vector<int64_t> copy_back_at;
  bool as_written = false;  // whether the intervals are carried out at op boundaries

  // Of a plan that is carried out as written, by sort(): its intervals in the order in which they
  // matter, as rows of the columns above.
  std::vector<int64_t> value_of;  // the value of each interval
  std::vector<int64_t> by_begin;  // those behind a value's first
  std::vector<int64_t> by_end;    // those at whose end the value leaves

  // Refuses, by an exception, what is malformed or cannot be carried out.
  void check() const;
  void sort();

  // How the value leaves the first time; kStays where it does not.
  int64_t exit_of(std::size_t key) const;
  int64_t copy_back_of(std::size_t key) const;
  // The interval of a value that has begun last at a tick, else its first; -1: it has none.
  int64_t interval_at(std::size_t key, int64_t tick) const;
  // Whether the value may be on the device after the op of this tick, and before the next: it is to
  // be there, or it has no intervals and is not for the plan to move.
  bool covers(std::size_t key, int64_t tick) const;

 private:
  void check_once(std::size_t key) const;        // it leaves once, at the most
  void check_as_written(std::size_t key) const;  // its intervals are in order
};

}  // namespace delta

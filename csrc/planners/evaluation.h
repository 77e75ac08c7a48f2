// Plays a backward pass with a choice of drops and swaps: the inner loop of the joint planner.
//
// The twin of delta_runtime/planners/evaluate.py and transfer_schedule.py, which say what it means.
// It does the same arithmetic in the same order, so that both give equal plans. Knows plain
// numbers alone, and is called without the GIL.
#pragma once

#include <cstdint>
#include <vector>

#include "planners/reruns.h"
#include "planners/saved_step.h"

namespace delta::planners {

// Columns as of `Evaluator`.
struct Played {
  SavedStep step;
  std::vector<double> base;      // bytes too much at each op with nothing away
  std::vector<double> spare;     // that a rebuild behind each op may hold for a moment
  std::vector<int64_t> made_at;  // the value number of each saved value
  std::vector<int64_t> gone;     // the op from which nobody holds it
  std::vector<int64_t> use_op;   // in order: the op behind which something is asked for,
  std::vector<int64_t> use_row;  // and what
};

// Columns as of `LaneTimes`; `by_begin` is empty where there are no lanes.
struct Lanes {
  std::vector<double> clock;  // at the begin of each op, and at the end of the last
  std::vector<double> ready;  // when each saved value may leave
  std::vector<double> out_s;  // of its copies
  std::vector<double> in_s;
  std::vector<double> price_s;    // that is counted for both
  std::vector<int64_t> by_begin;  // all rows, those first that may leave first
};

struct Outcome {
  double seconds = 0.0;
  std::vector<double> excess;  // bytes too much at each op
  std::vector<int64_t> back;   // op from which each dropped value is there again; -1: never
};

// Not for several threads at once: what it needs on the way is kept from call to call.
class Evaluation {
 public:
  // Throws std::invalid_argument where columns do not fit each other.
  Evaluation(Played played, RerunColumns reruns, Lanes lanes);

  int64_t n_saved() const { return played_.step.n_saved(); }
  int64_t n_ops() const { return played_.step.n_ops; }

  // Masks of n_saved; `swapped` may be null.
  Outcome play(const uint8_t* dropped, const uint8_t* dropped_twice, const uint8_t* swapped);

 private:
  void find_needs(const uint8_t* dropped);
  double lay_copies(const uint8_t* dropped, const uint8_t* swapped);
  bool is_there(int64_t row, int64_t at) const;
  Taken rebuild(int64_t row, int64_t at, const uint8_t* dropped_twice, Outcome& outcome);
  void find_missing(int64_t row, int64_t at);
  void sort_by_need(const uint8_t* swapped);

  Played played_;
  Reruns reruns_;
  Lanes lanes_;
  std::vector<int64_t> made_last_first_;
  // Of the call that goes on:
  std::vector<double> away_;
  std::vector<double> extra_;
  std::vector<int64_t> extra_ops_;
  std::vector<uint8_t> resident_;
  std::vector<int64_t> need_;
  std::vector<std::vector<int64_t>> asked_after_;  // when a value is asked for that is gone by then
  std::vector<int64_t> todo_;
  std::vector<int64_t> stack_;
  std::vector<int64_t> seen_;  // the mark of the rebuild that each row was seen in last
  int64_t mark_ = 0;
  std::vector<int64_t> by_need_;
  std::vector<int64_t> first_of_need_;
  std::vector<int64_t> away_from_;
};

}  // namespace delta::planners

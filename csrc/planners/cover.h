// The greedy choice of what to drop, for the joint planner.
//
// The twin of delta_runtime/planners/greedy_drops.py, which says what it means, with the same
// scores in the same order, so that both choose alike. Knows plain numbers alone.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "planners/profile.h"
#include "planners/saved_step.h"

namespace delta::planners {

// Columns as of `GreedyCover`.
struct Droppable {
  SavedStep step;
  Lists ops;                          // of the recipe of each saved value
  Lists children;                     // the saved values that are rebuilt from it
  std::vector<double> rerun_seconds;  // of each op
  std::vector<double> excess;         // bytes too much at each op
  std::vector<uint8_t> droppable;     // of each saved value
};

class Cover {
 public:
  // Throws std::invalid_argument where columns do not fit each other.
  Cover(Droppable step, double epsilon_s);

  // Goes on with the choice, for at least so many gains. Returns whether it is made.
  bool go_on(int64_t most_gains);

  int64_t gains() const { return gains_; }  // computed so far
  const std::vector<uint8_t>& dropped() const { return dropped_; }

 private:
  using Scored = std::pair<double, int64_t>;

  double marginal_seconds(int64_t row) const;
  void find_changes(int64_t row);
  void move_needs_of_ancestors(int64_t row);
  double gain(int64_t row);
  double score(int64_t row, double gain) const;
  void add(int64_t row);
  bool begin_round(int64_t last);
  void look_at_best();
  int64_t need_of(int64_t row) const;

  Droppable of_;
  double epsilon_s_;
  Profile profile_;
  std::vector<int64_t> need_;
  std::vector<uint8_t> dropped_;
  std::vector<int64_t> run_op_;  // planned recipes that run each op
  std::vector<Scored> heap_;     // the least score first
  int64_t next_row_ = 0;         // that the round begins with; n_saved once it goes on
  bool added_ = false;
  int64_t gains_ = 0;
  // What `find_changes` found:
  std::vector<Change> changes_;
  std::vector<int64_t> moved_;
  std::vector<int64_t> new_need_;
  std::vector<int64_t> seen_;
  std::vector<int64_t> stack_;
  int64_t mark_ = 0;
};

}  // namespace delta::planners

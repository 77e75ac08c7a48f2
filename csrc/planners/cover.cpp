#include "planners/cover.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace delta::planners {

Cover::Cover(Droppable step, double epsilon_s)
    : of_(std::move(step)), epsilon_s_(epsilon_s), profile_(of_.excess) {
  of_.step.check();
  const int64_t n = of_.step.n_saved();
  of_.ops.check(n, of_.step.n_ops);
  of_.children.check(n, n);
  check_count(of_.rerun_seconds.size(), of_.step.n_ops);
  check_count(of_.excess.size(), of_.step.n_ops);
  check_count(of_.droppable.size(), n);
  need_ = of_.step.own_need;
  dropped_.assign(at_(n), 0);
  run_op_.assign(at_(of_.step.n_ops), 0);
  new_need_.assign(at_(n), 0);
  seen_.assign(at_(n), 0);
}

double Cover::marginal_seconds(int64_t row) const {
  double seconds = 0.0;
  for (const int64_t op : of_.ops.of(row)) {
    if (run_op_[at_(op)] == 0) {
      seconds += of_.rerun_seconds[at_(op)];
    }
  }
  return seconds;
}

int64_t Cover::need_of(int64_t row) const {
  return seen_[at_(row)] == mark_ ? new_need_[at_(row)] : need_[at_(row)];
}

// `GreedyCover.changes`.
void Cover::find_changes(int64_t row) {
  ++mark_;
  changes_.clear();
  moved_.assign(1, row);
  int64_t need = of_.step.own_need[at_(row)];
  for (const int64_t child : of_.children.of(row)) {
    if (dropped_[at_(child)] != 0) {
      need = std::min(need, need_[at_(child)]);
    }
  }
  seen_[at_(row)] = mark_;
  new_need_[at_(row)] = need;
  if (need > of_.step.begin[at_(row)]) {
    changes_.push_back({of_.step.begin[at_(row)], need, -of_.step.bytes[at_(row)]});
  }
  move_needs_of_ancestors(row);
}

void Cover::move_needs_of_ancestors(int64_t row) {
  stack_.assign(1, row);
  while (!stack_.empty()) {
    const int64_t child = stack_.back();
    stack_.pop_back();
    for (const int64_t parent : of_.step.parents.of(child)) {
      const int64_t before = need_of(parent);
      const int64_t need = new_need_[at_(child)];
      if (dropped_[at_(parent)] == 0 || before <= need) {
        continue;
      }
      const int64_t sooner = std::max(need, of_.step.begin[at_(parent)]);
      if (before > sooner) {
        changes_.push_back({sooner, before, of_.step.bytes[at_(parent)]});
      }
      if (seen_[at_(parent)] != mark_) {
        seen_[at_(parent)] = mark_;
        moved_.push_back(parent);
      }
      new_need_[at_(parent)] = need;
      stack_.push_back(parent);
    }
  }
}

double Cover::gain(int64_t row) {
  ++gains_;
  find_changes(row);
  return changes_.empty() ? 0.0 : profile_.gain(changes_);
}

double Cover::score(int64_t row, double gain) const {
  return (marginal_seconds(row) + epsilon_s_) / gain;
}

void Cover::add(int64_t row) {
  find_changes(row);
  for (const auto& change : changes_) {
    profile_.apply(change);
  }
  for (const int64_t moved : moved_) {
    need_[at_(moved)] = new_need_[at_(moved)];
  }
  dropped_[at_(row)] = 1;
  for (const int64_t op : of_.ops.of(row)) {
    ++run_op_[at_(op)];
  }
}

// Looks at all that may be dropped still. Returns whether it came to the end.
bool Cover::begin_round(int64_t last) {
  for (; next_row_ < of_.step.n_saved() && gains_ < last; ++next_row_) {
    if (of_.droppable[at_(next_row_)] == 0 || dropped_[at_(next_row_)] != 0) {
      continue;
    }
    const double gained = gain(next_row_);
    if (gained > 0) {
      heap_.emplace_back(score(next_row_, gained), next_row_);
    }
  }
  if (next_row_ < of_.step.n_saved()) {
    return false;
  }
  std::make_heap(heap_.begin(), heap_.end(), std::greater<>());
  return true;
}

void Cover::look_at_best() {
  std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
  const auto [stale, row] = heap_.back();
  heap_.pop_back();
  const double gained = gain(row);
  if (gained <= 0) {
    return;  // for now: another choice may make it worth while, in the next round
  }
  const double now = score(row, gained);
  if (!heap_.empty() && now > heap_.front().first && now > stale) {
    heap_.emplace_back(now, row);
    std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
    return;
  }
  add(row);
  added_ = true;
}

bool Cover::go_on(int64_t most_gains) {
  const int64_t last = gains_ + most_gains;
  while (profile_.any_above()) {
    if (next_row_ < of_.step.n_saved() && !begin_round(last)) {
      return false;
    }
    while (!heap_.empty() && profile_.any_above()) {
      if (gains_ >= last) {
        return false;
      }
      look_at_best();
    }
    if (!std::exchange(added_, false)) {
      return true;
    }
    heap_.clear();
    next_row_ = 0;
  }
  return true;
}

}  // namespace delta::planners

#include "planners/evaluation.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace delta::planners {
namespace {

void check_played(const Played& played) {
  const auto& step = played.step;
  step.check();
  check_count(played.made_at.size(), step.n_saved());
  check_count(played.gone.size(), step.n_saved());
  check_count(played.base.size(), step.n_ops);
  check_count(played.spare.size(), step.n_ops);
  check_count(played.use_row.size(), static_cast<int64_t>(played.use_op.size()));
  check_within(played.gone, 0, step.n_ops);
  check_within(played.use_row, 0, step.n_saved() - 1);
  check_within(played.use_op, 0, step.n_ops - 1);
}

void check_lanes(const Lanes& lanes, int64_t n_saved, int64_t n_ops) {
  if (lanes.by_begin.empty()) {
    return;
  }
  check_count(lanes.clock.size(), n_ops + 1);
  for (const auto* column : {&lanes.ready, &lanes.out_s, &lanes.in_s, &lanes.price_s}) {
    check_count(column->size(), n_saved);
  }
  check_count(lanes.by_begin.size(), n_saved);
  check_within(lanes.by_begin, 0, n_saved - 1);
}

}  // namespace

Evaluation::Evaluation(Played played, RerunColumns reruns, Lanes lanes)
    : played_(std::move(played)), reruns_(std::move(reruns)), lanes_(std::move(lanes)) {
  check_played(played_);
  check_count(at_(reruns_.n_rows()), n_saved());
  check_lanes(lanes_, n_saved(), n_ops());
  made_last_first_.resize(at_(n_saved()));
  std::iota(made_last_first_.begin(), made_last_first_.end(), 0);
  std::sort(made_last_first_.begin(), made_last_first_.end(), [&](int64_t a, int64_t b) {
    return played_.made_at[at_(a)] > played_.made_at[at_(b)];
  });
  asked_after_.resize(at_(n_saved()));
  seen_.assign(at_(n_saved()), 0);
  away_from_.assign(at_(n_saved()), 0);
}

// `Evaluator.needs`.
void Evaluation::find_needs(const uint8_t* dropped) {
  need_ = played_.step.own_need;
  for (auto& times : asked_after_) {
    times.clear();
  }
  for (const int64_t child : made_last_first_) {
    auto& times = asked_after_[at_(child)];
    if (dropped[child] != 0) {
      times.push_back(need_[at_(child)]);
    }
    if (times.size() > 1) {
      std::sort(times.begin(), times.end());
      times.erase(std::unique(times.begin(), times.end()), times.end());
    }
    for (const int64_t at : times) {
      for (const int64_t parent : played_.step.parents.of(child)) {
        if (played_.gone[at_(parent)] > at) {
          need_[at_(parent)] = std::min(need_[at_(parent)], at);
        } else {
          asked_after_[at_(parent)].push_back(at);
        }
      }
    }
  }
}

// Those that are swapped, latest need first; among equals in their own order.
void Evaluation::sort_by_need(const uint8_t* swapped) {
  first_of_need_.assign(at_(n_ops() + 2), 0);
  by_need_.clear();
  int64_t count = 0;
  for (int64_t row = 0; row < n_saved(); ++row) {
    if (swapped[row] != 0) {
      ++first_of_need_[at_(n_ops() - need_[at_(row)])];
      ++count;
    }
  }
  int64_t before = 0;
  for (auto& each : first_of_need_) {
    before += std::exchange(each, before);
  }
  by_need_.resize(at_(count));
  for (int64_t row = 0; row < n_saved(); ++row) {
    if (swapped[row] != 0) {
      by_need_[at_(first_of_need_[at_(n_ops() - need_[at_(row)])]++)] = row;
    }
  }
}

// `LaneTimes.spans`: takes what is away off the account. Returns the seconds that are counted.
double Evaluation::lay_copies(const uint8_t* dropped, const uint8_t* swapped) {
  find_needs(dropped);
  const auto& clock = lanes_.clock;
  const auto n_times = static_cast<int64_t>(clock.size());
  double seconds = 0.0;
  double free_s = 0.0;
  int64_t op = 0;  // the first op that begins no earlier than a copy is done
  for (const int64_t row : lanes_.by_begin) {
    if (swapped[row] == 0) {
      continue;
    }
    free_s = std::max(free_s, lanes_.ready[at_(row)]) + lanes_.out_s[at_(row)];
    while (op < n_times && clock[at_(op)] < free_s) {
      ++op;
    }
    away_from_[at_(row)] = std::max(op, played_.step.begin[at_(row)]);
    seconds += lanes_.price_s[at_(row)];
  }
  sort_by_need(swapped);
  double latest_s = std::numeric_limits<double>::infinity();
  int64_t end = n_times;  // one past the last op that begins no later than a copy back
  for (const int64_t row : by_need_) {
    latest_s = std::min(latest_s, clock[at_(need_[at_(row)] + 1)]) - lanes_.in_s[at_(row)];
    while (end > 0 && clock[at_(end - 1)] > latest_s) {
      --end;
    }
    const int64_t begin = away_from_[at_(row)];
    if (begin < end - 1) {
      away_[at_(begin)] += played_.step.bytes[at_(row)];
      away_[at_(end - 1)] -= played_.step.bytes[at_(row)];
    }
  }
  return seconds;
}

bool Evaluation::is_there(int64_t row, int64_t at) const {
  return (resident_[at_(row)] != 0 || at < played_.step.begin[at_(row)]) &&
         played_.gone[at_(row)] > at;
}

// What has to be made for a value: to `todo_`, marked in `seen_`.
void Evaluation::find_missing(int64_t row, int64_t at) {
  ++mark_;
  todo_.assign(1, row);
  stack_.assign(1, row);
  seen_[at_(row)] = mark_;
  while (!stack_.empty()) {
    const int64_t child = stack_.back();
    stack_.pop_back();
    for (const int64_t parent : played_.step.parents.of(child)) {
      if (seen_[at_(parent)] != mark_ && !is_there(parent, at)) {
        seen_[at_(parent)] = mark_;
        todo_.push_back(parent);
        stack_.push_back(parent);
      }
    }
  }
}

Taken Evaluation::rebuild(int64_t row, int64_t at, const uint8_t* dropped_twice, Outcome& outcome) {
  find_missing(row, at);
  const auto stays = [&](int64_t made) {
    const bool goes_again = dropped_twice[made] != 0 && played_.step.own_need[at_(made)] > at;
    return made == row || !(goes_again || played_.gone[at_(made)] <= at);
  };
  const Taken taken = reruns_.run(todo_, stays);
  outcome.seconds += taken.seconds;
  for (const int64_t made : todo_) {
    if (stays(made) && resident_[at_(made)] == 0) {
      resident_[at_(made)] = 1;
      outcome.back[at_(made)] = at;
      away_[at_(at)] -= played_.step.bytes[at_(made)];
    }
  }
  return taken;
}

Outcome Evaluation::play(const uint8_t* dropped, const uint8_t* dropped_twice,
                         const uint8_t* swapped) {
  const auto& step = played_.step;
  Outcome outcome;
  outcome.back.assign(at_(n_saved()), -1);
  away_.assign(at_(n_ops() + 2), 0.0);
  extra_.assign(at_(n_ops()), -1.0);
  extra_ops_.clear();
  resident_.assign(at_(n_saved()), 1);
  for (int64_t row = 0; row < n_saved(); ++row) {
    if (dropped[row] != 0) {
      resident_[at_(row)] = 0;
      away_[at_(step.begin[at_(row)])] += step.bytes[at_(row)];
    }
  }
  if (swapped != nullptr && !lanes_.by_begin.empty()) {
    outcome.seconds += lay_copies(dropped, swapped);
  }
  for (size_t use = 0; use < played_.use_op.size(); ++use) {
    const int64_t at = played_.use_op[use];
    if (is_there(played_.use_row[use], at)) {
      continue;
    }
    if (extra_[at_(at)] < 0) {
      reruns_.begin();
    }
    const Taken taken = rebuild(played_.use_row[use], at, dropped_twice, outcome);
    if (extra_[at_(at)] < 0) {
      extra_ops_.push_back(at);
    }
    extra_[at_(at)] = std::max(extra_[at_(at)], taken.held);
  }
  for (int64_t row = 0; row < n_saved(); ++row) {
    if (dropped[row] != 0 && outcome.back[at_(row)] < 0) {
      const int64_t until = std::max(played_.gone[at_(row)], step.begin[at_(row)]);
      away_[at_(until)] -= step.bytes[at_(row)];
    }
  }
  outcome.excess.resize(at_(n_ops()));
  double away = 0.0;
  for (int64_t op = 0; op < n_ops(); ++op) {
    away += away_[at_(op)];
    outcome.excess[at_(op)] = played_.base[at_(op)] - away;
  }
  for (const int64_t at : extra_ops_) {
    outcome.excess[at_(at)] += std::max(extra_[at_(at)] - played_.spare[at_(at)], 0.0);
  }
  return outcome;
}

}  // namespace delta::planners

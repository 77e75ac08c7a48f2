#include "planners/reruns.h"

namespace delta::planners {

void RerunColumns::check() const {
  const auto n_ops = static_cast<int64_t>(seconds.size());
  const auto n_values = static_cast<int64_t>(bytes.size());
  check_count(workspace.size(), n_ops);
  check_count(row.size(), n_values);
  makes.check(n_ops, n_values);
  reads.check(n_ops, n_values);
  ops.check(n_rows(), n_ops);
  check_within(row, -1, n_rows() - 1);
}

Reruns::Reruns(RerunColumns columns) : columns_(std::move(columns)) {
  columns_.check();
  in_chain_.assign(at_(n_rows()), 0);
  staying_.assign(at_(n_rows()), 0);
  ran_.assign(columns_.seconds.size(), 0);
  ran_behind_.assign(columns_.seconds.size(), 0);
  ends_.assign(columns_.seconds.size(), 0.0);
  made_.assign(columns_.bytes.size(), 0);
  last_.assign(columns_.bytes.size(), 0);
}

bool Reruns::is_kept(int64_t value) const {
  const int64_t row = columns_.row[at_(value)];
  return row >= 0 && staying_[at_(row)] == mark_;
}

// Bytes of what an op makes that stays and is not there yet.
double Reruns::arrives(int64_t op) {
  const bool ran = std::exchange(ran_behind_[at_(op)], behind_) == behind_;
  double bytes = 0.0;
  for (const int64_t value : columns_.makes.of(op)) {
    if (columns_.takes_off && !ran && is_kept(value)) {
      bytes += columns_.bytes[at_(value)];
    }
  }
  return bytes;
}

Taken Reruns::play() {
  std::sort(order_.begin(), order_.end());
  for (const int64_t op : order_) {
    for (const int64_t value : columns_.reads.of(op)) {
      const int64_t row = columns_.row[at_(value)];
      const bool counts = row < 0 || in_chain_[at_(row)] == mark_;
      if (counts && made_[at_(value)] == mark_) {
        last_[at_(value)] = op;
      }
    }
    for (const int64_t value : columns_.makes.of(op)) {
      made_[at_(value)] = mark_;
      last_[at_(value)] = op;
    }
  }
  Taken taken{0.0, 0.0, 0.0, static_cast<int64_t>(order_.size())};
  arrives_.clear();
  for (const int64_t op : order_) {
    arrives_.push_back(arrives(op));
    taken.kept += arrives_.back();
  }
  double held = 0.0;
  double later = taken.kept;  // of it, what is not made yet
  for (size_t place = 0; place < order_.size(); ++place) {
    const int64_t op = order_[place];
    for (const int64_t value : columns_.makes.of(op)) {
      if (!is_kept(value)) {
        held += columns_.bytes[at_(value)];
        ends_[at_(last_[at_(value)])] += columns_.bytes[at_(value)];
      }
    }
    later -= arrives_[place];
    taken.held = std::max(taken.held, held + columns_.workspace[at_(op)] - later);
    held -= std::exchange(ends_[at_(op)], 0.0);
    taken.seconds += columns_.seconds[at_(op)];
  }
  return taken;
}

}  // namespace delta::planners

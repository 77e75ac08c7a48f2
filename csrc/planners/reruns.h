// What making dropped values again takes. The twin of delta_runtime/core/reruns.py, which says what
// it means.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "planners/saved_step.h"

namespace delta::planners {

// Columns as of `Reruns` in Python: over ops, values and saved values, numbered anew.
struct RerunColumns {
  std::vector<double> seconds;    // of each op
  std::vector<double> workspace;  // beyond what it makes
  std::vector<double> bytes;      // of each value
  std::vector<int64_t> row;       // of each value that is saved; -1
  Lists makes;                    // values of each op
  Lists reads;                    // of them, those that each op reads
  Lists ops;                      // of each saved value
  bool takes_off;                 // whether what stays and is not made yet is taken off

  int64_t n_rows() const { return ops.count(); }
  // Throws std::invalid_argument where columns do not fit each other.
  void check() const;
};

struct Taken {
  double seconds;
  double held;  // the most bytes, beyond what is there at the end
  double kept;  // bytes that it leaves there; 0 in a contracted step
  int64_t ops;  // that run
};

// Not for several threads at once: what it needs on the way is kept from call to call.
class Reruns {
 public:
  explicit Reruns(RerunColumns columns);

  int64_t n_rows() const { return columns_.n_rows(); }

  // Before the reruns behind an op of the step.
  void begin() { ++behind_; }

  // Of one rerun of `rows`, of which some stay.
  template <typename Stays>
  Taken run(const std::vector<int64_t>& rows, const Stays& stays) {
    ++mark_;
    order_.clear();
    for (const int64_t row : rows) {
      in_chain_[static_cast<size_t>(row)] = mark_;
      if (stays(row)) {
        staying_[static_cast<size_t>(row)] = mark_;
      }
      for (const int64_t op : columns_.ops.of(row)) {
        if (std::exchange(ran_[static_cast<size_t>(op)], mark_) != mark_) {
          order_.push_back(op);
        }
      }
    }
    return play();
  }

 private:
  bool is_kept(int64_t value) const;
  double arrives(int64_t op);
  Taken play();

  RerunColumns columns_;
  int64_t mark_ = 0;    // of this rerun
  int64_t behind_ = 0;  // of the op of the step
  std::vector<int64_t> order_;
  std::vector<int64_t> in_chain_;    // the mark of the rerun of which each row was last,
  std::vector<int64_t> staying_;     // in which it stayed,
  std::vector<int64_t> ran_;         // each op ran,
  std::vector<int64_t> made_;        // and each value was made
  std::vector<int64_t> ran_behind_;  // the mark of the op of the step behind which each op ran last
  std::vector<double> arrives_;      // bytes that stay, of each op in `order_`
  std::vector<int64_t> last_;        // op that reads each value last
  std::vector<double> ends_;         // bytes that go once an op ran
};

}  // namespace delta::planners

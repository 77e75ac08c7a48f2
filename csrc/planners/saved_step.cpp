#include "planners/saved_step.h"

namespace delta::planners {

void check_within(const std::vector<int64_t>& column, int64_t least, int64_t most) {
  for (const int64_t each : column) {
    if (each < least || each > most) {
      throw std::invalid_argument("a column names what is not there");
    }
  }
}

void check_count(size_t found, int64_t wanted) {
  if (static_cast<int64_t>(found) != wanted) {
    throw std::invalid_argument("columns do not fit each other");
  }
}

void Lists::check(int64_t count, int64_t most) const {
  if (offsets.empty()) {
    throw std::invalid_argument("lists without an offset");
  }
  check_count(offsets.size(), count + 1);
  if (offsets.front() != 0 || offsets.back() != static_cast<int64_t>(items.size())) {
    throw std::invalid_argument("offsets do not cut their column into pieces");
  }
  for (size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1]) {
      throw std::invalid_argument("offsets do not cut their column into pieces");
    }
  }
  check_within(items, 0, most - 1);
}

void SavedStep::check() const {
  const int64_t n = n_saved();
  check_count(begin.size(), n);
  check_count(own_need.size(), n);
  check_within(begin, 0, n_ops + 1);
  check_within(own_need, -1, n_ops - 1);
  parents.check(n, n);
}

}  // namespace delta::planners

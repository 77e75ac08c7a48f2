// A recorded step as the planners look at it: columns over its saved values and its ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace delta::planners {

// A row, as an index of a vector.
inline size_t at_(int64_t row) { return static_cast<size_t>(row); }

// Lists of rows, one after the other.
struct Lists {
  std::vector<int64_t> offsets;
  std::vector<int64_t> items;

  struct List {
    const int64_t* first;
    const int64_t* last;
    const int64_t* begin() const { return first; }
    const int64_t* end() const { return last; }
  };

  List of(int64_t row) const {
    return {items.data() + offsets[at_(row)], items.data() + offsets[at_(row + 1)]};
  }
  int64_t count() const { return static_cast<int64_t>(offsets.size()) - 1; }

  // Throws std::invalid_argument where they do not cut `items`, or name what is not below `most`.
  void check(int64_t count, int64_t most) const;
};

// What is common to all of it. Names as in delta_runtime/planners/greedy_drops.py.
struct SavedStep {
  int64_t n_ops = 0;
  std::vector<double> bytes;      // of each saved value
  std::vector<int64_t> begin;     // the op from which it may be away
  std::vector<int64_t> own_need;  // the op behind which it is asked for
  Lists parents;                  // the saved values that each is rebuilt from

  int64_t n_saved() const { return static_cast<int64_t>(bytes.size()); }
  // Throws std::invalid_argument where columns do not fit each other.
  void check() const;
};

// Throws std::invalid_argument unless all lie in [least, most].
void check_within(const std::vector<int64_t>& column, int64_t least, int64_t most);
// Throws std::invalid_argument unless there are so many.
void check_count(size_t found, int64_t wanted);

}  // namespace delta::planners

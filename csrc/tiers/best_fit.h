// Places in a range of bytes: best fit, lowest first; neighbours that are free grow together.
//
// Offsets only: what lies there (memory, a file) is its owner's. Not thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <set>

namespace delta {

class BestFit {
 public:
  // Every place begins at, and takes up, a multiple of `alignment`.
  BestFit(int64_t bytes, int64_t alignment);

  void extend(int64_t bytes);   // the range, at its end
  int64_t take(int64_t bytes);  // an offset; -1: no room
  void give_back(int64_t offset, int64_t bytes);
  int64_t rounded(int64_t bytes) const;  // what a place of so many bytes takes up
  int64_t highest_end() const { return highest_end_; }

 private:
  void add_hole(int64_t begin, int64_t bytes);

  int64_t alignment_;
  int64_t end_ = 0;                   // of the range
  int64_t highest_end_ = 0;           // of a place that there ever was
  std::map<int64_t, int64_t> holes_;  // bytes by offset
  // By size, lowest first: the first that is not smaller is the best.
  std::set<std::pair<int64_t, int64_t>> by_size_;
};

}  // namespace delta

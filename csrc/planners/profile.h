// Bytes too much at each op, in blocks: what a change would gain is mostly known from a block's
// least and most.
//
// All numbers are whole, and sums of them stay below 2^53: results do not depend on the order of
// additions.
#pragma once

#include <cstdint>
#include <vector>

namespace delta::planners {

// Ops [begin, end) at which so many bytes more are live.
struct Change {
  int64_t begin;
  int64_t end;
  double bytes;
};

class Profile {
 public:
  explicit Profile(std::vector<double> excess);

  // By how much these changes together would lessen the sum of what is above 0. They may overlap.
  double gain(const std::vector<Change>& changes);
  void apply(const Change& change);
  bool any_above() const;
  std::vector<double> excess() const;

 private:
  static constexpr int64_t kBlock = 64;
  struct Block {
    double least;
    double most;
    double shift;  // to be added to all of its ops
  };

  double gain_between(int64_t begin, int64_t end, double bytes) const;
  double gain_of_ops(int64_t begin, int64_t end, double bytes) const;
  void add_to_ops(int64_t begin, int64_t end, double bytes);

  std::vector<double> excess_;
  std::vector<Block> blocks_;
  struct Edge {
    int64_t at;
    double bytes;
  };
  std::vector<Edge> edges_;  // of the call that goes on
};

}  // namespace delta::planners

// Bytes too much at each op, in blocks, and a tree above the blocks: what a change would gain is
// mostly known from the least and the most of a few nodes.
//
// All numbers are whole, and sums of them stay below 2^53: results do not depend on the order of
// additions.
#pragma once

#include <cstddef>
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
  // Of the tree, or a block at its bottom. The children of node i are 2 i and 2 i + 1.
  struct Node {
    double least;
    double most;
    double shift;  // to be added to all of its ops; is in `least` and `most`
  };
  struct Span {
    int64_t begin;
    int64_t end;
  };

  double gain_between(int64_t begin, int64_t end, double bytes) const;
  // Of what lies in a node; `above` is the shift of all nodes above it.
  double gain_below(size_t node, Span of_node, Span asked, double bytes, double above) const;
  double gain_of_ops(Span ops, double bytes, double shift) const;
  void add_below(size_t node, Span of_node, const Change& change);
  void look_at_ops(size_t node, Span ops);
  void look_at_children(size_t node);

  std::vector<double> excess_;
  int64_t n_ops_;
  int64_t n_covered_;  // by the tree: blocks times a power of two
  std::vector<Node> nodes_;
  struct Edge {
    int64_t at;
    double bytes;
  };
  std::vector<Edge> edges_;  // of the call that goes on
};

}  // namespace delta::planners

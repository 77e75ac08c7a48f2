#include "planners/profile.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "planners/saved_step.h"

namespace delta::planners {
namespace {

constexpr size_t kRoot = 1;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

Profile::Profile(std::vector<double> excess)
    : excess_(std::move(excess)), n_ops_(static_cast<int64_t>(excess_.size())), n_covered_(kBlock) {
  while (n_covered_ < n_ops_) {
    n_covered_ *= 2;
  }
  const int64_t n_blocks = n_covered_ / kBlock;
  nodes_.resize(at_(2 * n_blocks), Node{kInfinity, -kInfinity, 0.0});
  for (int64_t op = 0; op < n_ops_; op += kBlock) {
    look_at_ops(at_(n_blocks + op / kBlock), {op, std::min(op + kBlock, n_ops_)});
  }
  for (size_t node = at_(n_blocks) - 1; node >= kRoot; --node) {
    look_at_children(node);
  }
}

void Profile::look_at_ops(size_t node, Span ops) {
  const auto [least, most] =
      std::minmax_element(excess_.begin() + ops.begin, excess_.begin() + ops.end);
  nodes_[node].least = *least + nodes_[node].shift;
  nodes_[node].most = *most + nodes_[node].shift;
}

void Profile::look_at_children(size_t node) {
  const Node& left = nodes_[2 * node];
  const Node& right = nodes_[2 * node + 1];
  nodes_[node].least = std::min(left.least, right.least) + nodes_[node].shift;
  nodes_[node].most = std::max(left.most, right.most) + nodes_[node].shift;
}

double Profile::gain_of_ops(Span ops, double bytes, double shift) const {
  double gained = 0.0;
  for (int64_t op = ops.begin; op < ops.end; ++op) {
    const double now = excess_[at_(op)] + shift;
    gained += std::max(now, 0.0) - std::max(now + bytes, 0.0);
  }
  return gained;
}

double Profile::gain_below(size_t node, Span of_node, Span asked, double bytes,
                           double above) const {
  const Span both{std::max(of_node.begin, asked.begin), std::min(of_node.end, asked.end)};
  if (both.begin >= both.end) {
    return 0.0;
  }
  const Node& here = nodes_[node];
  const double least = here.least + above;
  if (std::min(least, least + bytes) >= 0.0) {
    return -bytes * static_cast<double>(both.end - both.begin);
  }
  const double most = here.most + above;
  if (std::max(most, most + bytes) <= 0.0) {
    return 0.0;
  }
  above += here.shift;
  if (of_node.end - of_node.begin == kBlock) {
    return gain_of_ops(both, bytes, above);
  }
  const int64_t middle = (of_node.begin + of_node.end) / 2;
  return gain_below(2 * node, {of_node.begin, middle}, asked, bytes, above) +
         gain_below(2 * node + 1, {middle, of_node.end}, asked, bytes, above);
}

double Profile::gain_between(int64_t begin, int64_t end, double bytes) const {
  return gain_below(kRoot, {0, n_covered_}, {begin, end}, bytes, 0.0);
}

double Profile::gain(const std::vector<Change>& changes) {
  if (changes.size() == 1) {
    return gain_between(changes[0].begin, changes[0].end, changes[0].bytes);
  }
  edges_.clear();
  for (const auto& change : changes) {
    edges_.push_back({change.begin, change.bytes});
    edges_.push_back({change.end, -change.bytes});
  }
  std::sort(edges_.begin(), edges_.end(), [](const Edge& a, const Edge& b) { return a.at < b.at; });
  double gained = 0.0;
  double bytes = 0.0;
  for (size_t i = 0; i < edges_.size(); ++i) {
    if (i > 0 && bytes != 0.0) {
      gained += gain_between(edges_[i - 1].at, edges_[i].at, bytes);
    }
    bytes += edges_[i].bytes;
  }
  return gained;
}

void Profile::add_below(size_t node, Span of_node, const Change& change) {
  if (change.begin >= of_node.end || change.end <= of_node.begin) {
    return;
  }
  if (change.begin <= of_node.begin && of_node.end <= change.end) {
    nodes_[node].shift += change.bytes;
    nodes_[node].least += change.bytes;
    nodes_[node].most += change.bytes;
    return;
  }
  if (of_node.end - of_node.begin == kBlock) {
    const int64_t begin = std::max(of_node.begin, change.begin);
    const int64_t end = std::min(of_node.end, change.end);
    for (int64_t op = begin; op < end; ++op) {
      excess_[at_(op)] += change.bytes;
    }
    look_at_ops(node, {of_node.begin, std::min(of_node.end, n_ops_)});
    return;
  }
  const int64_t middle = (of_node.begin + of_node.end) / 2;
  add_below(2 * node, {of_node.begin, middle}, change);
  add_below(2 * node + 1, {middle, of_node.end}, change);
  look_at_children(node);
}

void Profile::apply(const Change& change) { add_below(kRoot, {0, n_covered_}, change); }

bool Profile::any_above() const { return nodes_[kRoot].most > 0.0; }

std::vector<double> Profile::excess() const {
  auto found = excess_;
  const size_t n_blocks = at_(n_covered_ / kBlock);
  for (size_t op = 0; op < found.size(); ++op) {
    for (size_t node = n_blocks + op / at_(kBlock); node >= kRoot; node /= 2) {
      found[op] += nodes_[node].shift;
    }
  }
  return found;
}

}  // namespace delta::planners

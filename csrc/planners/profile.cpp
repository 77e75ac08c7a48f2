#include "planners/profile.h"

#include <algorithm>
#include <utility>

namespace delta::planners {
namespace {

size_t at_(int64_t index) { return static_cast<size_t>(index); }

}  // namespace

Profile::Profile(std::vector<double> excess) : excess_(std::move(excess)) {
  const auto n = static_cast<int64_t>(excess_.size());
  blocks_.resize(at_((n + kBlock - 1) / kBlock), Block{0.0, 0.0, 0.0});
  for (int64_t op = 0; op < n; op += kBlock) {
    add_to_ops(op, std::min(op + kBlock, n), 0.0);
  }
}

// Within one block.
double Profile::gain_of_ops(int64_t begin, int64_t end, double bytes) const {
  const double shift = blocks_[at_(begin / kBlock)].shift;
  double gained = 0.0;
  for (int64_t op = begin; op < end; ++op) {
    const double now = excess_[at_(op)] + shift;
    gained += std::max(now, 0.0) - std::max(now + bytes, 0.0);
  }
  return gained;
}

double Profile::gain_between(int64_t begin, int64_t end, double bytes) const {
  double gained = 0.0;
  while (begin < end) {
    const int64_t until = std::min((begin / kBlock + 1) * kBlock, end);
    const auto& block = blocks_[at_(begin / kBlock)];
    if (std::min(block.least, block.least + bytes) >= 0.0) {
      gained -= bytes * static_cast<double>(until - begin);
    } else if (std::max(block.most, block.most + bytes) > 0.0) {
      gained += gain_of_ops(begin, until, bytes);
    }
    begin = until;
  }
  return gained;
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

// Within one block.
void Profile::add_to_ops(int64_t begin, int64_t end, double bytes) {
  auto& block = blocks_[at_(begin / kBlock)];
  const int64_t first = begin / kBlock * kBlock;
  const int64_t last = std::min(first + kBlock, static_cast<int64_t>(excess_.size()));
  if (begin == first && end == last && bytes != 0.0) {
    block.shift += bytes;
    block.least += bytes;
    block.most += bytes;
    return;
  }
  for (int64_t op = begin; op < end; ++op) {
    excess_[at_(op)] += bytes;
  }
  const auto [least, most] = std::minmax_element(excess_.begin() + first, excess_.begin() + last);
  block.least = *least + block.shift;
  block.most = *most + block.shift;
}

void Profile::apply(const Change& change) {
  for (int64_t begin = change.begin; begin < change.end;) {
    const int64_t until = std::min((begin / kBlock + 1) * kBlock, change.end);
    add_to_ops(begin, until, change.bytes);
    begin = until;
  }
}

bool Profile::any_above() const {
  return std::any_of(blocks_.begin(), blocks_.end(),
                     [](const Block& block) { return block.most > 0.0; });
}

std::vector<double> Profile::excess() const {
  auto found = excess_;
  for (size_t op = 0; op < found.size(); ++op) {
    found[op] += blocks_[op / at_(kBlock)].shift;
  }
  return found;
}

}  // namespace delta::planners

#include "tiers/best_fit.h"

#include <algorithm>
#include <iterator>

namespace delta {

BestFit::BestFit(int64_t bytes, int64_t alignment) : alignment_(alignment) { extend(bytes); }

void BestFit::extend(int64_t bytes) {
  const int64_t more = bytes / alignment_ * alignment_;
  if (more > 0) {
    end_ += more;
    give_back(end_ - more, more);
  }
}

int64_t BestFit::rounded(int64_t bytes) const {
  return (std::max<int64_t>(bytes, 1) + alignment_ - 1) / alignment_ * alignment_;
}

void BestFit::add_hole(int64_t begin, int64_t bytes) {
  holes_.emplace(begin, bytes);
  by_size_.emplace(bytes, begin);
}

int64_t BestFit::take(int64_t bytes) {
  const int64_t taken = rounded(bytes);
  const auto best = by_size_.lower_bound({taken, -1});
  if (best == by_size_.end()) {
    return -1;
  }
  const auto [size, begin] = *best;
  by_size_.erase(best);
  holes_.erase(begin);
  if (size > taken) {
    add_hole(begin + taken, size - taken);
  }
  highest_end_ = std::max(highest_end_, begin + taken);
  return begin;
}

void BestFit::give_back(int64_t offset, int64_t bytes) {
  int64_t begin = offset;
  int64_t end = offset + rounded(bytes);
  auto after = holes_.lower_bound(begin);
  if (after != holes_.end() && after->first == end) {
    end += after->second;
    by_size_.erase({after->second, after->first});
    after = holes_.erase(after);
  }
  if (after != holes_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      begin = before->first;
      by_size_.erase({before->second, before->first});
      holes_.erase(before);
    }
  }
  add_hole(begin, end - begin);
}

}  // namespace delta

// The highest live bytes during each op of a step, for people to look at.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "util/rows.h"

namespace delta {

// Under the session's lock, as all that follows. A step of many ops has a point for each few of
// them, with the highest of these.
class MemoryProfile {
 public:
  void begin_step() {
    points_.clear();
    ops_a_point_ = 1;
  }
  void end_step() { std::swap(points_, last_); }
  const std::vector<ProfilePoint>& last() const { return last_; }  // of the step that ended last

  void note(int64_t op, int64_t peak_bytes) {
    if (!points_.empty() && op < points_.back().op + ops_a_point_) {
      points_.back().peak_bytes = std::max(points_.back().peak_bytes, peak_bytes);
      return;
    }
    if (points_.size() == kMostPoints) {
      halve();
    }
    points_.push_back({op, peak_bytes});
  }

 private:
  static constexpr size_t kMostPoints = 1 << 13;

  void halve() {
    ops_a_point_ *= 2;
    for (size_t k = 0; k < kMostPoints / 2; ++k) {
      points_[k] = {points_[2 * k].op,
                    std::max(points_[2 * k].peak_bytes, points_[2 * k + 1].peak_bytes)};
    }
    points_.resize(kMostPoints / 2);
  }

  std::vector<ProfilePoint> points_;
  std::vector<ProfilePoint> last_;
  int64_t ops_a_point_ = 1;
};

}  // namespace delta

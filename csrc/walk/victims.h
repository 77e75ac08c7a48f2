// The victim queue: which pages go when room is needed, in which order, and by which way.
//
// Note: the order
//   1. What weighs least goes first, its weight divided by how far away its next use is; of two
//      alike that which was saved first.
//   2. What has a good copy below goes at once, its next way out being one that costs nothing now.
//   3. What is to be dropped goes in its turn. What is to be copied and has no copy yet comes last:
//      that is a wait. As long as what the plan wants to go is enough, what it wants to stay does.
#pragma once

#include <cstdint>
#include <vector>

#include "walk/row.h"
#include "walk/tuning.h"

namespace delta {

class VictimQueue;

// Carries out what is decided, and says what came of it.
class Carrier {
 public:
  // Takes in what the lanes have done meanwhile.
  virtual void reap() = 0;
  virtual void offer(VictimQueue& victims) = 0;  // all pages that nobody else holds
  // What the allocator has got back since room was asked for.
  virtual int64_t freed_bytes() = 0;
  // Its bytes on the device go, the copy below stays. False: it has no good one, or cannot go.
  virtual bool free_clean(Row& row) = 0;
  // They go, and ops run again when somebody asks. False: not now.
  virtual bool drop(Row& row) = 0;
  // Whether they go as soon as somebody has looked at them.
  virtual bool comes_free(const Row& row) = 0;
  virtual bool is_refused(const Row& row) = 0;  // no tier below has room for it
  // Begins to copy it out. False: it cannot be.
  virtual bool write_back(Row& row) = 0;
  // Looks at what may only go when that is done. False: nothing waits for it.
  virtual bool look() = 0;
  // Waits for the first of the copies out that this walk needs; if it needs none, for the first
  // copy back: what is back can go again. False: there is none.
  virtual bool wait() = 0;

 protected:
  ~Carrier() = default;
};

class VictimQueue {
 public:
  void reserve(size_t most) { order_.reserve(most); }
  // A page that nobody else holds, and how far away its next use is.
  void offer(Row& row, int64_t distance) {
    order_.push_back({row.weight / static_cast<double>(distance), &row});
  }
  // Has pages go, or begin to, until so many bytes are free or are coming free. Returns how many
  // are free.
  int64_t evict(int64_t bytes, bool swaps, Carrier& carrier);

 private:
  struct Scored {
    double score;
    Row* row;
  };

  Row& next();
  int64_t write_back(int64_t bytes, int64_t freed, Carrier& carrier);

  std::vector<Scored> order_;
  std::vector<Row*> dirty_;    // to be copied, if the others are not enough
  int64_t planned_bytes_ = 0;  // of those
  int64_t coming_bytes_ = 0;
};

// Makes room: walks, and waits for what is on its way, until so many bytes are free or nothing is
// left to wait for. Returns how many are free. A wait frees at least one page, unless somebody
// writes to it at that very moment: `most_turns` of them are enough.
int64_t make_room(int64_t bytes, bool swaps, size_t most_turns, Carrier& carrier);

// Bytes to be made free so that an op that needs so many fits; 0 or less: it does.
inline int64_t short_by(int64_t live_bytes, int64_t need_bytes, int64_t limit_bytes) {
  return live_bytes + need_bytes + kTuning.slack_bytes - limit_bytes;
}

// Whether a page is looked at in this walk: one that could not be dropped is left alone for a
// while, unless it can be copied.
inline bool is_due(const Row& row, int64_t tick, bool swaps) {
  return swaps || row.retry_tick <= tick;
}

}  // namespace delta

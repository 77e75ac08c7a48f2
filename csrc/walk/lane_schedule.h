// When pages are copied out early, and when they come back.
//
// Note: coming back
//   1. By the plan, if it says when; of two that it has come back at the same op, by their next
//      use. Else by the next use; if that is not known, what was saved last comes first.
//   2. Ahead of its use, and only into room that is left. What the plan says waits for its tick.
//      The rest keeps each lane busy for a moment, no longer: what comes too early takes the room
//      of what is needed before it.
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include "walk/row.h"

namespace delta {

// Whether the plan of this very step says when a page comes back. Evicted a second time, or in a
// later step, it does not, unless the plan is carried out as written: then it said so when the page
// left.
inline bool is_timed(const Row& row, const Moment& now, bool as_written) {
  return row.return_tick >= now.begin_tick && (row.frees <= 1 || as_written);
}

// The lane back from one tier.
struct LaneLoad {
  int64_t queued_bytes = 0;
  double seconds_per_byte = 0;  // 0: not known yet
};

// Pages whose bytes are below the device, in the order in which they come back.
class Returns {
 public:
  // `next`: the tick of its next use; -1: not known.
  void add(Row& row, int64_t next, const Moment& now, bool as_written);
  void remove(const Row& row) { rows_.erase({{row.return_order, row.id}, nullptr}); }

  // What is to begin to come back at this op boundary, while there is room for so many bytes.
  // `lanes` are those of the tiers, nearest first.
  std::vector<Row*> due(const Moment& now, bool as_written, int64_t room_bytes,
                        std::vector<LaneLoad> lanes) const;
  std::vector<Row*> all() const;

 private:
  struct Entry {
    std::pair<ReturnOrder, int64_t> place;  // with the page's id
    Row* row;

    bool operator<(const Entry& other) const { return place < other.place; }
  };

  std::set<Entry> rows_;
};

// Begins to copy pages out.
class Writer {
 public:
  virtual Row* find(int64_t id) = 0;      // null: it has no tickets any more, or has a copy
  virtual bool write_back(Row& row) = 0;  // false: not now

 protected:
  ~Writer() = default;
};

// Pages that were packed, and are copied out while there is time: by id, in that order.
class WriteBacks {
 public:
  void add(const Row& row) { ids_.push_back(row.id); }
  void clear() { ids_.clear(); }

  // At an op boundary. A step that follows a plan copies what the plan says. Another one copies
  // what is to be swapped at all, while the lanes out are idle and it is time to: see `is_early`.
  // What cannot be copied now waits for the next boundary.
  void go_on(bool following, bool time_to, Writer& writer);

 private:
  std::deque<int64_t> ids_;
};

// Whether it is time to copy what no plan says: in forward, with much of the budget used.
bool is_early(const Moment& now, int64_t live_bytes, int64_t budget_bytes);

}  // namespace delta

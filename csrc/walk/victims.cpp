#include "walk/victims.h"

#include <algorithm>

namespace delta {
namespace {

const auto later = [](const auto& a, const auto& b) {
  return a.score != b.score ? a.score > b.score : a.row->id > b.row->id;
};

}  // namespace

Row& VictimQueue::next() {
  std::pop_heap(order_.begin(), order_.end(), later);
  Row& row = *order_.back().row;
  order_.pop_back();
  return row;
}

int64_t VictimQueue::evict(int64_t bytes, bool swaps, Carrier& carrier) {
  std::make_heap(order_.begin(), order_.end(), later);
  int64_t freed = carrier.freed_bytes();
  while (!order_.empty() && freed + coming_bytes_ < bytes) {
    Row& row = next();
    bool gone = carrier.free_clean(row);
    if (!gone && carrier.comes_free(row)) {
      coming_bytes_ += row.bytes;
      continue;
    }
    if (!gone && row.exit == Exit::Swap && swaps && !carrier.is_refused(row)) {
      dirty_.push_back(&row);
      planned_bytes_ += row.planned ? row.bytes : 0;
      continue;
    }
    if (!gone && !row.planned && freed + planned_bytes_ >= bytes) {
      break;  // what the plan wants to go is on its way
    }
    if (!gone) {
      gone = carrier.drop(row);
      if (!gone && carrier.comes_free(row)) {
        coming_bytes_ += row.bytes;
        continue;
      }
      if (!gone && swaps && row.tickets > 0) {
        dirty_.push_back(&row);
      }
    }
    if (gone) {
      freed = carrier.freed_bytes();
    }
  }
  return write_back(bytes, freed, carrier);
}

// Begins to copy what has no copy yet, until enough is coming.
int64_t VictimQueue::write_back(int64_t bytes, int64_t freed, Carrier& carrier) {
  for (Row* row : dirty_) {
    if (freed + coming_bytes_ >= bytes) {
      break;
    }
    if (carrier.write_back(*row)) {
      coming_bytes_ += row->bytes;
    } else if (carrier.is_refused(*row) && carrier.drop(*row)) {
      freed = carrier.freed_bytes();
    }
  }
  return freed;
}

int64_t make_room(int64_t bytes, bool swaps, size_t most_turns, Carrier& carrier) {
  int64_t freed = 0;
  for (size_t turn = 0; turn < most_turns; ++turn) {
    carrier.reap();
    VictimQueue victims;
    carrier.offer(victims);
    freed = victims.evict(bytes, swaps, carrier);
    if (freed >= bytes) {
      break;
    }
    if (!carrier.look() && !carrier.wait()) {
      break;
    }
  }
  return freed;
}

}  // namespace delta

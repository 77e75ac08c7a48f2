// A plan that is carried out as written: which intervals have begun at an op boundary, and which
// have ended. The Note in rebuild/plan_actions.h says in which order that is carried out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "walk/plan.h"
#include "walk/row.h"

namespace delta {

// Where the bytes of a page are.
enum class Place : uint8_t { Device, Nowhere, Below, OnTheWay, Lost };

// Moves pages as such a plan says.
class Mover {
 public:
  virtual Row* row_of(int64_t value) = 0;  // that holds this value now; null: none does
  virtual Place place_of(const Row& row) = 0;
  virtual bool has_copy(const Row& row) = 0;  // below, finished or not
  // The page has come to another interval: what the plan says of it now.
  virtual void enter(Row& row) = 0;
  virtual void queue_write_back(Row& row) = 0;
  virtual void time_return(Row& row, int64_t tick) = 0;
  virtual bool drop(Row& row) = 0;
  virtual bool free_or_copy(Row& row) = 0;  // false: its copy has yet to be made
  // Its interval has ended and it is still there, while the next one begins, or the step ends.
  virtual void note_overdue() = 0;
  virtual void note_left() = 0;

 protected:
  ~Mover() = default;
};

class WrittenPlan {
 public:
  void begin(const Plan& plan);
  // Whatever has not left by now is overdue. `still` says whether the plan is followed still.
  void end(bool still, Mover& mover);

  // Goes through the intervals that have begun, as far as the next page that is away and is to be
  // brought back; null: there is none.
  Row* next_to_come(const Moment& now, Mover& mover);
  // Takes note of what has ended by now. Whether anything has yet to leave.
  bool note_ended(const Moment& now);
  std::vector<int64_t> take_due() { return std::exchange(to_leave_, {}); }  // in order of its end
  // Whether nothing is left to do of it.
  bool leave(int64_t interval, const Moment& now, Mover& mover);
  void put_back(const std::vector<int64_t>& due);  // it is tried again at the next op

 private:
  void enter(int64_t interval, Mover& mover);

  const Plan* plan_ = nullptr;
  size_t next_begin_ = 0;          // into Plan::by_begin
  size_t next_end_ = 0;            // into Plan::by_end
  std::vector<int64_t> now_in_;    // the interval that each value has come to
  std::vector<int64_t> to_leave_;  // intervals that have ended with their value still there
};

}  // namespace delta

#include "walk/written_plan.h"

#include <algorithm>

namespace delta {

void WrittenPlan::begin(const Plan& plan) {
  plan_ = &plan;
  next_begin_ = next_end_ = 0;
  now_in_.assign(plan.interval_offsets.begin(), plan.interval_offsets.end() - 1);
  to_leave_.clear();
}

void WrittenPlan::end(bool still, Mover& mover) {
  for (const int64_t interval : to_leave_) {
    Row* row = still ? mover.row_of(plan_->value_of[static_cast<size_t>(interval)]) : nullptr;
    if (row != nullptr && mover.place_of(*row) == Place::Device) {
      mover.note_overdue();
    }
  }
  to_leave_.clear();
  plan_ = nullptr;
}

Row* WrittenPlan::next_to_come(const Moment& now, Mover& mover) {
  const int64_t position = now.position();
  while (next_begin_ < plan_->by_begin.size()) {
    const int64_t interval = plan_->by_begin[next_begin_];
    const auto at = static_cast<size_t>(interval);
    if (plan_->begin[at] > position) {
      break;
    }
    ++next_begin_;
    enter(interval, mover);
    Row* row = mover.row_of(plan_->value_of[at]);
    const Place place = row != nullptr ? mover.place_of(*row) : Place::Lost;
    if ((place == Place::Nowhere || place == Place::Below) && position < plan_->end[at]) {
      return row;
    }
  }
  return nullptr;
}

// A value has come to an interval behind its first.
void WrittenPlan::enter(int64_t interval, Mover& mover) {
  const int64_t value = plan_->value_of[static_cast<size_t>(interval)];
  int64_t& now_in = now_in_[static_cast<size_t>(value)];
  Row* row = mover.row_of(value);
  const auto late = std::find(to_leave_.begin(), to_leave_.end(), now_in);
  if (late != to_leave_.end()) {
    to_leave_.erase(late);
    if (row != nullptr && mover.place_of(*row) == Place::Device) {
      mover.note_overdue();
    }
  }
  now_in = interval;
  if (row == nullptr) {
    return;
  }
  mover.enter(*row);
  if (row->planned && row->exit == Exit::Swap && !mover.has_copy(*row)) {
    mover.queue_write_back(*row);
  }
}

bool WrittenPlan::note_ended(const Moment& now) {
  for (; next_end_ < plan_->by_end.size() &&
         plan_->end[static_cast<size_t>(plan_->by_end[next_end_])] <= now.position();
       ++next_end_) {
    to_leave_.push_back(plan_->by_end[next_end_]);
  }
  return !to_leave_.empty();
}

bool WrittenPlan::leave(int64_t interval, const Moment& now, Mover& mover) {
  const auto at = static_cast<size_t>(interval);
  const int64_t value = plan_->value_of[at];
  Row* row = now_in_[static_cast<size_t>(value)] == interval ? mover.row_of(value) : nullptr;
  const Place place = row != nullptr ? mover.place_of(*row) : Place::Lost;
  if (place == Place::Nowhere || place == Place::Lost) {
    return true;
  }
  const int64_t back_at = plan_->copy_back_at[at];
  if (back_at != kNever && row->return_tick < 0) {
    mover.time_return(*row, now.begin_tick + back_at);
  }
  if (place != Place::Device) {  // room was short before, or it is on its way
    return place == Place::Below;
  }
  if (back_at != kNever && back_at <= now.position()) {  // it would come back at once
    return back_at == plan_->end[at];
  }
  const bool swaps = plan_->exit[at] == static_cast<int64_t>(Exit::Swap);
  if (!(swaps ? mover.free_or_copy(*row) : mover.drop(*row))) {
    return false;
  }
  mover.note_left();
  return true;
}

void WrittenPlan::put_back(const std::vector<int64_t>& due) {
  to_leave_.insert(to_leave_.end(), due.begin(), due.end());
}

}  // namespace delta

#include "rebuild/plan_actions.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "util/gil.h"
#include "util/signals.h"

namespace delta {

void PlanActions::forget() {
  for (const int64_t interval : to_leave_) {
    const bool same = plans_.as_written() && generation_ == plans_.generation();
    const Page* page =
        same ? plans_.page_of(plans_.plan().value_of[static_cast<size_t>(interval)]) : nullptr;
    counters_.plan_overdue += page != nullptr && page->residency() == Residency::Resident ? 1 : 0;
  }
  to_leave_.clear();
  generation_ = 0;
}

// Begins anew where the step goes by another plan than at the last op. Under the lock.
void PlanActions::keep_up() {
  if (generation_ == plans_.generation()) {
    return;
  }
  generation_ = plans_.generation();
  next_begin_ = next_end_ = 0;
  const auto& offsets = plans_.plan().interval_offsets;
  now_in_.assign(offsets.begin(), offsets.end() - 1);
  to_leave_.clear();
}

// ---------------------------------------------------------------- what comes

void PlanActions::after_op() {
  if (c10::InferenceMode::is_enabled()) {
    return;
  }
  for (;;) {
    PagePtr page;
    {
      Guard guard(lock_);
      page = next_to_come();
    }
    if (!page) {
      return;
    }
    const bool done = bring(*page);
    Guard guard(lock_);
    counters_.plan_actions += done ? 1 : 0;
    page.reset();  // it may die with this
  }
}

// Goes through the intervals that have begun, as far as the next page that is away. Under the lock.
PlanActions::PagePtr PlanActions::next_to_come() {
  if (!plans_.as_written()) {
    return {};
  }
  keep_up();
  const Plan& plan = plans_.plan();
  const int64_t position = plans_.position();
  for (; next_begin_ < plan.by_begin.size(); ++next_begin_) {
    const int64_t interval = plan.by_begin[next_begin_];
    const auto row = static_cast<size_t>(interval);
    if (plan.begin[row] > position) {
      break;
    }
    enter(interval);
    Page* page = plans_.page_of(plan.value_of[row]);
    const bool away = page != nullptr && (page->residency() == Residency::Dropped ||
                                          page->residency() == Residency::Swapped);
    if (away && position < plan.end[row]) {
      ++next_begin_;
      return PagePtr::reclaim_copy(page);
    }
  }
  return {};
}

// A value has come to an interval behind its first. Under the lock.
void PlanActions::enter(int64_t interval) {
  const int64_t value = plans_.plan().value_of[static_cast<size_t>(interval)];
  int64_t& now_in = now_in_[static_cast<size_t>(value)];
  Page* page = plans_.page_of(value);
  const auto late = std::find(to_leave_.begin(), to_leave_.end(), now_in);
  if (late != to_leave_.end()) {
    to_leave_.erase(late);
    counters_.plan_overdue += page != nullptr && page->residency() == Residency::Resident ? 1 : 0;
  }
  now_in = interval;
  if (page == nullptr) {
    return;
  }
  plans_.enter_interval(*page);
  if (page->planned && page->exit == Exit::Swap && !page->below.copy) {
    tiers_.queue_write_back(*page);
  }
}

// False: it is left to whoever asks for it.
bool PlanActions::bring(Page& page) {
  bool copied = false;
  {
    Guard guard(lock_);
    copied = page.residency() == Residency::Swapped;
  }
  if (!copied) {
    return rebuild(page);
  }
  const bool room = options_.budget_bytes == 0 || eviction_.look_ahead(page.bytes) == 0;
  return room && swap_in_.begin(page, /*prefetch=*/true);
}

// See the Note on ops inside of an observer.
bool PlanActions::rebuild(Page& page) {
  const Shield shield;
  const WithoutGil no_gil;
  try {
    return replay_.rebuild_early(page);
  } catch (const std::exception&) {
    return false;
  }
}

// ---------------------------------------------------------------- what leaves

void PlanActions::before_op() {
  Guard guard(lock_);
  if (!plans_.as_written()) {
    return;
  }
  keep_up();
  const Plan& plan = plans_.plan();
  for (; next_end_ < plan.by_end.size() &&
         plan.end[static_cast<size_t>(plan.by_end[next_end_])] <= plans_.position();
       ++next_end_) {
    to_leave_.push_back(plan.by_end[next_end_]);
  }
  if (to_leave_.empty()) {
    return;
  }
  if (!tiers_.none() && tiers_.reap()) {
    guard.unlock();  // what the transfers held is let go of
    on_device_.hash_returned();
    guard.lock();
  }
  std::vector<int64_t> due;
  due.swap(to_leave_);
  on_device_.begin_evictions();
  const auto is_done = [this](int64_t interval) { return leave(interval); };
  do {
    if (!plans_.as_written() || generation_ != plans_.generation()) {
      return;  // another thread has begun another step, or gone another way
    }
    due.erase(std::remove_if(due.begin(), due.end(), is_done), due.end());
  } while (!due.empty() && on_device_.take_hashes(guard));
  to_leave_.insert(to_leave_.end(), due.begin(), due.end());
}

// Whether nothing is left to do. Under the lock.
bool PlanActions::leave(int64_t interval) {
  const Plan& plan = plans_.plan();
  const auto row = static_cast<size_t>(interval);
  const auto value = static_cast<size_t>(plan.value_of[row]);
  Page* page = now_in_[value] == interval ? plans_.page_of(plan.value_of[row]) : nullptr;
  if (page == nullptr || page->residency() == Residency::Dropped ||
      page->residency() == Residency::Lost) {
    return true;
  }
  const int64_t back_at = plan.copy_back_at[row];
  if (back_at != kNever && page->below.prefetch_at < 0) {
    tiers_.time_return(*page, now_.begin_tick + back_at);
  }
  if (page->residency() != Residency::Resident) {  // room was short before, or it is on its way
    return page->residency() == Residency::Swapped;
  }
  if (back_at != kNever && back_at <= plans_.position()) {  // it would come back at once
    return back_at == plan.end[row];
  }
  const bool swaps = plan.exit[row] == static_cast<int64_t>(Exit::Swap);
  if (!(swaps ? free_or_copy(*page) : eviction_.drop(*page))) {
    return false;
  }
  ++counters_.plan_actions;
  ++counters_.boundary_evictions;
  return true;
}

bool PlanActions::free_or_copy(Page& page) {
  if (tiers_.free_clean(page)) {
    counters_.clean_evictions += page.below.clean_at_once ? 1 : 0;
    return true;
  }
  if (tiers_.write_back(page) && !page.below.copy->transfer->ended()) {
    page.below.clean_at_once = false;
  }
  return false;
}

}  // namespace delta

#include "rebuild/plan_actions.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "util/gil.h"
#include "util/signals.h"

namespace delta {

void PlanActions::forget() {
  schedule_.end(plans_.as_written() && generation_ == plans_.generation(), *this);
  generation_ = 0;
}

// Begins anew where the step goes by another plan than at the last op. Under the lock.
void PlanActions::keep_up() {
  if (generation_ != plans_.generation()) {
    generation_ = plans_.generation();
    schedule_.begin(plans_.plan());
  }
}

Place PlanActions::place_of(const Row& row) {
  switch (static_cast<const Page&>(row).residency()) {
    case Residency::Resident:
      return Place::Device;
    case Residency::Dropped:
      return Place::Nowhere;
    case Residency::Swapped:
      return Place::Below;
    case Residency::SwappingIn:
      return Place::OnTheWay;
    default:
      return Place::Lost;
  }
}

void PlanActions::note_left() {
  ++counters_.plan_actions;
  ++counters_.boundary_evictions;
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

// Under the lock.
PlanActions::PagePtr PlanActions::next_to_come() {
  if (!plans_.as_written()) {
    return {};
  }
  keep_up();
  Row* row = schedule_.next_to_come(now_, *this);
  return row != nullptr ? PagePtr::reclaim_copy(static_cast<Page*>(row)) : PagePtr();
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
  if (account_.withholds_room() && account_.room_for_returns() < page.bytes) {
    return false;
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
  if (!schedule_.note_ended(now_)) {
    return;
  }
  if (!tiers_.none() && tiers_.reap()) {
    guard.unlock();  // what the transfers held is let go of
    on_device_.hash_returned();
    guard.lock();
  }
  std::vector<int64_t> due = schedule_.take_due();
  on_device_.begin_evictions();
  const auto is_done = [this](int64_t interval) { return schedule_.leave(interval, now_, *this); };
  do {
    if (!plans_.as_written() || generation_ != plans_.generation()) {
      return;  // another thread has begun another step, or gone another way
    }
    due.erase(std::remove_if(due.begin(), due.end(), is_done), due.end());
  } while (!due.empty() && on_device_.take_hashes(guard));
  schedule_.put_back(due);
}

bool PlanActions::free_or_copy(Row& row) {
  Page& page = static_cast<Page&>(row);
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

#include "state/plan_table.h"

#include <algorithm>

namespace delta {
namespace {

constexpr double kPlannedWeight = 1e-4;  // of what a plan moves, to that of all else: it goes first

bool fits(const Plan& plan, int64_t key, const Value& value) {
  return key >= 0 && key < static_cast<int64_t>(plan.fingerprint.size()) &&
         plan.fingerprint[static_cast<size_t>(key)] == value.fingerprint;
}

}  // namespace

void PlanTable::set_plans(const std::vector<std::shared_ptr<Plan>>& plans) {
  plans_.assign(plans.begin(), plans.end());
  choose(nullptr);
}

void PlanTable::begin_step() {
  diverged_ = false;
  choose(plans_.empty() ? nullptr : plans_.front().get());
}

void PlanTable::choose(const Plan* plan) {
  plan_ = plan;
  const bool as_written = plan != nullptr && plan->as_written && !diverged_;
  as_written_.store(as_written, std::memory_order_relaxed);
  page_of_.assign(as_written ? plan->fingerprint.size() : 0, -1);
  ++generation_;
}

// From here on in this step values leave when room is needed, as they do without a plan.
void PlanTable::miss() {
  ++counters_.plan_misses;
  diverged_ = true;
  choose(nullptr);
}

bool PlanTable::attach(Page& page) {
  const int64_t key = now_.key_of(*page.current);
  if (plans_.empty() || key < 0) {
    return false;
  }
  if (plan_ == nullptr || !fits(*plan_, key, *page.current)) {
    const bool first = plan_ == nullptr;
    const auto known = std::find_if(plans_.begin(), plans_.end(), [&](const auto& plan) {
      return fits(*plan, key, *page.current);
    });
    choose(known == plans_.end() ? nullptr : known->get());
    if (plan_ != nullptr && !first) {
      // Two steps that begin alike: what was saved so far is in this plan too, and goes by it now.
      for (const auto& [id, other] : pages_.managed()) {
        if (other->packed_at >= now_.begin_tick &&
            fits(*plan_, other->current->key, *other->current)) {
          follow(*other);
        }
      }
    }
  }
  if (plan_ == nullptr) {
    miss();
    return false;
  }
  follow(page);
  return true;
}

void PlanTable::follow(Page& page) {
  const auto row = static_cast<size_t>(page.current->key);
  if (plan_->as_written) {
    follow_as_written(page, row);
    return;
  }
  const int64_t exit = plan_->exit_of(row);
  page.planned = exit != kStays;
  if (page.planned) {
    page.exit = static_cast<Exit>(exit);
  }
  const bool goes = page.rebuilt ? plan_->dropped_twice[row] != 0 : page.planned;
  page.weight = plan_->weight[row] * (goes ? kPlannedWeight : 1);
  const int64_t at = plan_->copy_back_of(row);
  page.below.prefetch_at = at == kNever ? -1 : at + now_.begin_tick;
}

// Its weight and its way out are of use where room is short all the same.
void PlanTable::follow_as_written(Page& page, size_t row) {
  const int64_t interval = plan_->interval_at(row, position());
  const int64_t exit = interval < 0 ? kStays : plan_->exit[static_cast<size_t>(interval)];
  page.planned = exit != kStays;
  if (page.planned) {
    page.exit = static_cast<Exit>(exit);
  }
  page.weight = plan_->weight[row] * (page.planned ? kPlannedWeight : 1);
  page.below.prefetch_at = -1;  // until it leaves
  if (as_written()) {
    page_of_[row] = page.id;
  }
}

Page* PlanTable::page_of(int64_t value) {
  const int64_t id = page_of_[static_cast<size_t>(value)];
  Page* page = id < 0 ? nullptr : pages_.managed(id);
  return page != nullptr && now_.key_of(*page->current) == value ? page : nullptr;
}

bool PlanTable::keeps(const Value& value) const {
  const int64_t key = now_.key_of(value);
  return !as_written() || !fits(*plan_, key, value) ||
         plan_->covers(static_cast<size_t>(key), position());
}

void PlanTable::note_asked(const Page& page) {
  if (as_written() && page.residency() != Residency::Resident && !keeps(*page.current)) {
    miss();  // backward does not go as it went when the step was recorded
  }
}

// How a page leaves while no policy has said so: the way that takes less time.
Exit PlanTable::default_exit(const Page& page, double seconds_in) const {
  if (!options_.swap || !options_.drop) {
    return options_.swap ? Exit::Swap : Exit::Drop;
  }
  const double again_s = page.current->producer ? page.current->producer->seconds : 1;
  return again_s < seconds_in ? Exit::Drop : Exit::Swap;
}

double PlanTable::default_weight(const Page& page) const {
  const double bytes = static_cast<double>(std::max<int64_t>(1, page.bytes));
  switch (default_weight_) {
    case DefaultWeight::One:
      return 1;
    case DefaultWeight::PerByte:
      return 1 / bytes;
    default:
      return (page.current->producer ? page.current->producer->seconds : 1) / bytes;
  }
}

int64_t PlanTable::next_use_of(Page& page) const {
  const int64_t key = now_.key_of(*page.current);
  if (plan_ == nullptr || !fits(*plan_, key, *page.current)) {
    return -1;
  }
  const int64_t begin = plan_->use_offsets[static_cast<size_t>(key)];
  const int64_t end = plan_->use_offsets[static_cast<size_t>(key) + 1];
  const int64_t position = now_.tick - now_.begin_tick;
  while (begin + page.next_use_cursor < end &&
         plan_->uses[static_cast<size_t>(begin + page.next_use_cursor)] < position) {
    ++page.next_use_cursor;
  }
  if (begin + page.next_use_cursor >= end) {
    return -1;
  }
  return plan_->uses[static_cast<size_t>(begin + page.next_use_cursor)] + now_.begin_tick;
}

int64_t PlanTable::distance_of(Page& page) const {
  constexpr int64_t done = 1 << 20;
  int64_t distance = 1;
  if (distance_ == Distance::Staleness) {
    distance = now_.tick - page.last_use;
  } else if (distance_ == Distance::NextUse) {
    const int64_t next = next_use_of(page);
    if (next >= 0) {
      distance = next - now_.tick;
    } else if (now_.phase == Phase::Forward) {
      distance = now_.tick - page.packed_at;
    } else {
      distance = page.packed_at <= now_.frontier ? now_.frontier - page.packed_at : done;
    }
  }
  return std::max<int64_t>(1, distance);
}

void PlanTable::publish(const std::vector<int64_t>& ids, const std::vector<double>& weights,
                        const std::vector<int8_t>& exits) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (Page* page = pages_.managed(ids[i]); page != nullptr) {
      page->weight = weights[i];
      page->exit = static_cast<Exit>(exits[i]);
    }
  }
}

}  // namespace delta

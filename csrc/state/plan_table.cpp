#include "state/plan_table.h"

#include <algorithm>

#include "walk/follow.h"

namespace delta {
namespace {

bool is_of(const Plan& plan, int64_t key, const Value& value) {
  return key >= 0 && key < static_cast<int64_t>(plan.fingerprint.size()) &&
         plan.fingerprint[static_cast<size_t>(key)] == value.fingerprint;
}

// Whether an op of the same name made the value of the plan's step.
bool is_alike(const Plan& plan, int64_t key, const Value& value) {
  return key >= 0 && key < static_cast<int64_t>(plan.maker.size()) && value.producer &&
         plan.maker[static_cast<size_t>(key)] == value.producer->info->name_hash;
}

// Of two plans for other shapes: the one that moves enough, and no more than it must.
bool is_nearer(int64_t a_bytes, int64_t b_bytes, int64_t bytes) {
  if ((a_bytes >= bytes) != (b_bytes >= bytes)) {
    return a_bytes >= bytes;
  }
  return a_bytes >= bytes ? a_bytes < b_bytes : a_bytes > b_bytes;
}

}  // namespace

void PlanTable::set_plans(const std::vector<std::shared_ptr<Plan>>& plans) {
  plans_.assign(plans.begin(), plans.end());
  choose(nullptr);
}

void PlanTable::begin_step() {
  diverged_ = of_other_shapes_ = false;
  choose(plans_.empty() ? nullptr : plans_.front().get());
}

void PlanTable::choose(const Plan* plan) {
  plan_ = plan;
  const bool as_written = plan != nullptr && plan->as_written && !diverged_;
  as_written_.store(as_written, std::memory_order_relaxed);
  page_of_.assign(as_written ? plan->fingerprint.size() : 0, -1);
  ++generation_;
}

int64_t PlanTable::followed() const {
  const auto at = std::find_if(plans_.begin(), plans_.end(),
                               [&](const auto& plan) { return plan.get() == plan_; });
  return diverged_ || at == plans_.end() ? -1 : at - plans_.begin();
}

// From here on in this step values leave when room is needed, as they do without a plan.
void PlanTable::miss() {
  ++counters_.plan_misses;
  diverged_ = true;
  choose(nullptr);
}

bool PlanTable::fits(int64_t key, const Value& value) const {
  return of_other_shapes_ ? is_alike(*plan_, key, value) : is_of(*plan_, key, value);
}

// A step that nobody has seen, of ops that somebody has: what leaves first in the nearest one does
// so here.
bool PlanTable::choose_alike(int64_t key, const Value& value) {
  const Plan* nearest = nullptr;
  for (const auto& plan : plans_) {
    if (is_alike(*plan, key, value)) {
      const auto at = static_cast<size_t>(key);
      if (nearest == nullptr || is_nearer(plan->bytes[at], nearest->bytes[at], value.bytes)) {
        nearest = plan.get();
      }
    }
  }
  miss();
  of_other_shapes_ = nearest != nullptr;
  choose(nearest);
  return of_other_shapes_;
}

bool PlanTable::attach(Page& page) {
  const int64_t key = now_.key_of(*page.current);
  if (plans_.empty() || key < 0) {
    return false;
  }
  if (plan_ == nullptr || !fits(key, *page.current)) {
    const bool first = plan_ == nullptr;
    of_other_shapes_ = false;
    const auto known = std::find_if(plans_.begin(), plans_.end(), [&](const auto& plan) {
      return is_of(*plan, key, *page.current);
    });
    choose(known == plans_.end() ? nullptr : known->get());
    if (plan_ != nullptr && !first) {
      // Two steps that begin alike: what was saved so far is in this plan too, and goes by it now.
      for (const auto& [id, other] : pages_.managed()) {
        if (other->packed_at >= now_.begin_tick &&
            is_of(*plan_, other->current->key, *other->current)) {
          follow(*other);
        }
      }
    }
  }
  if (plan_ == nullptr && !choose_alike(key, *page.current)) {
    return false;
  }
  follow(page);
  return true;
}

void PlanTable::follow(Page& page) {
  const auto value = static_cast<size_t>(page.current->key);
  delta::follow(*plan_, value, now_, page);
  if (as_written()) {
    page_of_[value] = page.id;
  }
}

Page* PlanTable::page_of(int64_t value) {
  const int64_t id = page_of_[static_cast<size_t>(value)];
  Page* page = id < 0 ? nullptr : pages_.managed(id);
  return page != nullptr && now_.key_of(*page->current) == value ? page : nullptr;
}

bool PlanTable::keeps(const Value& value) const {
  const int64_t key = now_.key_of(value);
  return !as_written() || !fits(key, value) || plan_->covers(static_cast<size_t>(key), position());
}

void PlanTable::note_asked(const Page& page) {
  if (as_written() && page.residency() != Residency::Resident && !keeps(*page.current)) {
    miss();  // backward does not go as it went when the step was recorded
  }
}

Exit PlanTable::default_exit(const Page& page, double seconds_in) const {
  const double again_s = page.current->producer ? page.current->producer->seconds : 1;
  return delta::default_exit(options_.drop, options_.swap, again_s, seconds_in);
}

double PlanTable::default_weight(const Page& page) const {
  const double again_s = page.current->producer ? page.current->producer->seconds : 1;
  return delta::default_weight(default_weight_, page.bytes, again_s);
}

int64_t PlanTable::next_use_of(Page& page) const {
  const int64_t key = now_.key_of(*page.current);
  if (plan_ == nullptr || !fits(key, *page.current)) {
    return -1;
  }
  return next_use(*plan_, static_cast<size_t>(key), now_, page);
}

int64_t PlanTable::distance_of(Page& page) const {
  const int64_t next = distance_ == Distance::NextUse ? next_use_of(page) : -1;
  return distance(distance_, next, now_, page);
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

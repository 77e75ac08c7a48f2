#include "state/plan_table.h"

#include <algorithm>

#include "walk/follow.h"

namespace delta {
namespace {

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
  return !as_written() || !fits(*plan_, key, value) ||
         plan_->covers(static_cast<size_t>(key), position());
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
  if (plan_ == nullptr || !fits(*plan_, key, *page.current)) {
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

// The plans of the steps that are known, and the weights and ways out that pages have by them or by
// a policy.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "state/session_state.h"
#include "walk/plan.h"
#include "walk/row.h"

namespace delta {

// Under the session's lock, but for the settings.
class PlanTable : public Part {
 public:
  explicit PlanTable(SessionState& state) : Part(state) {}

  void set_plans(const std::vector<std::shared_ptr<Plan>>& plans);  // latest first
  void begin_step();
  bool following() const { return plan_ != nullptr; }  // whether this step goes by one
  // Which of the plans this step goes by at its end, if it has missed none; -1: none.
  int64_t followed() const;
  // Whether it is carried out as written, which ends with the first value that it does not know.
  // Asked without the lock too.
  bool as_written() const { return as_written_.load(std::memory_order_relaxed); }
  // Gives a page what the plan of this step says of it; false: no plan knows it.
  bool attach(Page& page);
  int64_t next_use_of(Page& page) const;  // a tick; -1: unknown

  // Of a plan that is carried out as written.
  const Plan& plan() const { return *plan_; }
  uint64_t generation() const { return generation_; }  // another with each change of plan
  int64_t position() const { return now_.position(); }
  Page* page_of(int64_t value);                      // that holds this value now; null: none does
  void enter_interval(Page& page) { follow(page); }  // that has begun last
  // Whether what was rebuilt on the way stays; see the Note in rebuild/plan_actions.h.
  bool keeps(const Value& value) const;
  // Autograd asks for a page that is away.
  void note_asked(const Page& page);

  // By a policy, where there is no plan. `seconds_in` is what copying the page back takes.
  void set_default_weight(DefaultWeight which) { default_weight_ = which; }
  void set_distance(Distance which) { distance_ = which; }
  double default_weight(const Page& page) const;
  Exit default_exit(const Page& page, double seconds_in) const;
  // How far away the next use of a page is, in ticks, as far as the policy wants to know.
  int64_t distance_of(Page& page) const;
  void publish(const std::vector<int64_t>& ids, const std::vector<double>& weights,
               const std::vector<int8_t>& exits);

 private:
  void choose(const Plan* plan);
  bool fits(int64_t key, const Value& value) const;  // the plan of this step
  bool choose_alike(int64_t key, const Value& value);
  void miss();
  void follow(Page& page);

  std::vector<std::shared_ptr<const Plan>> plans_;
  const Plan* plan_ = nullptr;  // that this step follows
  std::atomic<bool> as_written_{false};
  bool diverged_ = false;         // this step has missed a plan
  bool of_other_shapes_ = false;  // the plan is one for the same ops on other shapes
  std::vector<int64_t> page_of_;  // ids, by value, under a plan as written; -1: none yet
  uint64_t generation_ = 0;
  Distance distance_ = Distance::None;
  DefaultWeight default_weight_ = DefaultWeight::SecondsPerByte;
};

}  // namespace delta

// Carrying out a plan as written: at op boundaries, whether room is needed or not.
//
// Note: a plan as written
//   Ticks are those of ops. Between the ops of ticks b and b + 1, in this order:
//   1. Autograd asks for values, and gets them. This is position b, as all up to rule 3: a value is
//      to be there if one of its intervals [begin, end) has b in it.
//   2. Values of which an interval but the first begins at b, and that were dropped, are rebuilt;
//      of one that is in a tier below the copy back begins, if it has not. What is rebuilt on the
//      way stays only if it is to be there at b; so does what is rebuilt because autograd asked.
//      The judge of plans (planners/validate.py) rebuilds here too, from what leaves at b + 1.
//   3. The tick of the next op is reached.
//   4. Values leave whose interval ends at b + 1. One that cannot leave (somebody else holds it,
//   its
//      copy out is not done) is tried again at each op, until it has left, autograd lets go of it,
//      its copy back would begin, or its next interval begins. Where room is short, Eviction waits
//      for its copy. A copy that would come back at the tick at which it leaves is spared.
//   5. Copies back begin whose tick is b + 1, or was, and for which there was no room before.
//   6. Only then is room made for the op, in the order of the weights, if it is still short.
//   A step that saves what the plan does not know, or asks for a value that the plan has away, goes
//   another way than the plan: from there on nothing is carried out (PlanTable::miss), and what is
//   rebuilt on the way stays again.
//
// Note: ops inside of an observer
//   Rebuilding runs ops in the callback that announces another op. That is as good as in an unpack:
//   the session's lock is not held, no record is open, and the dispatcher holds no lock. Replay
//   shuts out whatever the announced op runs under (autograd, autocast, transforms, modes), runs
//   each op on the thread, and with the numbers, of its first run, and puts back what it sets. What
//   differs:
//   1. A callback cannot throw. What goes wrong is left to the unpack that asks for the value: it
//      runs the same ops again, and raises.
//   2. For the same reason no signal handler may run: a Shield holds signals back.
//   3. The thread may hold the GIL, which another thread may need to go on. It is let go of.
//   4. In inference mode nothing is rebuilt early.
#pragma once

#include <vector>

#include "rebuild/replay.h"
#include "walk/written_plan.h"

namespace delta {

class PlanActions : public Part, private Mover {
 public:
  PlanActions(SessionState& state, DeviceEvidence& on_device, PlanTable& plans, SwapTiers& tiers,
              Eviction& eviction, SwapIn& swap_in, Replay& replay)
      : Part(state),
        on_device_(on_device),
        plans_(plans),
        tiers_(tiers),
        eviction_(eviction),
        swap_in_(swap_in),
        replay_(replay) {}

  void forget();  // a step begins or ends; under the lock

  // While PlanTable::as_written(), without the lock.
  void after_op();   // rule 2; before the tick moves on
  void before_op();  // rule 4

 private:
  using PagePtr = c10::intrusive_ptr<Page>;

  void keep_up();
  PagePtr next_to_come();
  bool bring(Page& page);
  bool rebuild(Page& page);

  Row* row_of(int64_t value) override { return plans_.page_of(value); }
  Place place_of(const Row& row) override;
  bool has_copy(const Row& row) override { return static_cast<const Page&>(row).below.copy; }
  void enter(Row& row) override { plans_.enter_interval(static_cast<Page&>(row)); }
  void queue_write_back(Row& row) override { tiers_.queue_write_back(static_cast<Page&>(row)); }
  void time_return(Row& row, int64_t tick) override {
    tiers_.time_return(static_cast<Page&>(row), tick);
  }
  bool drop(Row& row) override { return eviction_.drop(static_cast<Page&>(row)); }
  bool free_or_copy(Row& row) override;
  void note_overdue() override { ++counters_.plan_overdue; }
  void note_left() override;

  DeviceEvidence& on_device_;
  PlanTable& plans_;
  SwapTiers& tiers_;
  Eviction& eviction_;
  SwapIn& swap_in_;
  Replay& replay_;

  uint64_t generation_ = 0;  // of the plan that the schedule is of
  WrittenPlan schedule_;
};

}  // namespace delta

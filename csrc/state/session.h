// One runtime: its parts, and what happens to all of them when it is entered and left, and with
// each step.
//
// Each part owns its state, and refers to those above it in the list below, never to one behind it.
#pragma once

#include "evict/eviction.h"
#include "evict/stress.h"
#include "evict/swap_in.h"
#include "evict/swap_tiers.h"
#include "observe/idle_step.h"
#include "observe/op_observer.h"
#include "observe/outside_memory.h"
#include "observe/saved_tensors.h"
#include "observe/step_log.h"
#include "observe/tensor_pages.h"
#include "pool/limited_allocator.h"
#include "rebuild/device_evidence.h"
#include "rebuild/evidence.h"
#include "rebuild/plan_actions.h"
#include "rebuild/recipes.h"
#include "rebuild/replay.h"
#include "state/plan_table.h"
#include "state/session_state.h"
#include "state/sources.h"

namespace delta {

struct Session : c10::intrusive_ptr_target {
  explicit Session(SessionOptions options);
  ~Session() override;

  void enter();  // on this thread: callback in, rescue on
  void leave();  // on that thread, or when it has ended
  void rest();   // left for good, or until it is entered again
  // Nothing is saved by it any more, as it seemed: it is watched no longer, if that still holds.
  // With the GIL, which whoever enters it or begins an idle step has too.
  void end_watch_if_over();
  void begin_step();
  void end_step();
  void set_budget(int64_t bytes);  // what is kept to from now on
  void count_excesses();           // allocations that passed an accelerator's limit, so far

  // Instead of entering: has an idle step begin on this thread. False: something that is saved has
  // to be watched.
  bool begin_idle(int64_t most_bytes);

  c10::Device device() const { return state.options.device; }
  Levels levels() const;

  SessionState state;
  int64_t surprises = 0;  // rescues, values that no plan knew, and memory that was hard to find
  int64_t surprised_step = 0;  // the latest that began behind one
  IdleStep idle{state.account};
  PlanTable plans{state};
  Sources sources{state};
  OutsideMemory outside{state, sources};
  TensorPages tensors{state, sources, outside};
  DeviceEvidence on_device{state};
  Evidence evidence{state, sources, on_device};
  Recipes recipes{state, sources, evidence};
  SwapTiers tiers{state, evidence, recipes, plans};
  Eviction eviction{state, outside, on_device, evidence, recipes, plans, tiers};
  SwapIn swap_in{state, on_device, tiers, eviction};
  StressEviction stress{state, on_device, tiers, eviction, swap_in};
  Replay replay{state, on_device, evidence, recipes, plans, tiers, eviction, swap_in};
  PlanActions plan_actions{state, on_device, plans, tiers, eviction, swap_in, replay};
  StepLog log{state};
  SavedTensors saved{state, tensors, on_device, evidence, plans, tiers, replay, log};
  OpObserver ops{state,    sources, outside, tensors,      plans, tiers,
                 eviction, swap_in, stress,  plan_actions, saved, log};

 private:
  void keep_reserved_to(int64_t bytes);  // of an accelerator; 0: to nothing

  LimitedAllocator* const allocator_;  // of an accelerator; null where it keeps to no limit
  const int process_;                  // that made it
};

void forget_locks();  // in a forked child: whoever held them does not exist there

}  // namespace delta

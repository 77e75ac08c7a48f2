// Rebuilding: runs the producing ops of a value again, bottom-up.
//
// Note: replay
//  1. The rerun is made under the lock by an iterative walk from the value to what is there:
//     resident pages, storages that live for other reasons, anchored sources. Holding their
//     storages pins them.
//  2. Each op of the rerun runs once, in the order of the forward, as the planners' account of
//     what it holds assumes (delta_runtime/core/reruns.py). What it makes and what has tickets is
//     installed in its page, the rest goes after its last use in the rerun. Under a plan that is
//     carried out as written only what it keeps at this tick is installed, and what was asked for.
//  3. Ops run below autograd and without autocast, with the random numbers, flags, thread count,
//     default dtype and grad mode that they were recorded with (random_state.h, numeric_context.h);
//     all of that is put back afterwards, also when an op throws.
//  4. In-place ops run on copies, unless the rerun itself made the buffer and nothing else needs
//     it.
//  5. Room is made before each op; that only ever frees, it never starts another rebuild.
//  6. What the rerun starts from is held from its begin on, needed yet or not. Without room beside
//     that the rerun is given up, and made once more. Then what has a copy in a tier below is
//     brought back for each op that reads it, and let go of behind it; all else that the rerun
//     started from is dropped too, and made again.
#pragma once

#include <functional>
#include <vector>

#include "evict/swap_in.h"
#include "rebuild/run_op.h"

namespace delta {

// Without the session's lock.
class Replay : public Part {
 public:
  Replay(SessionState& state, DeviceEvidence& on_device, Evidence& evidence, Recipes& recipes,
         PlanTable& plans, SwapTiers& tiers, Eviction& eviction, SwapIn& swap_in)
      : Part(state),
        on_device_(on_device),
        evidence_(evidence),
        recipes_(recipes),
        plans_(plans),
        tiers_(tiers),
        eviction_(eviction),
        swap_in_(swap_in),
        runner_(state, tiers) {}

  // Returns the storage of the page, which pins it, however its bytes come back.
  c10::Storage rebuild(Page& page);
  // Makes a dropped page again that nobody asks for yet. False: not without passing the budget, or
  // it is not to be made any more. Throws what `rebuild` does; then it is as it was.
  bool rebuild_early(Page& page);
  // Makes the value of a resident page again and compares, bit by bit, it and whatever else is
  // there of what uncertain ops made on the way. A verdict is for one output of one op; one failure
  // is for good.
  bool audit(Page& page);

 private:
  using PagePtrs = std::vector<c10::intrusive_ptr<Page>>;
  using Pins = std::vector<c10::Storage>;
  using Inspect = std::function<void(const OpRecord&, const std::vector<c10::Storage>&)>;
  struct Verdict;
  struct Attempt;

  void make_rerun(Value& root, Rerun& rerun, PagePtrs& wanted);
  bool fetch(Value& v, const Value& root, Rerun& rerun, PagePtrs& wanted);
  void bring_inputs(const OpRecord& op, Rerun& rerun);
  void install(Rerun& rerun, Page& page, const c10::Storage& storage, double seconds);
  c10::Storage execute(Rerun& rerun, Value& root, bool installs, bool gives_up,
                       const Inspect& inspect = nullptr);
  void take_outputs(Rerun& rerun, const OpRecord& op, const Value& root,
                    std::vector<c10::Storage>& made, bool installs, double seconds);
  double stalled_s();
  void discard(Rerun& rerun, c10::intrusive_ptr<Value>* root = nullptr);
  bool drop_starts(Rerun& rerun);
  void pin(PagePtrs& pages, Pins& pins);
  c10::Storage rebuild(Page& page, Attempt& attempt);
  bool run_once(Page& page, Attempt& attempt);
  void give_up(Attempt& attempt, const Page& different);
  void note_audit(const std::vector<Verdict>& verdicts, const Value& root, bool ran, bool equal);

  DeviceEvidence& on_device_;
  Evidence& evidence_;
  Recipes& recipes_;
  PlanTable& plans_;
  SwapTiers& tiers_;
  Eviction& eviction_;
  SwapIn& swap_in_;
  OpRunner runner_;
};

}  // namespace delta

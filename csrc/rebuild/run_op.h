// One op of a rerun: its arguments put together, its surroundings set, and what it makes taken.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <chrono>
#include <memory>
#include <unordered_map>
#include <vector>

#include "evict/swap_tiers.h"

namespace delta {

struct Slot {
  c10::intrusive_ptr<Value> value;
  c10::Storage storage;
  // Set where the value has a copy in a tier below: it is brought back for each op that reads it,
  // and let go of behind that op.
  c10::intrusive_ptr<Page> page;
  int uses = 0;
  bool ours = false;  // made by this rerun
};

// The ops that run again to make one value, in order, and what they pass on.
struct Rerun {
  std::vector<c10::intrusive_ptr<OpRecord>> ops;
  std::vector<uint64_t> shortcuts;  // keys of those that were taken
  RanOps ran;                       // so far
  ska::flat_hash_map<Value*, Slot> slots;
  bool one_by_one = false;                   // see the Note in replay.h, rule 6
  std::shared_ptr<const Suspects> suspects;  // made when something of it is to be compared later
};

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Runs ops again: as they ran before, or by a shortcut that was shown to make the same bits.
class OpRunner : public Part {
 public:
  OpRunner(SessionState& state, SwapTiers& tiers) : Part(state), tiers_(tiers) {}

  // Makes the outputs of an op again. `seconds` is what it takes when nothing has to be tried.
  // Without the lock.
  std::vector<c10::Storage> make_outputs(OpRecord& op, Rerun& rerun, double& seconds);
  // These made something else. Under the lock.
  void give_up_shortcuts(const std::vector<uint64_t>& keys);

 private:
  struct Way;

  Way way_of(const OpRecord& op, Rerun& rerun);
  std::vector<c10::Storage> run_known(OpRecord& op, Rerun& rerun, Way& way, double& seconds);
  std::vector<c10::Storage> try_shortcut(OpRecord& op, Rerun& rerun, Way& way, double& seconds);
  void note_trial(const Way& way, bool holds);

  SwapTiers& tiers_;
  std::unordered_map<uint64_t, bool> shortcut_holds_;  // by op and numbers; see shortcuts.h
};

}  // namespace delta

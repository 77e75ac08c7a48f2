// Evidence: what left device memory is compared with what comes back.
//
// Note: trust by evidence
//  1. Where an op comes from proves nothing: flags, modes, other threads and writes past the
//     dispatcher have all made plain ops come out different. So the bytes of a value are hashed
//     when it goes and compared when it is back: always in the first steps of each sequence of ops,
//     then in a seeded sample that takes each value once in `kMostStepsBetween` steps.
//  2. A value is rebuilt from what is there by then, once by one op, once by three. So evidence is
//     counted for ops too: each that ran in a rebuild whose result was compared. A value is
//     compared as long as some op between it and the saved values it comes from was never seen.
//  3. What an op that is not PyTorch's own stands behind is compared each time.
//  4. What differs is never used. A copy that differs is as good as none: the recipe is run. Where
//     that differs too, an error is raised; its ops are not run again from then on, and nothing is
//     recomputed from what it read. From then on no op is certain: each is compared while the
//     original is there.
//  5. On an accelerator hashes are made and kept there, and are compared when the step's backward
//     is over: see device_evidence.h. What differs has been used by then, and the error says so.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <atomic>
#include <random>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "rebuild/device_evidence.h"
#include "state/sources.h"

namespace delta {

using RanOps = ska::flat_hash_set<const OpRecord*>;  // in one rebuild

std::string mismatch_text(const Page& page, const std::vector<c10::intrusive_ptr<OpRecord>>& ops);
void tell(const std::string& verdict);  // raises it, unless it is empty

// Under the session's lock, but for `judge` and what is said of a verdict.
class Evidence : public Part {
 public:
  Evidence(SessionState& state, Sources& sources, DeviceEvidence& on_device);

  // The content of the page is about to go. False: not before DeviceEvidence::take_hashes was here.
  bool take(Page& page, bool copied);
  bool is_as_it_went(Page& page, const c10::Storage& storage, bool copied,
                     std::shared_ptr<const Suspects> suspects = nullptr,
                     std::vector<uint64_t> proved = {});
  // The keys of the ops behind the value that a rebuild of it has run.
  std::vector<uint64_t> proved_by(const Value& value, const RanOps& ran) const;

  // What is known of a value by its op: whether the op may be run again to make it, or must not be;
  // and whether its copies may be trusted.
  bool is_trusted(const Value& value) const;
  bool is_distrusted(const Value& value) const;
  bool may_swap(const Value& value) const;
  bool has_mismatched() const { return mismatched_; }  // something came out different when rebuilt
  void note_audit(uint64_t trust_key, bool repeated);
  void lose_trust(const std::vector<c10::intrusive_ptr<OpRecord>>& ops);
  // What the value lay in changes unseen: nothing is recomputed from there any more.
  void taint(const Value& source);

  std::string judge();  // waits for the device, if anything was compared; what differed, if any did
  bool has_verdict() const { return has_verdict_.load(std::memory_order_relaxed); }
  std::string take_verdict();
  std::string keep_verdict(const std::string& text);  // unless there is one; returns it

 private:
  struct Known {
    int32_t steps = 0;       // in which it came back as it went
    int64_t last_step = -1;  // of these
    int64_t due_step = 0;    // in which it is compared again
  };

  void note_same(Known& known);
  bool is_proven(const Value& value) const;  // each op that a rebuild may run was seen to repeat
  void distrust(uint64_t key);

  Sources& sources_;
  DeviceEvidence& on_device_;
  std::unordered_map<uint64_t, Known> known_;
  std::mt19937_64 random_;
  // Outputs of uncertain ops, by Value::trust_key: made again with the same bits, or ever with
  // others.
  std::unordered_set<uint64_t> trusted_;
  std::unordered_set<uint64_t> distrusted_;
  std::unordered_set<uint64_t> unswappable_;  // keys of values whose copies came back different
  bool mismatched_ = false;
  std::string verdict_;  // of a step that is over, where nobody could be told yet
  std::atomic<bool> has_verdict_{false};
};

}  // namespace delta

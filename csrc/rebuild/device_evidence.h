// Evidence on an accelerator: as in evidence.h, but nothing waits for the device inside a step.
//
// Note: two halves
//  1. No op may run under the session's lock, where pages are evicted. A page that is to be hashed
//     is passed over and noted; the lock is let go of, the notes are worked off, and the walk goes
//     on. A hash serves for that round of evictions alone, so that it is of what is freed.
//  2. What came back is noted under the lock too, and hashed before anybody gets it. Both hashes
//     stay on the device. They are read all at once, when the step's gradients are there and before
//     an optimizer uses them: that is the one time that the host waits, in steps that compared
//     something. Which steps compare, after the first two, is the same for all values.
//  3. So what differs has been used by then, unlike on the CPU: the step's gradients are no good,
//     and the error says so.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <vector>

#include "rebuild/device_hash.h"
#include "state/session_state.h"

namespace delta {

// Whom a mismatch speaks against, without holding what their records hold.
struct Suspects {
  std::vector<const OpInfo*> ops;
  std::vector<uint64_t> keys;  // of what they make
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> sources;

  static std::shared_ptr<const Suspects> of(const std::vector<c10::intrusive_ptr<OpRecord>>& ops);
};

// What came back and is yet to be compared with what went.
struct Comparison {
  int64_t bytes = 0;
  const OpInfo* maker = nullptr;
  uint64_t key = 0;              // of its evidence
  std::vector<uint64_t> proved;  // keys of the ops that made it again
  std::vector<uint64_t> value_keys;
  bool copied = false;
  std::shared_ptr<const Suspects> suspects;  // of what was recomputed
  int32_t went = -1;                         // rows of the table
  int32_t came = -1;
  c10::Storage storage;              // until it is hashed
  c10::StreamId stream = kNoStream;  // on which that is in order
  c10::StreamId owner = kNoStream;   // that its memory goes back to
  bool same = false;                 // once it was compared
};

// On the CPU there is none of it, and nothing here does anything.
class DeviceEvidence : public Part {
 public:
  explicit DeviceEvidence(SessionState& state);

  bool exists() const { return table_ != nullptr; }
  void begin_step();

  void begin_evictions();  // hashes that were taken before are out of date
  // The content of the page is about to go. False: not before take_hashes() was here. Under the
  // lock.
  bool take(Page& page);
  bool awaits_hash(const Page& page) const;  // it would be gone, but for its hash
  bool take_hashes(Guard& guard);  // lets go of the lock meanwhile; false: there were none to take
  std::vector<c10::intrusive_ptr<Page>> waiting() const;  // for hashes
  void forget_waiting();
  void forget(int32_t& row);  // of the table of hashes

  void compare_later(Page& page, const c10::Storage& storage, uint64_t key, bool copied,
                     std::shared_ptr<const Suspects> suspects, std::vector<uint64_t> proved);
  void hash_returned();  // before anybody gets it; without the lock
  // What came back since the last call, compared. Waits for the device, if there is anything,
  // without the lock; takes it then, and leaves it to the caller. Empty: the lock was left alone.
  std::vector<Comparison> compare(std::optional<Guard>& guard);

 private:
  struct Table {
    Table(c10::Device device, int64_t budget_bytes) : hashes(device, budget_bytes) {}

    DeviceHashes hashes;
    uint64_t round = 1;  // of evictions: a hash serves for the round that it was taken in
    std::vector<c10::intrusive_ptr<Page>> to_hash;  // else they would have been evicted
    std::vector<Comparison> came_back;
    std::vector<Comparison> pending;
  };

  std::unique_ptr<Table> table_;
};

}  // namespace delta

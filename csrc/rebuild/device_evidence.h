// What came back on an accelerator and is yet to be compared with what went.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <vector>

#include "rebuild/device_hash.h"
#include "state/values.h"

namespace delta {

// Whom a mismatch speaks against, without holding what their records hold.
struct Suspects {
  std::vector<const OpInfo*> ops;
  std::vector<uint64_t> keys;  // of what they make
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> sources;
};

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
};

struct DeviceEvidence {
  DeviceEvidence(c10::Device device, int64_t budget_bytes) : hashes(device, budget_bytes) {}

  DeviceHashes hashes;
  uint64_t round = 1;  // of evictions: a hash serves for the round that it was taken in
  std::vector<c10::intrusive_ptr<Page>> to_hash;  // else they would have been evicted
  std::vector<Comparison> came_back;
  std::vector<Comparison> pending;
};

}  // namespace delta

// The ops that run again to make one value, and how one of them is run; replay.cpp says which.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <chrono>
#include <memory>
#include <vector>

#include "state/session.h"

namespace delta {

struct Slot {
  c10::intrusive_ptr<Value> value;
  c10::Storage storage;
  int uses = 0;
  bool ours = false;  // made by this rerun
};

using PagePtrs = std::vector<c10::intrusive_ptr<Page>>;

// The ops that run again to make one value, in order, and what they pass on.
struct Rerun {
  std::vector<c10::intrusive_ptr<OpRecord>> ops;
  std::vector<uint64_t> shortcuts;  // keys of those that were taken
  RanOps ran;                       // so far
  ska::flat_hash_map<Value*, Slot> slots;
  std::shared_ptr<const Suspects> suspects;  // made when something of it is to be compared later
};

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Makes the outputs of an op again, by a shortcut where one was shown to make the same bits.
// `seconds` is what it takes when nothing has to be tried.
std::vector<c10::Storage> make_outputs(Session& session, OpRecord& op, Rerun& rerun,
                                       double& seconds);

}  // namespace delta

// Eviction: carries out what the walk (walk/victims.h) decides, without Python and without the GIL.
//
// Note: freeing inside an allocation
//  1. Only raw data pointers are freed here: the StorageImpl stays as an empty shell, so that no
//     object with a Python side dies in a place that must not take the GIL.
//  2. A page is a victim only if the use count of its storage is our own single reference: then
//     nobody else can read it, and no copy, no running op and no rebuild holds it.
//  3. Before the first byte of a page is freed, its whole recipe was walked down to sources that
//     are there and unchanged, and those were anchored.
//  4. What is credited is the allocator's own change, not the estimate.
#pragma once

#include <functional>
#include <vector>

#include "evict/swap_tiers.h"
#include "observe/outside_memory.h"

namespace delta {

class Eviction : public Part {
 public:
  Eviction(SessionState& state, OutsideMemory& outside, DeviceEvidence& on_device,
           Evidence& evidence, Recipes& recipes, PlanTable& plans, SwapTiers& tiers);

  // Python decides first, where it wants to and no plan is followed; at op boundaries only.
  void set_pump(std::function<void(int64_t)> pump) { pump_ = std::move(pump); }

  // At an op boundary: makes room for `need_bytes` under the budget. Returns what is missing.
  int64_t look_ahead(int64_t need_bytes);
  // Frees at least `bytes` if it can. Returns what the allocator got back.
  int64_t make_room(int64_t bytes, bool inside_allocation);
  // Makes room on an accelerator whose memory gave out, more with each attempt: what an op needs,
  // then all that may leave, with what the allocator keeps for later. False: there is no more to be
  // had.
  bool rescue(int64_t need_bytes, int attempt, bool inside_allocation = false);
  bool drop(Page& page);  // under the lock

 private:
  class Carrying;

  int64_t evict(int64_t bytes, bool inside_allocation, bool tells);
  void wait_for(Transfer& transfer, Guard& guard);
  void note_rescue(int64_t bytes, int64_t freed_bytes);
  void note_shortfall(int64_t bytes);

  OutsideMemory& outside_;
  DeviceEvidence& on_device_;
  Evidence& evidence_;
  Recipes& recipes_;
  PlanTable& plans_;
  SwapTiers& tiers_;
  std::function<void(int64_t)> pump_;
  int64_t last_pump_tick_ = -1000000;
  bool pumping_ = false;
};

}  // namespace delta

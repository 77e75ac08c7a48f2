// Swapped pages on their way back to the device: ahead of their use, or when somebody asks.
#pragma once

#include "evict/eviction.h"

namespace delta {

// Without the session's lock.
class SwapIn : public Part {
 public:
  SwapIn(SessionState& state, DeviceEvidence& on_device, SwapTiers& tiers, Eviction& eviction)
      : Part(state), on_device_(on_device), tiers_(tiers), eviction_(eviction) {}

  // At an op boundary, keeps the lanes busy: writes back what is to go, brings back what will be
  // asked for. The op that comes next needs `need_bytes`.
  void tend_lanes(int64_t need_bytes);
  // Gives the page a storage and queues the copy into it. Returns false where somebody else does
  // it, or where there is no room for a prefetch.
  bool begin(Page& page, bool prefetch);
  // Waits until the page is there; returns its storage, which pins it. Empty: it was dropped.
  c10::Storage bring_back(Page& page);

 private:
  struct Wait;

  c10::Storage memory_for(int64_t bytes, bool prefetch);
  c10::Storage take_if_there(Page& page, Wait& wait);
  double begin_of(const Transfer& transfer) const;
  void raise_lost(const Page& page) const;

  DeviceEvidence& on_device_;
  SwapTiers& tiers_;
  Eviction& eviction_;
};

}  // namespace delta

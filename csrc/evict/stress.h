// For tests: everything that can leave does so at each op boundary, or a random part of it.
#pragma once

#include <random>

#include "evict/swap_in.h"

namespace delta {

class StressEviction : public Part {
 public:
  StressEviction(SessionState& state, DeviceEvidence& on_device, SwapTiers& tiers,
                 Eviction& eviction, SwapIn& swap_in)
      : Part(state),
        on_device_(on_device),
        tiers_(tiers),
        eviction_(eviction),
        swap_in_(swap_in),
        random_(options_.seed) {}

  void at_boundary();  // without the lock

 private:
  using PagePtrs = std::vector<c10::intrusive_ptr<Page>>;

  PagePtrs evict_some(bool all);
  void free_copied(PagePtrs& copied, Guard& guard);

  DeviceEvidence& on_device_;
  SwapTiers& tiers_;
  Eviction& eviction_;
  SwapIn& swap_in_;
  std::mt19937_64 random_;
};

}  // namespace delta

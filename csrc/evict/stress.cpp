#include "evict/stress.h"

namespace delta {

void StressEviction::at_boundary() {
  const bool all = options_.stress == Stress::DropAll || options_.stress == Stress::SwapAll;
  const bool swaps = options_.stress == Stress::SwapAll || options_.stress == Stress::RandomMix;
  if (!all && random_() % 4 != 0) {
    return;
  }
  Guard guard(lock_);
  on_device_.begin_evictions();
  PagePtrs copied = evict_some(all);
  {
    const PagePtrs waiting = on_device_.waiting();
    on_device_.take_hashes(guard);
    for (const auto& page : waiting) {
      eviction_.drop(*page);
    }
    on_device_.forget_waiting();
  }
  if (!swaps) {
    return;
  }
  PagePtrs back = tiers_.some_swapped(
      [&] { return options_.stress == Stress::RandomMix && random_() % 8 == 0; });
  if (all || random_() % 2 == 0) {  // else they are freed at a later boundary, or never
    for (auto& page : copied) {
      auto transfer = page->below.copy ? page->below.copy->transfer : nullptr;
      guard.unlock();
      if (transfer) {
        transfer->lane->wait(*transfer);
      }
      guard.lock();
    }
  }
  free_copied(copied, guard);
  guard.unlock();
  for (auto& page : back) {
    swap_in_.begin(*page, /*prefetch=*/true);
  }
  guard.lock();
  back.clear();
}

// Drops, or begins to copy, what can go. Returns what is being copied.
StressEviction::PagePtrs StressEviction::evict_some(bool all) {
  PagePtrs copied;
  for (Page* page : std::vector<Page*>(pages_.candidates())) {
    if (!all && random_() % 3 != 0) {
      continue;
    }
    if (options_.stress == Stress::SwapAll ||
        (options_.stress == Stress::RandomMix && random_() % 2 == 0)) {
      if (tiers_.write_back(*page)) {
        copied.push_back(c10::intrusive_ptr<Page>::reclaim_copy(page));
      }
    } else {
      eviction_.drop(*page);
    }
  }
  return copied;
}

// Frees all whose copy is there. Lets go of the lock meanwhile.
void StressEviction::free_copied(PagePtrs& copied, Guard& guard) {
  tiers_.reap();
  guard.unlock();  // what the transfers held is let go there
  on_device_.hash_returned();
  guard.lock();
  on_device_.begin_evictions();
  do {
    for (Page* page : std::vector<Page*>(pages_.candidates())) {
      tiers_.free_clean(*page);
    }
  } while (on_device_.take_hashes(guard));
  copied.clear();
}

}  // namespace delta

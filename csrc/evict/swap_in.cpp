#include "evict/swap_in.h"

#include <c10/core/StreamGuard.h>

#include <cstring>
#include <optional>
#include <thread>

#include "rebuild/quiet.h"
#include "tiers/spill_file.h"
#include "util/errors.h"
#include "util/signals.h"
#include "util/streams.h"
#include "walk/tuning.h"

namespace delta {
namespace {

double now_s() { return seconds_of(std::chrono::steady_clock::now()); }

}  // namespace

// On an accelerator whose memory gave out, room is made; not for what nobody waits for.
c10::Storage SwapIn::memory_for(int64_t bytes, bool prefetch) {
  std::optional<FailsAtLimit> at_once;
  if (prefetch) {
    at_once.emplace();
  }
  for (int attempt = 0;; ++attempt) {
    try {
      return fresh_storage(bytes, options_.device, /*zeros=*/false);
    } catch (const c10::OutOfMemoryError&) {
      if (prefetch || !eviction_.rescue(bytes, attempt)) {
        throw;
      }
    }
  }
}

// Allocating may evict.
bool SwapIn::begin(Page& page, bool prefetch) {
  std::optional<c10::StreamGuard> on;  // the memory is to be of the page's stream again
  {
    Guard guard(lock_);
    if (page.residency() != Residency::Swapped || page.below.fetching) {
      return false;
    }
    page.below.fetching = true;
    if (page.stream != kNoStream && page.stream != current_stream_id(options_.device)) {
      on.emplace(c10::Stream(c10::Stream::UNSAFE, options_.device, page.stream));
    }
  }
  c10::Storage storage;
  try {
    if (!prefetch && options_.budget_bytes > 0) {
      eviction_.look_ahead(page.bytes);
    }
    storage = memory_for(page.bytes, prefetch);
  } catch (...) {
    {
      Guard guard(lock_);
      page.below.fetching = false;
    }
    if (prefetch) {
      return false;
    }
    throw;
  }
  auto transfer = c10::make_intrusive<Transfer>();
  Guard guard(lock_);
  page.below.fetching = false;
  if (page.tickets == 0 || page.residency() != Residency::Swapped) {
    thread_trash().take(std::move(storage));
    return false;
  }
  tiers_.submit_in(page, std::move(storage), transfer, prefetch);
  return true;
}

void SwapIn::raise_lost(const Page& page) const {
  const std::string which =
      "delta_runtime: a saved tensor of " + std::to_string(page.bytes) + " bytes";
  if (page.went.differs) {
    throw RecomputeMismatchError(
        which + ", made by " +
        (page.current->producer ? page.current->producer->info->name : std::string("?")) +
        ", was swapped out, and what came back is not what went; it cannot be recomputed "
        "either. It is not used, and gradients of this backward are incomplete; weights and "
        "optimizer state are as they were. Likely cause: code that PyTorch does not see wrote "
        "to it between the copy and the moment it was freed (numpy, ctypes, a C++ extension, a "
        "kernel of your own: tell it with delta_runtime.mark_written), or the host's memory is "
        "bad.");
  }
  const int error = page.went.error;
  const bool device_failed = error == kDeviceFailed;
  const std::string why = error == kOtherBytes
                              ? "the bytes in the spill file are not those that were written"
                              : (device_failed ? "the device failed" : std::strerror(error));
  throw SwapFailedError(which + " was swapped out and cannot be read any more (" + why +
                        "), and it cannot be recomputed either. Gradients of this backward are "
                        "incomplete; weights and optimizer state are as they were. " +
                        (device_failed
                             ? "Start the program again."
                             : "Run the step again without disk_budget and spill_dir, or with "
                               "another spill_dir."));
}

// What bring_back waits for, and since when. The clock is read only where there is something to
// wait for: every unpack comes by here.
struct SwapIn::Wait {
  bool told = false;
  double begin_s = 0;
  bool is_over = false;
  TransferPtr incoming;
  bool somebody_begins = false;  // its copy back
};

// What the device still had to do before a copy was not a wait for the lane.
double SwapIn::begin_of(const Transfer& transfer) const {
  return options_.device.is_cpu() ? 0 : transfer.begin_s;
}

// Under the lock.
c10::Storage SwapIn::take_if_there(Page& page, Wait& wait) {
  if (page.below.incoming && (page.below.incoming->ended() || page.below.incoming->ordered())) {
    wait.begin_s = std::max(wait.begin_s, begin_of(*page.below.incoming));
    tiers_.finish_in(page);
    if (!wait.told && page.residency() == Residency::Resident) {
      ++counters_.prefetch_hits;
    }
    page.below.prefetched = false;
  }
  if (page.tickets == 0) {
    wait.is_over = true;
    return {};  // let go of meanwhile
  }
  if (page.residency() == Residency::Lost) {
    raise_lost(page);
  }
  if (page.residency() == Residency::Resident || page.residency() == Residency::Dropped) {
    if (page.below.prefetched && !wait.told) {
      ++counters_.prefetch_hits;
    } else if (wait.told && tiers_.all()[page.tier].in->host_waits()) {
      tiers_.note_host_wait(/*out=*/false, now_s() - wait.begin_s);
    }
    page.below.prefetched = false;
    wait.is_over = true;
    if (page.residency() == Residency::Dropped) {
      return {};
    }
    tiers_.order_after_arrival(page, page.strong);
    return page.strong;
  }
  if (!wait.told) {
    ++(page.residency() == Residency::SwappingIn ? counters_.prefetch_late
                                                 : counters_.prefetch_misses);
    wait.told = true;
    wait.begin_s = now_s();
  }
  wait.incoming = page.below.incoming;
  wait.somebody_begins = page.below.fetching;
  return {};
}

c10::Storage SwapIn::bring_back(Page& page) {
  Wait wait;
  for (;;) {
    wait.incoming.reset();
    {
      Guard guard(lock_);
      c10::Storage storage = take_if_there(page, wait);
      if (wait.is_over) {
        return storage;
      }
    }
    if (wait.incoming) {
      while (!wait.incoming->lane->wait_a_while(*wait.incoming)) {
        let_signals_in();
      }
    } else if (wait.somebody_begins) {
      std::this_thread::yield();
    } else {
      begin(page, /*prefetch=*/false);
    }
  }
}

void SwapIn::tend_lanes(int64_t need_bytes) {
  tiers_.grow();
  std::vector<c10::intrusive_ptr<Page>> wanted;
  {
    Guard guard(lock_);
    tiers_.reap();
    tiers_.write_back_queued();
    const int64_t room = account_.room_for_returns() - need_bytes - kTuning.slack_bytes;
    wanted = tiers_.wanted_back(options_.budget_bytes > 0 ? room : 0);
  }
  int64_t begun = 0;
  for (auto& page : wanted) {
    begun += begin(*page, /*prefetch=*/true) ? 1 : 0;
  }
  if (!wanted.empty()) {
    Guard guard(lock_);
    counters_.prefetches += begun;
    wanted.clear();  // a page may die with this
  }
  on_device_.hash_returned();
}

}  // namespace delta

// Swapping: pages whose bytes wait in host memory, or on disk.
//
// Note: clean pages
//  1. A page is clean when a finished copy of its present content lies in a tier below: its device
//     copy can be freed at once. Copies are made early, while the lane is idle or as the plan says,
//     but only of pages that nobody else holds: who holds a tensor may write to it, and not every
//     write can be seen.
//  2. A copy is of one content. It is good as long as the page's epoch (which moves on with every
//     new content that the recorder knows of) and version are those of its begin; both are looked
//     at when the device copy is freed, never only when the copy was made.
//  3. Copying begins at op boundaries, never inside pack: some ops save what they fill later.
//  4. A page in flight is held by its transfer; its bytes leave the account when the lane is done.
//  5. What came back keeps its copy, and stays clean, until its last ticket goes or the tier runs
//     short.
//  6. Nothing waits for a lane under the session's lock.
//  7. A copy goes to the nearest tier that has room. One that could not be written is none, and its
//     page is still there. One that cannot be read is replaced by running the recipe.
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/COW.h>

#include <cstring>
#include <optional>

#include "pool/cpu_pool.h"
#include "rebuild/quiet.h"
#include "state/session.h"
#include "tiers/host_memory.h"
#include "tiers/spill_file.h"
#include "tiers/stream_lane.h"
#include "tiers/thread_lane.h"
#include "util/errors.h"
#include "util/signals.h"

namespace delta {
namespace {

constexpr int64_t kUnknownReturn = int64_t{1} << 60;
constexpr double kHorizonSeconds = 0.03;     // of lane time that unplanned prefetches may take up
constexpr int64_t kHorizonBytes = 16 << 20;  // the same, before the lane's speed is known
constexpr int64_t kSlackBytes = 64 * 1024;

double now_s() { return seconds_of(std::chrono::steady_clock::now()); }

}  // namespace

void Session::open_tiers() {
  if (!options_.device.is_cpu()) {
    SwapTier tier;
    tier.store = std::make_shared<HostMemory>(options_.host_bytes, options_.pinning);
    tier.store->grow();
    tier.out = std::make_unique<StreamLane>(options_.device);
    tier.in = std::make_unique<StreamLane>(options_.device);
    tiers_.push_back(std::move(tier));
    return;
  }
  const bool spills = options_.spill_file >= 0;
  const int64_t bounce_bytes = spills && options_.spill_direct ? 2 * Bounce::kBytes : 0;
  std::shared_ptr<Throttle> links[2];
  if (options_.link_bytes_per_s > 0) {
    for (auto& link : links) {
      link = std::make_shared<Throttle>(options_.link_bytes_per_s);
    }
  }
  const auto add = [&](Tier kind, std::shared_ptr<Store> store) {
    SwapTier tier;
    tier.kind = kind;
    tier.store = std::move(store);
    tier.out = std::make_unique<ThreadLane>(links[0], kind == Tier::Host);
    tier.in = std::make_unique<ThreadLane>(links[1], kind == Tier::Host);
    tiers_.push_back(std::move(tier));
  };
  if (options_.host_bytes > 0) {
    add(Tier::Host,
        std::make_shared<HostMemory>(std::max<int64_t>(0, options_.host_bytes - bounce_bytes)));
  } else {
    uncounted_bytes_ = bounce_bytes;  // there is no host memory but the device's own
  }
  if (spills) {
    add(Tier::Disk, std::make_shared<SpillFile>(options_.spill_file, options_.spill_bytes,
                                                options_.spill_direct));
  }
  TORCH_CHECK(!tiers_.empty(), "swapping needs a tier below the device");
}

int64_t Session::returns() const {
  int64_t sum = 0;
  for (const auto& tier : tiers_) {
    sum += tier.store->returns();
  }
  return sum;
}

Lane& Session::lane_in_of(const Page& page) const { return *tiers_[page.below.copy->tier].in; }

double Session::seconds_in_for(int64_t bytes) const {
  return tiers_.front().in->seconds_for(bytes);
}

// Lets go of both ends, when it has ended.
void Session::end_transfer(Transfer& transfer) {
  thread_trash().take(std::move(transfer.device));
  transfer.device = c10::Storage();
  transfer.block.reset();
}

// ---------------------------------------------------------------- out

bool Session::is_alone(const Page& page) const {
  const bool flying = page.below.copy && page.below.copy->transfer->device;
  return page.strong.use_count() == (flying ? 2 : 1);
}

// Whether no tier had room for it, and nothing has come free since.
bool Session::is_refused(const Page& page) const {
  return page.below.refused_at >= 0 && page.below.refused_at == returns();
}

bool Session::may_swap(const Page& page) const {
  return unswappable_.empty() || (unswappable_.count(page.current->trust_key()) == 0 &&
                                  unswappable_.count(page.current->sequence_key()) == 0);
}

bool Session::can_write_back(Page& page) const {
  return !tiers_.empty() && page.candidate >= 0 && page.tickets > 0 && !page.below.copy &&
         !is_refused(page) && may_swap(page) && page.strong.use_count() == 1 &&
         !page.doubts.being_written && content_unchanged(page) &&
         static_cast<int64_t>(page.strong.nbytes()) == page.bytes &&
         !c10::impl::cow::is_cow_data_ptr(page.strong.data_ptr()) && !page.many_streams &&
         (!options_.device.is_cpu() || cpu_pool::owns(page.strong.data_ptr()));
}

bool Session::copy_is_good(const Page& page) const {
  const bool there = page.below.copy &&
                     (page.below.copy->transfer->done() || page.below.copy->transfer->ordered());
  return there && page.below.copy->epoch == page.epoch && !page.many_streams &&
         !page.doubts.being_written && content_unchanged(page) &&
         static_cast<int64_t>(page.strong.nbytes()) == page.bytes;
}

void Session::forget_copy(Page& page) {
  if (!page.below.copy) {
    return;
  }
  Transfer& transfer = *page.below.copy->transfer;
  if (transfer.lane->cancel(transfer)) {
    end_transfer(transfer);
  }  // else it runs to its end, and reap() lets its ends go
  page.below.copy.reset();
}

bool Session::write_back(Page& page) {
  if (page.below.copy && page.below.copy->transfer->ended() && !copy_is_good(page)) {
    forget_copy(page);
  }
  if (!can_write_back(page)) {
    return page.below.copy != nullptr;
  }
  std::shared_ptr<Block> block;
  size_t place = 0;
  for (; place < tiers_.size() && !block; ++place) {
    Store& store = *tiers_[place].store;
    block = store.allocate(page.bytes);
    if (block) {
      break;
    }
    if (!store.is_open()) {
      continue;
    }
    for (Page* other : candidates_) {  // what came back can do without its copy
      if (other->below.copy && other->below.copy->tier == place &&
          other->below.copy->transfer->ended() && other->frees > 0) {
        forget_copy(*other);
      }
    }
    block = store.allocate(page.bytes);
    if (block) {
      break;
    }
  }
  if (!block) {
    page.below.refused_at = returns();
    ++counters_.swap_refusals;
    return false;
  }
  SwapTier& tier = tiers_[place];
  auto transfer = c10::make_intrusive<Transfer>();
  transfer->out = true;
  transfer->memory = const_cast<void*>(page.strong.data());
  transfer->bytes = page.bytes;
  transfer->key = page.current->key;
  transfer->page = page.id;
  transfer->device = page.strong;
  transfer->block = block;
  page.below.copy = c10::make_intrusive<SwapCopy>();
  page.below.copy->tier = place;
  page.below.copy->block = std::move(block);
  page.below.copy->transfer = transfer;
  page.below.copy->epoch = page.epoch;
  counters_.written_back_bytes += page.bytes;
  transfer->stream = page.stream;
  tier.flying_out.push_back(transfer);
  tier.out->submit(transfer);
  return true;
}

bool Session::free_clean(Page& page) {
  if (page.candidate < 0 || page.tickets == 0 || page.strong.use_count() != 1 ||
      !copy_is_good(page)) {
    return false;
  }
  if (!take_evidence(page, /*copied=*/true)) {
    return false;
  }
  remove_candidate(page);
  page.move_to(Residency::Swapped);
  page.data = nullptr;
  ++page.frees;
  counters_.prefetch_vain += page.below.prefetched ? 1 : 0;
  page.below.prefetched = false;
  swapped_now_bytes_ += page.bytes;
  ++counters_.swap_outs;
  counters_.swapped_out_bytes += page.bytes;
  emit(EventKind::SwappedOut, &page, page.bytes, 0, key_of(*page.current),
       static_cast<int>(tiers_[page.below.copy->tier].kind));
  page.below.order = return_order(page);
  swapped_.emplace(page.below.order, page.id);
  page.strong.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, options_.device));
  return true;
}

// Takes the ends of finished transfers from them, so that no worker is ever the last owner of a
// storage, and makes pages that have come back resident.
bool Session::reap() {
  bool ended = false;
  const auto row = [&](const Transfer& t, TraceKind kind) {
    if (tracing_ && t.done()) {
      trace_.push_back({static_cast<int64_t>(kind), t.key, t.bytes, 0, 0, t.begin_s, t.end_s});
    }
  };
  for (auto& tier : tiers_) {
    tier.out->poll();
    tier.in->poll();
    for (; !tier.flying_out.empty() && tier.flying_out.front()->ended(); ended = true) {
      Transfer& t = *tier.flying_out.front();
      row(t, TraceKind::CopyOut);
      if (t.failed()) {
        tier.store->fail();
        ++counters_.failed_writes;
        counters_.write_error = counters_.write_error != 0 ? counters_.write_error : t.error;
        const auto page = managed_.find(t.page);
        if (page != managed_.end() && page->second->below.copy &&
            page->second->below.copy->transfer.get() == &t) {
          page->second->below.copy.reset();
        }
      }
      end_transfer(t);
      tier.flying_out.pop_front();
    }
    for (; !tier.flying_in.empty() && tier.flying_in.front()->ended(); ended = true) {
      Transfer& t = *tier.flying_in.front();
      row(t, TraceKind::CopyIn);
      const auto page = managed_.find(t.page);
      if (page != managed_.end() && page->second->below.incoming.get() == &t) {
        finish_swap_in(*page->second);
      }
      end_transfer(t);
      tier.flying_in.pop_front();
    }
  }
  return ended;
}

// ---------------------------------------------------------------- in

// Whether the plan of this very step says when the page comes back. Evicted a second time, or in a
// later step, it does not.
bool Session::is_timed(const Page& page) const {
  return page.below.prefetch_at >= step_begin_tick_ && page.frees <= 1;
}

// When a page is to come back, relative to others: by the plan, and of two that it has come back at
// the same op, by their next use; else by its next use, else those that were saved last come first.
ReturnOrder Session::return_order(Page& page) const {
  const int64_t next = next_use_of(page, tick_);
  const int64_t use = next >= 0 ? next : kUnknownReturn - page.packed_at;
  return {is_timed(page) ? page.below.prefetch_at : use, use};
}

// Gives the page a storage and queues the copy into it. Without the lock: allocating may evict.
// Returns false where somebody else does it, or where there is no room for a prefetch.
bool Session::begin_swap_in(Page& page, bool prefetch) {
  std::optional<c10::StreamGuard> on;  // the memory is to be of the page's stream again
  {
    Guard guard(*this);
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
      look_ahead(page.bytes);
    }
    storage = fresh_storage(page.bytes, options_.device, /*zeros=*/false);
  } catch (...) {
    {
      Guard guard(*this);
      page.below.fetching = false;
    }
    if (prefetch) {
      return false;
    }
    throw;
  }
  auto transfer = c10::make_intrusive<Transfer>();
  Guard guard(*this);
  page.below.fetching = false;
  if (page.tickets == 0 || page.residency() != Residency::Swapped) {
    thread_trash().take(std::move(storage));
    return false;
  }
  SwapTier& tier = tiers_[page.below.copy->tier];
  transfer->memory = storage.mutable_data();
  transfer->bytes = page.bytes;
  transfer->key = page.current->key;
  transfer->page = page.id;
  transfer->device = storage;
  transfer->block = page.below.copy->block;
  transfer->follows = page.below.copy->transfer->ended() ? nullptr : page.below.copy->transfer;
  rehome(page, storage);
  page.move_to(Residency::SwappingIn);
  page.below.prefetched = prefetch;
  page.below.incoming = transfer;
  swapped_.erase({page.below.order, page.id});
  swapped_now_bytes_ -= page.bytes;
  swapping_in_bytes_ += page.bytes;
  tier.flying_in.push_back(transfer);
  tier.in->submit(transfer);
  return true;
}

void Session::finish_swap_in(Page& page) {
  if (page.below.incoming->failed()) {
    fail_swap_in(page, /*differs=*/false);
    return;
  }
  if ((page.below.incoming->done() || page.below.incoming->ordered()) &&
      !is_as_it_went(page, page.strong, /*copied=*/true)) {
    ++counters_.mismatches;
    fail_swap_in(page, /*differs=*/true);
    return;
  }
  const double seconds = page.below.incoming->end_s - page.below.incoming->begin_s;
  if (!page.below.incoming->ended()) {
    page.below.arrival = page.below.incoming;
  }
  page.below.incoming.reset();
  page.move_to(Residency::Resident);
  page.retry_tick = 0;
  swapping_in_bytes_ -= page.bytes;
  ++counters_.swap_ins;
  counters_.swapped_in_bytes += page.bytes;
  add_candidate(page);
  emit(EventKind::SwappedIn, &page, page.bytes, seconds, key_of(*page.current));
}

// The copy below could not be read, or is not what went: from here on the page is one that was
// dropped, if it has a recipe that still holds.
void Session::fail_swap_in(Page& page, bool differs) {
  if (!differs) {
    ++counters_.failed_reads;
    const int error = page.below.incoming->error;
    counters_.read_error = counters_.read_error != 0 ? counters_.read_error : error;
  }
  page.below.incoming.reset();
  page.below.prefetched = false;
  page.below.copy.reset();
  swapping_in_bytes_ -= page.bytes;
  page.strong.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, options_.device));
  if (page.current->anchor || !anchor_recipe(*page.current)) {
    page.move_to(Residency::Lost);
    page.went.differs = differs;
    counters_.lost_pages += differs ? 0 : 1;
    return;
  }
  emit(EventKind::SwappedIn, &page, page.bytes, 0, key_of(*page.current));
  note_dropped(page);
}

// What the stream that is current does next with the page comes after whatever brought it here. On
// another stream than the page's own, its memory is not used again before that stream is done.
void Session::order_after_arrival(Page& page, const c10::Storage& storage) const {
  if (options_.device.is_cpu()) {
    return;
  }
  const c10::StreamId current = current_stream_id(options_.device);
  if (page.below.arrival && page.below.arrival->ended()) {
    page.below.arrival.reset();
  }
  if (page.below.arrival && page.below.arrival->ordered_before != current) {
    page.below.arrival->lane->wait(*page.below.arrival);
  }
  if (page.stream == kNoStream || page.stream == current || !storage) {
    return;
  }
  order_after_stream(options_.device, page.stream);
  c10::getDeviceAllocator(options_.device.type())
      ->recordStream(storage.data_ptr(),
                     c10::Stream(c10::Stream::UNSAFE, options_.device, current));
}

// Waits until the page is there; returns its storage, which pins it. Empty: it was dropped.
c10::Storage Session::bring_back(Page& page) {
  bool told = false;
  double begin = 0;  // read only where there is something to wait for: every unpack comes by here
  for (;;) {
    TransferPtr incoming;
    bool busy = false;
    {
      Guard guard(*this);
      if (page.below.incoming && (page.below.incoming->ended() || page.below.incoming->ordered())) {
        finish_swap_in(page);
        if (!told && page.residency() == Residency::Resident) {
          ++counters_.prefetch_hits;
        }
        page.below.prefetched = false;
      }
      if (page.tickets == 0) {
        return {};  // let go of meanwhile
      }
      if (page.residency() == Residency::Lost && page.went.differs) {
        throw RecomputeMismatchError(
            "delta_runtime: a saved tensor of " + std::to_string(page.bytes) + " bytes, made by " +
            (page.current->producer ? page.current->producer->info->name : std::string("?")) +
            ", was swapped out, and what came back is not what went; it cannot be recomputed "
            "either. It is not used, and gradients of this backward are incomplete; weights and "
            "optimizer state are as they were. Likely cause: code that PyTorch does not see wrote "
            "to it between the copy and the moment it was freed (numpy, ctypes, a C++ extension, a "
            "kernel of your own: tell it with delta_runtime.mark_written), or the host's memory is "
            "bad.");
      }
      if (page.residency() == Residency::Lost) {
        throw SwapFailedError(
            "delta_runtime: a saved tensor of " + std::to_string(page.bytes) +
            " bytes was swapped out and cannot be read any more (" +
            std::strerror(counters_.read_error) +
            "), and it cannot be recomputed either. Gradients of this backward are incomplete; "
            "weights and optimizer state are as they were. " +
            (options_.device.is_cpu() ? "Run the step again without disk_budget and spill_dir, or "
                                        "with another spill_dir."
                                      : "The device failed: start the program again."));
      }
      if (page.residency() == Residency::Resident || page.residency() == Residency::Dropped) {
        if (page.below.prefetched && !told) {
          ++counters_.prefetch_hits;
        } else if (told) {
          counters_.in_stall_s += now_s() - begin;
        }
        page.below.prefetched = false;
        if (page.residency() == Residency::Dropped) {
          return {};
        }
        order_after_arrival(page, page.strong);
        return page.strong;
      }
      if (!told) {
        ++(page.residency() == Residency::SwappingIn ? counters_.prefetch_late
                                                     : counters_.prefetch_misses);
        told = true;
        begin = now_s();
      }
      incoming = page.below.incoming;
      busy = page.below.fetching;
    }
    if (incoming) {
      while (!incoming->lane->wait_a_while(*incoming)) {
        let_signals_in();
      }
    } else if (busy) {
      std::this_thread::yield();
    } else {
      begin_swap_in(page, /*prefetch=*/false);
    }
  }
}

// ---------------------------------------------------------------- at op boundaries

// Copies what was packed, in that order, as the plan says; without one, while the lane is idle and
// half of the budget is used. What somebody else still holds waits for the next boundary.
void Session::write_back_queued() {
  constexpr size_t most_looked_at = 32;
  const int64_t budget = options_.budget_bytes;
  const bool early =
      budget > 0 && phase_ == Phase::Forward &&
      static_cast<double>(live_bytes()) > early_write_back_ * static_cast<double>(budget);
  const bool idle = std::all_of(tiers_.begin(), tiers_.end(),
                                [](const SwapTier& tier) { return tier.out->idle(); });
  std::vector<int64_t> later;
  for (size_t looked = 0; !to_write_.empty() && looked < most_looked_at; ++looked) {
    const auto found = managed_.find(to_write_.front());
    Page* page = found != managed_.end() ? found->second : nullptr;
    const bool wanted = page != nullptr && page->exit == Exit::Swap && !page->below.copy &&
                        (plan_ == nullptr || page->planned);
    if (wanted && plan_ == nullptr && !(early && idle)) {
      break;
    }
    to_write_.pop_front();
    if (wanted && !write_back(*page)) {
      later.push_back(page->id);
    }
  }
  to_write_.insert(to_write_.end(), later.begin(), later.end());  // behind what can go now
}

// Keeps the lanes busy: writes back what is to go, brings back what will be asked for. The op that
// comes next needs `need_bytes`.
void Session::tend_lanes(int64_t need_bytes) {
  const int64_t budget = options_.budget_bytes;
  for (auto& tier : tiers_) {
    tier.store->grow();
  }
  std::vector<c10::intrusive_ptr<Page>> wanted;
  {
    Guard guard(*this);
    reap();
    write_back_queued();
    int64_t room = budget > 0 ? budget - live_bytes() - need_bytes - kSlackBytes : budget;
    c10::SmallVector<int64_t, 2> queued;
    for (const auto& tier : tiers_) {
      queued.push_back(tier.in->queued_bytes());
    }
    size_t busy = 0;  // a bit for each tier
    for (const auto& [order, id] : swapped_) {
      Page& page = *managed_.at(id);
      const size_t tier = page.below.copy->tier;
      if (phase_ == Phase::Forward || busy + 1 == size_t{1} << tiers_.size()) {
        break;
      }
      if ((busy >> tier & 1) != 0) {
        continue;
      }
      if (is_timed(page)) {
        if (tick_ < page.below.prefetch_at) {
          break;
        }
      } else {
        const double seconds = lane_in_of(page).seconds_for(queued[tier]);
        if (seconds > 0 ? seconds > kHorizonSeconds : queued[tier] > kHorizonBytes) {
          busy |= size_t{1} << tier;
          continue;
        }
      }
      if (page.bytes > room) {
        break;
      }
      room -= page.bytes;
      queued[tier] += page.bytes;
      wanted.push_back(c10::intrusive_ptr<Page>::reclaim_copy(&page));
    }
  }
  int64_t begun = 0;
  for (auto& page : wanted) {
    begun += begin_swap_in(*page, /*prefetch=*/true) ? 1 : 0;
  }
  if (!wanted.empty()) {
    Guard guard(*this);
    counters_.prefetches += begun;
    wanted.clear();  // a page may die with this
  }
  hash_returned();
}

void Session::stop_lanes() {
  {
    Guard guard(*this);
    for (auto& tier : tiers_) {
      for (const auto& transfer : tier.flying_out) {
        if (tier.out->cancel(*transfer)) {  // nothing will be evicted any more
          end_transfer(*transfer);
        }
      }
    }
  }
  for (auto& tier : tiers_) {
    tier.out->stop();
    tier.in->stop();
    tier.store->retire();
  }
  Guard guard(*this);
  reap();
}

}  // namespace delta

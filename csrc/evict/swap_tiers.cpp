#include "evict/swap_tiers.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/COW.h>

#include <algorithm>
#include <utility>

#include "pool/cpu_pool.h"
#include "tiers/spill_file.h"
#include "tiers/staged_lane.h"
#include "tiers/stream_lane.h"
#include "tiers/thread_lane.h"
#include "util/gil.h"

namespace delta {
namespace {

constexpr size_t kMostUntold = 64;  // steps whose seconds nobody has asked for

// Lets go of both ends, when it has ended.
void end_transfer(Transfer& transfer) {
  thread_trash().take(std::move(transfer.device));
  transfer.device = c10::Storage();
  transfer.block.reset();
}

}  // namespace

SwapTiers::SwapTiers(SessionState& state, Evidence& evidence, Recipes& recipes, PlanTable& plans)
    : Part(state), evidence_(evidence), recipes_(recipes), plans_(plans) {
  if (options_.swap) {
    open();
  }
}

void SwapTiers::open() {
  options_.device.is_cpu() ? open_below_cpu() : open_below_accelerator();
  TORCH_CHECK(!tiers_.empty(), "swapping needs a tier below the device");
}

void SwapTiers::open_below_accelerator() {
  const bool spills = options_.spill_file >= 0;
  const int64_t staging_bytes = spills ? 2 * Bounce::kBytes : 0;
  if (options_.host_bytes > staging_bytes) {
    SwapTier host;
    host.store =
        std::make_shared<HostMemory>(options_.host_bytes - staging_bytes, options_.pinning);
    host.store->grow();
    const auto lane = [&](double crossings) {
      std::shared_ptr<Block> unused;
      if (crossings > 1) {
        unused = host.store->allocate(StreamLane::kUnusedBytes);
        TORCH_CHECK(unused, "host_budget: no room for what makes the link slower");
      }
      return std::make_unique<StreamLane>(options_.device, spans_, crossings, std::move(unused));
    };
    host.out = lane(options_.crossings_out);
    host.in = lane(options_.crossings_in);
    tiers_.push_back(std::move(host));
  }
  if (spills) {
    const auto staging = std::make_shared<HostMemory>(staging_bytes, options_.pinning);
    staging->grow();
    const auto lane = [&] {
      std::shared_ptr<Block> memory = staging->allocate(Bounce::kBytes);
      TORCH_CHECK(memory, "no memory to stage what goes to the disk");
      return std::make_unique<StagedLane>(options_.device, std::move(memory));
    };
    SwapTier disk;
    disk.kind = Tier::Disk;
    disk.store = std::make_shared<SpillFile>(options_.spill_file, options_.spill_bytes,
                                             options_.spill_direct);
    disk.out = lane();
    disk.in = lane();
    tiers_.push_back(std::move(disk));
  }
}

void SwapTiers::open_below_cpu() {
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
    account_.hold(bounce_bytes);  // there is no host memory but the device's own
  }
  if (spills) {
    add(Tier::Disk, std::make_shared<SpillFile>(options_.spill_file, options_.spill_bytes,
                                                options_.spill_direct));
  }
}

int64_t SwapTiers::returns() const {
  int64_t sum = 0;
  for (const auto& tier : tiers_) {
    sum += tier.store->returns();
  }
  return sum;
}

double SwapTiers::seconds_in_for(int64_t bytes) const {
  return tiers_.front().in->seconds_for(bytes);
}

void SwapTiers::begin_step() {
  to_write_.clear();  // what a graph that is kept still waits for is copied when it has to go
  if (!options_.device.is_cpu()) {
    spans_.begin_step(now_.step);
    host_waits_.push_back({now_.step});
    if (host_waits_.size() > kMostUntold) {
      host_waits_.pop_front();
    }
  }
}

void SwapTiers::end_step() {
  reap();
  if (options_.device.is_cpu()) {
    return;
  }
  spans_.end_step();
  for (StepSeconds& each : spans_.take_known()) {
    counters_.rebuild_s += each.rerun_s;
    counters_.out_stall_s += each.out_wait_s;
    counters_.in_stall_s += each.in_wait_s;
    for (const HostWaits& waits : host_waits_) {
      if (waits.step == each.step) {  // counted when they were over
        each.out_wait_s += waits.out_s;
        each.in_wait_s += waits.in_s;
      }
    }
    device_seconds_.push_back(each);
  }
  if (device_seconds_.size() > kMostUntold) {  // nobody asks
    device_seconds_.clear();
  }
}

std::vector<StepSeconds> SwapTiers::take_device_seconds() {
  return std::exchange(device_seconds_, {});
}

void SwapTiers::note_host_wait(bool out, double seconds) {
  (out ? counters_.out_stall_s : counters_.in_stall_s) += seconds;
  if (!host_waits_.empty()) {
    (out ? host_waits_.back().out_s : host_waits_.back().in_s) += seconds;
  }
}

void SwapTiers::grow() {
  wants_to_grow_ = false;
  for (auto& tier : tiers_) {
    tier.store->grow();
  }
}

void SwapTiers::stop() {
  {
    Guard guard(lock_);
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
  Guard guard(lock_);
  reap();
}

// ---------------------------------------------------------------- out

void SwapTiers::queue_write_back(const Page& page) {
  if (!none()) {
    to_write_.add(page);
  }
}

void SwapTiers::write_back_queued() {
  const bool idle = std::all_of(tiers_.begin(), tiers_.end(),
                                [](const SwapTier& tier) { return tier.out->idle(); });
  const bool early = is_early(now_, account_.live_bytes(), options_.budget_bytes);
  to_write_.go_on(plans_.following(), early && idle, *this);
}

Row* SwapTiers::find(int64_t id) {
  Page* page = pages_.managed(id);
  return page != nullptr && !page->below.copy ? page : nullptr;
}

bool SwapTiers::is_refused(const Page& page) const {
  return page.below.refused_at >= 0 && page.below.refused_at == returns();
}

bool SwapTiers::can_write_back(const Page& page) const {
  return !none() && page.candidate >= 0 && page.tickets > 0 && !page.below.copy &&
         !is_refused(page) && evidence_.may_swap(*page.current) && page.strong.use_count() == 1 &&
         !page.doubts.being_written && page.content_unchanged() &&
         static_cast<int64_t>(page.strong.nbytes()) == page.bytes &&
         !c10::impl::cow::is_cow_data_ptr(page.strong.data_ptr()) && !page.many_streams &&
         (!options_.device.is_cpu() || cpu_pool::owns(page.strong.data_ptr()));
}

bool SwapTiers::copy_is_good(const Page& page) const {
  const bool there = page.below.copy &&
                     (page.below.copy->transfer->done() || page.below.copy->transfer->ordered());
  return there && page.below.copy->epoch == page.epoch && !page.many_streams &&
         !page.doubts.being_written && page.content_unchanged() &&
         static_cast<int64_t>(page.strong.nbytes()) == page.bytes;
}

void SwapTiers::forget_copy(Page& page) {
  if (!page.below.copy) {
    return;
  }
  Transfer& transfer = *page.below.copy->transfer;
  if (transfer.lane->cancel(transfer)) {
    end_transfer(transfer);
  }  // else it runs to its end, and reap() lets its ends go
  page.below.copy.reset();
}

// A block in the nearest tier that has room; that tier is at `place`. None, too, where a tier has
// room as soon as it has grown (`grows`).
std::shared_ptr<Block> SwapTiers::room_for(int64_t bytes, size_t& place, bool& grows) {
  for (place = 0; place < tiers_.size(); ++place) {
    Store& store = *tiers_[place].store;
    std::shared_ptr<Block> block = store.allocate(bytes);
    if (block) {
      return block;
    }
    if (!store.is_open()) {
      continue;
    }
    if (store.grows_to(bytes)) {
      grows = true;
      return nullptr;
    }
    for (Page* other : pages_.candidates()) {  // what came back can do without its copy
      if (other->below.copy && other->tier == place && other->below.copy->transfer->ended() &&
          other->frees > 0) {
        forget_copy(*other);
      }
    }
    block = store.allocate(bytes);
    if (block) {
      return block;
    }
  }
  return nullptr;
}

bool SwapTiers::write_back(Page& page) {
  if (page.below.copy && page.below.copy->transfer->ended() && !copy_is_good(page)) {
    forget_copy(page);
  }
  if (!can_write_back(page)) {
    return page.below.copy != nullptr;
  }
  if (wants_to_grow_) {
    return false;  // one after the other: it grows as far as it is needed
  }
  size_t place = 0;
  bool grows = false;
  std::shared_ptr<Block> block = room_for(page.bytes, place, grows);
  if (grows) {
    wants_to_grow_ = true;
    return false;
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
  page.tier = place;
  page.below.copy->block = std::move(block);
  page.below.copy->transfer = transfer;
  page.below.copy->epoch = page.epoch;
  counters_.written_back_bytes += page.bytes;
  transfer->stream = page.stream;
  tier.flying_out.push_back(transfer);
  tier.out->submit(transfer);
  return true;
}

bool SwapTiers::free_clean(Page& page) {
  if (page.candidate < 0 || page.tickets == 0 || page.strong.use_count() != 1 ||
      !copy_is_good(page)) {
    return false;
  }
  if (!evidence_.take(page, /*copied=*/true)) {
    return false;
  }
  pages_.remove_candidate(page);
  page.move_to(Residency::Swapped);
  page.data = nullptr;
  ++page.frees;
  counters_.prefetch_vain += page.below.prefetched ? 1 : 0;
  page.below.prefetched = false;
  levels_.swapped_now_bytes += page.bytes;
  ++counters_.swap_outs;
  counters_.swapped_out_bytes += page.bytes;
  events_.emit(EventKind::SwappedOut, &page, page.bytes, 0, now_.key_of(*page.current),
               static_cast<int>(tiers_[page.tier].kind));
  swapped_.add(page, plans_.next_use_of(page), now_, plans_.as_written());
  page.strong.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, options_.device));
  return true;
}

void SwapTiers::trace(const Transfer& transfer, TraceKind kind) {
  if (events_.tracing() && transfer.done()) {
    events_.trace({static_cast<int64_t>(kind), transfer.key, transfer.bytes, 0, 0, transfer.begin_s,
                   transfer.end_s});
  }
}

bool SwapTiers::reap() {
  bool ended = false;
  for (auto& tier : tiers_) {
    tier.out->poll();
    tier.in->poll();
    for (; !tier.flying_out.empty() && tier.flying_out.front()->ended(); ended = true) {
      Transfer& t = *tier.flying_out.front();
      trace(t, TraceKind::CopyOut);
      if (t.failed()) {
        tier.store->fail();
        ++counters_.failed_writes;
        counters_.write_error = counters_.write_error != 0 ? counters_.write_error : t.error;
        Page* page = pages_.managed(t.page);
        if (page != nullptr && page->below.copy && page->below.copy->transfer.get() == &t) {
          fail_out(*page, t.error);
        }
      }
      end_transfer(t);
      tier.flying_out.pop_front();
    }
    for (; !tier.flying_in.empty() && tier.flying_in.front()->ended(); ended = true) {
      Transfer& t = *tier.flying_in.front();
      trace(t, TraceKind::CopyIn);
      Page* page = pages_.managed(t.page);
      if (page != nullptr && page->below.incoming.get() == &t) {
        finish_in(*page);
      }
      end_transfer(t);
      tier.flying_in.pop_front();
    }
  }
  return ended;
}

// ---------------------------------------------------------------- in

void SwapTiers::time_return(Page& page, int64_t tick) {
  const bool swapped = page.residency() == Residency::Swapped;
  if (swapped) {
    swapped_.remove(page);
  }
  page.return_tick = tick;
  if (swapped) {
    swapped_.add(page, plans_.next_use_of(page), now_, plans_.as_written());
  }
}

// What is to come back at this op boundary, while there is room for so much.
SwapTiers::PagePtrs SwapTiers::wanted_back(int64_t room_bytes) {
  std::vector<LaneLoad> lanes;
  for (const auto& tier : tiers_) {
    lanes.push_back({tier.in->queued_bytes(), tier.in->seconds_for(1)});
  }
  PagePtrs wanted;
  for (Row* row : swapped_.due(now_, plans_.as_written(), room_bytes, std::move(lanes))) {
    wanted.push_back(c10::intrusive_ptr<Page>::reclaim_copy(static_cast<Page*>(row)));
  }
  return wanted;
}

SwapTiers::PagePtrs SwapTiers::some_swapped(const std::function<bool()>& chosen) {
  PagePtrs some;
  for (Row* row : swapped_.all()) {
    if (chosen()) {
      some.push_back(c10::intrusive_ptr<Page>::reclaim_copy(static_cast<Page*>(row)));
    }
  }
  return some;
}

// Queues the copy into a storage that the page has from here on.
void SwapTiers::submit_in(Page& page, c10::Storage storage, const TransferPtr& transfer,
                          bool prefetch) {
  SwapTier& tier = tiers_[page.tier];
  transfer->memory = storage.mutable_data();
  transfer->bytes = page.bytes;
  transfer->key = page.current->key;
  transfer->page = page.id;
  transfer->device = storage;
  transfer->block = page.below.copy->block;
  transfer->follows = page.below.copy->transfer->ended() ? nullptr : page.below.copy->transfer;
  pages_.rehome(page, storage);
  page.move_to(Residency::SwappingIn);
  page.below.prefetched = prefetch;
  page.below.incoming = transfer;
  swapped_.remove(page);
  if (plans_.as_written()) {  // one copy back for each time that it leaves
    counters_.plan_actions += prefetch && is_timed(page, now_, /*as_written=*/true) ? 1 : 0;
    page.return_tick = -1;
  }
  levels_.swapped_now_bytes -= page.bytes;
  levels_.swapping_in_bytes += page.bytes;
  tier.flying_in.push_back(transfer);
  tier.in->submit(transfer);
}

void SwapTiers::finish_in(Page& page) {
  if (page.below.incoming->failed()) {
    fail_in(page, /*differs=*/false);
    return;
  }
  if ((page.below.incoming->done() || page.below.incoming->ordered()) &&
      !evidence_.is_as_it_went(page, page.strong, /*copied=*/true)) {
    ++counters_.mismatches;
    fail_in(page, /*differs=*/true);
    return;
  }
  const double seconds = page.below.incoming->end_s - page.below.incoming->begin_s;
  if (!page.below.incoming->ended()) {
    page.below.arrival = page.below.incoming;
  }
  page.below.incoming.reset();
  page.move_to(Residency::Resident);
  page.retry_tick = 0;
  levels_.swapping_in_bytes -= page.bytes;
  ++counters_.swap_ins;
  counters_.swapped_in_bytes += page.bytes;
  pages_.add_candidate(page);
  events_.emit(EventKind::SwappedIn, &page, page.bytes, seconds, now_.key_of(*page.current));
}

// The copy below never was whole. On an accelerator its page may have gone by then: what comes
// later on the stream of its memory had only been told to wait for it.
void SwapTiers::fail_out(Page& page, int error) {
  page.below.copy.reset();
  if (page.residency() == Residency::Swapped) {
    swapped_.remove(page);
    levels_.swapped_now_bytes -= page.bytes;
    page.went.error = error;
    do_without_copy(page, /*differs=*/false);
  }
}

// The copy below could not be read, or is not what went.
void SwapTiers::fail_in(Page& page, bool differs) {
  if (!differs) {
    ++counters_.failed_reads;
    const int error = page.below.incoming->error;
    page.went.error = error;
    counters_.read_error = counters_.read_error != 0 ? counters_.read_error : error;
  }
  page.below.incoming.reset();
  page.below.prefetched = false;
  page.below.copy.reset();
  levels_.swapping_in_bytes -= page.bytes;
  page.strong.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, options_.device));
  do_without_copy(page, differs);
}

// From here on the page is one that was dropped, if it has a recipe that still holds.
void SwapTiers::do_without_copy(Page& page, bool differs) {
  if (page.current->anchor || !recipes_.anchor(*page.current)) {
    page.move_to(Residency::Lost);
    page.went.differs = differs;
    counters_.lost_pages += differs ? 0 : 1;
    return;
  }
  events_.emit(EventKind::SwappedIn, &page, page.bytes, 0, now_.key_of(*page.current));
  recipes_.note_dropped(page);
}

void SwapTiers::release(Page& page) {
  if (page.residency() == Residency::Swapped) {
    levels_.swapped_now_bytes -= page.bytes;
    swapped_.remove(page);
  } else if (page.residency() == Residency::SwappingIn) {
    levels_.swapping_in_bytes -= page.bytes;
    page.below.incoming.reset();
  }
}

// On another stream than the page's own, its memory is not used again before that stream is done.
void SwapTiers::order_after_arrival(Page& page, const c10::Storage& storage) const {
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

bool SwapTiers::has_copy_of(const Value& v) const {
  const Page* home = v.home;
  if (home == nullptr || home->tickets == 0) {
    return false;
  }
  const Residency now = home->residency();
  return now == Residency::Swapped || now == Residency::SwappingIn ||
         (now == Residency::Resident && copy_is_good(*home));
}

c10::Storage SwapTiers::storage_there(const Value& v) const {
  if (!v.is_alive() || !v.home->content_unchanged() || !v.readable()) {
    return {};
  }
  c10::Storage storage = v.home->strong;
  if (!storage) {
    auto alive = lock(v.home->weak);
    storage = alive ? c10::Storage(std::move(alive)) : c10::Storage();
  }
  if (storage && (v.home->was_moved(*storage.unsafeGetStorageImpl()) ||
                  !v.lies_in(*storage.unsafeGetStorageImpl()))) {
    thread_trash().take(std::move(storage));
    return {};
  }
  order_after_arrival(*v.home, storage);
  return storage;
}

}  // namespace delta

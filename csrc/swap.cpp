// Swapping: pages whose bytes wait in host memory.
//
// Note: clean pages
//  1. A page is clean when a finished copy of its present content lies in host memory: its device
//     copy can be freed at once. Copies are made early, while the lane is idle or as the plan says,
//     but only of pages that nobody else holds: who holds a tensor may write to it, and not every
//     write can be seen.
//  2. A copy is of one content. It is good as long as the page's epoch (which moves on with every
//     new content that the recorder knows of) and version are those of its begin; both are looked
//     at when the device copy is freed, never only when the copy was made.
//  3. Copying begins at op boundaries, never inside pack: some ops save what they fill later.
//  4. A page in flight is held by its transfer; its bytes leave the account when the lane is done.
//  5. What came back keeps its copy, and stays clean, until its last ticket goes or host memory
//     runs short.
//  6. Nothing waits for a lane under the session's lock.
#include <c10/core/impl/COW.h>

#include "cpu_pool.h"
#include "replay.h"
#include "session.h"

namespace delta {
namespace {

constexpr int64_t kUnknownReturn = int64_t{1} << 60;
constexpr double kHorizonSeconds = 0.03;     // of lane time that unplanned prefetches may take up
constexpr int64_t kHorizonBytes = 16 << 20;  // the same, before the lane's speed is known
constexpr int64_t kSlackBytes = 64 * 1024;

double now_s() { return seconds_of(std::chrono::steady_clock::now()); }

}  // namespace

// ---------------------------------------------------------------- out

bool Session::is_alone(const Page& page) const {
  const bool flying = page.copy && page.copy->transfer->device;
  return page.strong.use_count() == (flying ? 2 : 1);
}

// Whether there was no host memory for it, and none has come free since.
bool Session::is_refused(const Page& page) const {
  return page.refused_at >= 0 && page.refused_at == host_->returns();
}

bool Session::can_write_back(Page& page) const {
  return out_lane_ && page.candidate >= 0 && page.tickets > 0 && !page.copy && !is_refused(page) &&
         page.strong.use_count() == 1 && !page.being_written && content_unchanged(page) &&
         static_cast<int64_t>(page.strong.nbytes()) == page.bytes &&
         !c10::impl::cow::is_cow_data_ptr(page.strong.data_ptr()) &&
         cpu_pool::owns(page.strong.data_ptr());
}

bool Session::copy_is_good(const Page& page) const {
  return page.copy && page.copy->transfer->done() && page.copy->epoch == page.epoch &&
         page.copy->version == page.version && !page.being_written && content_unchanged(page) &&
         static_cast<int64_t>(page.strong.nbytes()) == page.bytes;
}

void Session::forget_copy(Page& page) {
  if (!page.copy) {
    return;
  }
  Transfer& transfer = *page.copy->transfer;
  if (out_lane_->cancel(transfer)) {
    thread_trash().take(std::move(transfer.device));
    transfer.device = c10::Storage();
    transfer.host.reset();
  }  // else it runs to its end, and reap() lets its ends go
  page.copy.reset();
}

bool Session::write_back(Page& page) {
  if (page.copy && page.copy->transfer->ended() && !copy_is_good(page)) {
    forget_copy(page);
  }
  if (!can_write_back(page)) {
    return page.copy != nullptr;
  }
  std::shared_ptr<HostBlock> block = host_->allocate(page.bytes);
  if (!block) {
    for (Page* other : candidates_) {  // what came back can do without its copy
      if (other->copy && other->copy->transfer->ended() && other->frees > 0) {
        forget_copy(*other);
      }
    }
    block = host_->allocate(page.bytes);
  }
  if (!block) {
    page.refused_at = host_->returns();
    ++counters_.host_refusals;
    return false;
  }
  auto transfer = c10::make_intrusive<Transfer>();
  transfer->to = block->data();
  transfer->from = page.strong.data();
  transfer->bytes = page.bytes;
  transfer->key = page.current->key;
  transfer->page = page.id;
  transfer->device = page.strong;
  transfer->host = block;
  page.copy = c10::make_intrusive<HostCopy>();
  page.copy->block = std::move(block);
  page.copy->transfer = transfer;
  page.copy->epoch = page.epoch;
  page.copy->version = page.version;
  counters_.written_back_bytes += page.bytes;
  flying_out_.push_back(transfer);
  out_lane_->submit(transfer);
  return true;
}

bool Session::free_clean(Page& page) {
  if (page.candidate < 0 || page.tickets == 0 || page.strong.use_count() != 1 ||
      !copy_is_good(page)) {
    return false;
  }
  remove_candidate(page);
  page.residency = Residency::Host;
  ++page.frees;
  counters_.prefetch_vain += page.prefetched ? 1 : 0;
  page.prefetched = false;
  host_now_bytes_ += page.bytes;
  ++counters_.swap_outs;
  counters_.swapped_out_bytes += page.bytes;
  emit(EventKind::SwappedOut, &page, page.bytes, 0, page.current->key);
  page.return_order = return_order(page);
  on_host_.emplace(page.return_order, page.id);
  page.strong.unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, options_.device));
  return true;
}

// Takes the ends of finished transfers from them, so that no worker is ever the last owner of a
// storage, and makes pages that have come back resident.
bool Session::reap() {
  const size_t before = flying_out_.size() + flying_in_.size();
  const auto row = [&](const Transfer& t, TraceKind kind) {
    if (tracing_ && t.done()) {
      trace_.push_back({static_cast<int64_t>(kind), t.key, t.bytes, 0, 0, t.begin_s, t.end_s});
    }
  };
  while (!flying_out_.empty() && flying_out_.front()->ended()) {
    Transfer& t = *flying_out_.front();
    row(t, TraceKind::CopyOut);
    thread_trash().take(std::move(t.device));
    t.device = c10::Storage();
    t.host.reset();
    flying_out_.pop_front();
  }
  while (!flying_in_.empty() && flying_in_.front()->ended()) {
    Transfer& t = *flying_in_.front();
    row(t, TraceKind::CopyIn);
    auto page = managed_.find(t.page);
    if (page != managed_.end() && page->second->incoming.get() == &t) {
      finish_swap_in(*page->second);
    }
    thread_trash().take(std::move(t.device));
    t.device = c10::Storage();
    t.host.reset();
    flying_in_.pop_front();
  }
  return flying_out_.size() + flying_in_.size() < before;
}

// ---------------------------------------------------------------- in

// Whether the plan of this very step says when the page comes back. Evicted a second time, or in a
// later step, it does not.
bool Session::is_timed(const Page& page) const {
  return page.prefetch_at >= step_begin_tick_ && page.frees <= 1;
}

// When a page is to come back, relative to others: by the plan, else by its next use, else those
// that were saved last come first.
int64_t Session::return_order(Page& page) const {
  if (is_timed(page)) {
    return page.prefetch_at;
  }
  const int64_t next = next_use_of(page, tick_);
  return next >= 0 ? next : kUnknownReturn - page.packed_at;
}

// Gives the page a storage and queues the copy into it. Without the lock: allocating may evict.
// Returns false where somebody else does it, or where there is no room for a prefetch.
bool Session::begin_swap_in(Page& page, bool prefetch) {
  {
    Guard guard(*this);
    if (page.residency != Residency::Host || page.fetching) {
      return false;
    }
    page.fetching = true;
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
      page.fetching = false;
    }
    if (prefetch) {
      return false;
    }
    throw;
  }
  auto transfer = c10::make_intrusive<Transfer>();
  Guard guard(*this);
  page.fetching = false;
  if (page.tickets == 0 || page.residency != Residency::Host) {
    thread_trash().take(std::move(storage));
    return false;
  }
  transfer->to = storage.mutable_data();
  transfer->from = page.copy->block->data();
  transfer->bytes = page.bytes;
  transfer->key = page.current->key;
  transfer->page = page.id;
  transfer->device = storage;
  transfer->host = page.copy->block;
  rehome(page, storage);
  page.residency = Residency::SwappingIn;
  page.prefetched = prefetch;
  page.incoming = transfer;
  on_host_.erase({page.return_order, page.id});
  host_now_bytes_ -= page.bytes;
  swapping_in_bytes_ += page.bytes;
  flying_in_.push_back(transfer);
  in_lane_->submit(transfer);
  return true;
}

void Session::finish_swap_in(Page& page) {
  const double seconds = page.incoming->end_s - page.incoming->begin_s;
  page.incoming.reset();
  page.residency = Residency::Resident;
  page.retry_tick = 0;
  swapping_in_bytes_ -= page.bytes;
  ++counters_.swap_ins;
  counters_.swapped_in_bytes += page.bytes;
  add_candidate(page);
  emit(EventKind::SwappedIn, &page, page.bytes, seconds, page.current->key);
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
      if (page.incoming && page.incoming->done()) {
        finish_swap_in(page);
        if (!told) {
          ++counters_.prefetch_hits;
        }
        page.prefetched = false;
      }
      if (page.tickets == 0) {
        return {};  // let go of meanwhile
      }
      if (page.residency == Residency::Resident || page.residency == Residency::Dropped) {
        if (page.prefetched && !told) {
          ++counters_.prefetch_hits;
        } else if (told) {
          counters_.in_stall_seconds += now_s() - begin;
        }
        page.prefetched = false;
        return page.residency == Residency::Resident ? page.strong : c10::Storage();
      }
      if (!told) {
        ++(page.residency == Residency::SwappingIn ? counters_.prefetch_late
                                                   : counters_.prefetch_misses);
        told = true;
        begin = now_s();
      }
      incoming = page.incoming;
      busy = page.fetching;
    }
    if (incoming) {
      in_lane_->wait(*incoming);
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
  std::vector<int64_t> later;
  for (size_t looked = 0; !to_write_.empty() && looked < most_looked_at; ++looked) {
    const auto found = managed_.find(to_write_.front());
    Page* page = found != managed_.end() ? found->second : nullptr;
    const bool wanted = page != nullptr && page->exit == Exit::Swap && !page->copy &&
                        (plan_ == nullptr || page->planned);
    if (wanted && plan_ == nullptr && !(early && out_lane_->idle())) {
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
  std::vector<c10::intrusive_ptr<Page>> wanted;
  {
    Guard guard(*this);
    reap();
    write_back_queued();
    int64_t room = budget > 0 ? budget - live_bytes() - need_bytes - kSlackBytes : budget;
    int64_t queued = in_lane_->queued_bytes();
    for (const auto& [order, id] : on_host_) {
      Page& page = *managed_.at(id);
      if (phase_ == Phase::Forward) {
        break;
      }
      if (is_timed(page)) {
        if (tick_ < page.prefetch_at) {
          break;
        }
      } else {
        const double seconds = in_lane_->seconds_for(queued);
        if (seconds > 0 ? seconds > kHorizonSeconds : queued > kHorizonBytes) {
          break;
        }
      }
      if (page.bytes > room) {
        break;
      }
      room -= page.bytes;
      queued += page.bytes;
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
}

void Session::stop_lanes() {
  if (!out_lane_) {
    return;
  }
  {
    Guard guard(*this);
    for (const auto& transfer : flying_out_) {
      if (out_lane_->cancel(*transfer)) {  // nothing will be evicted any more
        thread_trash().take(std::move(transfer->device));
        transfer->device = c10::Storage();
        transfer->host.reset();
      }
    }
  }
  out_lane_->stop();
  in_lane_->stop();
  Guard guard(*this);
  reap();
}

}  // namespace delta

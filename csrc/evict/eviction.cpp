#include "evict/eviction.h"

#include <c10/core/impl/COW.h>

#include <algorithm>
#include <chrono>

#include "pool/cpu_pool.h"

namespace delta {
namespace {

constexpr int64_t kPumpIntervalTicks = 64;
constexpr int64_t kRetryTicks = 256;        // before a page is looked at again that could not go
constexpr int64_t kSlackBytes = 64 * 1024;  // allocator rounding of a handful of blocks

}  // namespace

Eviction::Eviction(SessionState& state, OutsideMemory& outside, DeviceEvidence& on_device,
                   Evidence& evidence, Recipes& recipes, PlanTable& plans, SwapTiers& tiers)
    : Part(state),
      outside_(outside),
      on_device_(on_device),
      evidence_(evidence),
      recipes_(recipes),
      plans_(plans),
      tiers_(tiers) {}

int64_t Eviction::look_ahead(int64_t need_bytes) {
  if (pump_ && !plans_.following() && !pumping_ && !thread_trash().locked &&
      now_.tick - last_pump_tick_ >= kPumpIntervalTicks) {
    last_pump_tick_ = now_.tick;
    pumping_ = true;
    ++counters_.pumps;
    pump_(need_bytes);
    pumping_ = false;
  }
  const int64_t room = account_.live_bytes() + need_bytes + kSlackBytes - account_.limit_bytes();
  if (room <= 0) {
    return 0;
  }
  return std::max<int64_t>(0, room - kSlackBytes - make_room(room, /*inside_allocation=*/false));
}

bool Eviction::drop(Page& page) {
  if (page.candidate < 0 || !options_.drop || page.tickets == 0 || page.retry_tick > now_.tick) {
    return false;
  }
  if (page.strong.use_count() != 1 || page.many_streams || !page.content_unchanged() ||
      c10::impl::cow::is_cow_data_ptr(page.strong.data_ptr())) {
    return false;
  }
  if (page.outside.unguarded &&
      (!options_.device.is_cpu() || (outside_.watches() && !page.current->watched))) {
    return false;  // nobody can say whether its content is still what its recipe makes
  }
  if (options_.device.is_cpu() && !cpu_pool::owns(page.strong.data_ptr())) {
    return false;  // freeing it frees nothing that is counted, and its deleter may take the GIL
  }
  auto* storage = page.strong.unsafeGetStorageImpl();
  if (page.current->anchor || page.was_moved(*storage) || !recipes_.anchor(*page.current)) {
    page.retry_tick = now_.tick + kRetryTicks;
    return false;
  }
  if (!evidence_.take(page, /*copied=*/false)) {
    return false;
  }
  if (page.current->watched && !(page.went.hashed ? page.went.hash == page.current->hash
                                                  : page.current->lies_in(*storage))) {
    page.went.hashed = false;
    page.retry_tick =
        now_.tick + kRetryTicks;  // somebody wrote to it past the dispatcher: it stays
    outside_.set_unguarded(page);
    return false;
  }
  tiers_.forget_copy(page);
  pages_.remove_candidate(page);
  recipes_.note_dropped(page);
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, options_.device));
  return true;
}

// What is clean, and what may be dropped, goes in the order of the scores. Pages that have yet to
// be copied come last: that is a wait, and without the lock.
int64_t Eviction::make_room(int64_t bytes, bool inside_allocation) {
  Guard guard(lock_, std::defer_lock);
  if (!inside_allocation) {
    guard.lock();
  } else if (!guard.lock_with_gil()) {  // see gil.h
    return 0;
  }
  on_device_.begin_evictions();
  const int64_t before = account_.live_bytes();
  int64_t freed = 0;
  size_t flying_in = 0;
  for (const auto& tier : tiers_.all()) {
    flying_in += tier.flying_in.size();
  }
  // A wait frees at least one page, unless somebody writes to it at that very moment.
  for (size_t turn = 0, most = 2 * pages_.candidates().size() + flying_in + 8; turn < most;
       ++turn) {
    if (tiers_.reap()) {
      // What the transfers held is let go here: until then their pages are exposed.
      guard.unlock();
      on_device_.hash_returned();  // so are those
      guard.lock();
    }
    Transfers coming;
    freed = evict(bytes, before, inside_allocation, coming);
    if (freed >= bytes) {
      break;
    }
    if (on_device_.take_hashes(guard)) {
      continue;
    }
    for (const auto& tier : tiers_.all()) {
      if (coming.empty() && !tier.flying_in.empty()) {
        coming.push_back(tier.flying_in.front());  // once it is there it can go again
      }
    }
    if (coming.empty()) {
      break;
    }
    wait_for(*coming.front(), guard);
  }
  if (freed < bytes && !inside_allocation && pages_.has_anchors() &&
      now_.phase == Phase::Backward) {
    guard.unlock();
    pages_.forget_past();  // sources may be held for values that backward is done with
    guard.lock();
    freed = before - account_.live_bytes();
  }
  if (inside_allocation) {
    ++counters_.rescues;
    counters_.rescued_bytes += freed;
    events_.emit(EventKind::Rescue, nullptr, bytes, 0);
  }
  if (freed < bytes) {
    note_shortfall(bytes - freed);
  }
  return freed;
}

// Lets go of the lock meanwhile.
void Eviction::wait_for(Transfer& transfer, Guard& guard) {
  guard.unlock();
  const auto begin = std::chrono::steady_clock::now();
  if (transfer.out) {
    transfer.lane->wait(transfer);
  } else {
    transfer.lane->finish(transfer);
  }
  const double waited_s =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  guard.lock();
  if (transfer.out && !transfer.ended()) {  // on a stream: what is freed now is used again after it
    thread_trash().take(std::move(transfer.device));
    transfer.device = c10::Storage();
    guard.unlock();
    guard.lock();
  }
  (transfer.out ? counters_.out_stall_s : counters_.in_stall_s) += waited_s;
}

void Eviction::note_shortfall(int64_t bytes) {
  ++counters_.shortfalls;
  counters_.shortfall_bytes = std::max(counters_.shortfall_bytes, bytes);
  int64_t exposed = 0;
  for (const Page* page : pages_.candidates()) {
    exposed += page->is_alone() ? 0 : page->bytes;
  }
  counters_.exposed_bytes = std::max(counters_.exposed_bytes, exposed);
  events_.emit(EventKind::Shortfall, nullptr, bytes, 0);
}

// One walk over the candidates. Returns what the allocator has got back since it held `before`
// bytes; `coming` are copies whose pages can go when they are done.
int64_t Eviction::evict(int64_t bytes, int64_t before, bool inside_allocation, Transfers& coming) {
  struct Scored {
    double score;
    Page* page;
  };
  std::vector<Scored> order;
  order.reserve(pages_.candidates().size());
  for (Page* page : pages_.candidates()) {
    if ((page->retry_tick > now_.tick && !options_.swap) || !page->is_alone()) {
      continue;
    }
    order.push_back({page->weight / static_cast<double>(plans_.distance_of(*page)), page});
  }
  const auto later = [](const Scored& a, const Scored& b) {
    return a.score != b.score ? a.score > b.score : a.page->id > b.page->id;
  };
  std::make_heap(order.begin(), order.end(), later);
  int64_t freed = before - account_.live_bytes();
  std::vector<Page*> dirty;
  int64_t planned_bytes = 0;  // of `dirty`
  int64_t coming_bytes = 0;
  while (!order.empty() && freed + coming_bytes < bytes) {
    std::pop_heap(order.begin(), order.end(), later);
    Page* page = order.back().page;
    order.pop_back();
    bool gone = tiers_.free_clean(*page);
    counters_.clean_evictions += gone && page->below.clean_at_once ? 1 : 0;
    if (!gone && on_device_.awaits_hash(*page)) {
      coming_bytes += page->bytes;
      continue;
    }
    if (!gone && page->exit == Exit::Swap && options_.swap && !tiers_.is_refused(*page)) {
      dirty.push_back(page);
      planned_bytes += page->planned ? page->bytes : 0;
      continue;
    }
    if (!gone && !page->planned && freed + planned_bytes >= bytes) {
      break;  // what the plan wants to go is on its way
    }
    if (!gone) {
      gone = drop(*page);
      if (!gone && on_device_.awaits_hash(*page)) {
        coming_bytes += page->bytes;
        continue;
      }
      if (!gone && options_.swap && page->tickets > 0) {
        dirty.push_back(page);
      }
    }
    if (gone) {
      freed = before - account_.live_bytes();
      if (!inside_allocation) {
        ++counters_.boundary_evictions;
      }
    }
  }
  return write_back(dirty, bytes, before, freed, coming_bytes, coming);
}

// Begins to copy what has no copy yet, until enough is coming. Returns what the allocator has got
// back by then.
int64_t Eviction::write_back(const std::vector<Page*>& dirty, int64_t bytes, int64_t before,
                             int64_t freed, int64_t coming_bytes, Transfers& coming) {
  for (Page* page : dirty) {
    if (freed + coming_bytes >= bytes) {
      break;
    }
    if (tiers_.write_back(*page)) {
      page->below.clean_at_once = false;
      coming_bytes += page->bytes;
      coming.push_back(page->below.copy->transfer);
    } else if (tiers_.is_refused(*page) && drop(*page)) {
      freed = before - account_.live_bytes();
    }
  }
  return freed;
}

}  // namespace delta

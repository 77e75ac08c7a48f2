#include "evict/eviction.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/COW.h>

#include <algorithm>
#include <chrono>

#include "pool/cpu_pool.h"
#include "walk/tuning.h"
#include "walk/victims.h"

namespace delta {

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
      now_.tick - last_pump_tick_ >= kTuning.ask_interval_ticks) {
    last_pump_tick_ = now_.tick;
    pumping_ = true;
    ++counters_.pumps;
    pump_(need_bytes);
    pumping_ = false;
  }
  const int64_t room = short_by(account_.live_bytes(), need_bytes, account_.limit_bytes());
  if (room <= 0) {
    return 0;
  }
  return std::max<int64_t>(
      0, room - kTuning.slack_bytes - make_room(room, /*inside_allocation=*/false));
}

bool Eviction::rescue(int64_t need_bytes, int attempt, bool inside_allocation) {
  constexpr int most_attempts = 3;
  if (attempt >= most_attempts || options_.device.is_cpu()) {
    return false;
  }
  const bool all = attempt > 0;
  if (!all) {  // nothing has left for it yet
    account_.note_refused();
  }
  const int64_t freed = evict(all ? std::max(need_bytes, account_.live_bytes()) : need_bytes,
                              inside_allocation, /*tells=*/false);
  await_all_streams(options_.device);  // what they still used is free behind this
  if (all || freed < need_bytes) {
    c10::getDeviceAllocator(options_.device.type())->emptyCache();
  }
  if (!inside_allocation) {
    Guard guard(lock_);
    note_rescue(need_bytes, freed);
  }
  // Where nothing was freed, what the allocator gave back may do all the same.
  return freed > 0 || attempt + 1 < most_attempts;
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
    page.retry_tick = now_.tick + kTuning.retry_ticks;
    return false;
  }
  if (!evidence_.take(page, /*copied=*/false)) {
    return false;
  }
  if (page.current->watched && !(page.went.hashed ? page.went.hash == page.current->hash
                                                  : page.current->lies_in(*storage))) {
    page.went.hashed = false;
    page.retry_tick =
        now_.tick + kTuning.retry_ticks;  // somebody wrote to it past the dispatcher: it stays
    outside_.set_unguarded(page);
    return false;
  }
  tiers_.forget_copy(page);
  pages_.remove_candidate(page);
  recipes_.note_dropped(page);
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, options_.device));
  return true;
}

// What the walk decides, carried out on pages. Under the lock, which it lets go of to wait.
class Eviction::Carrying final : public Carrier {
 public:
  Carrying(Eviction& eviction, Guard& guard, bool inside_allocation)
      : eviction_(eviction),
        guard_(guard),
        inside_allocation_(inside_allocation),
        bytes_before_(eviction.account_.live_bytes()) {}

  void reap() override {
    coming_.clear();
    if (eviction_.tiers_.reap()) {
      // What the transfers held is let go here: until then their pages are exposed.
      guard_.unlock();
      eviction_.on_device_.hash_returned();  // so are those
      guard_.lock();
    }
  }

  void offer(VictimQueue& victims) override {
    const auto& candidates = eviction_.pages_.candidates();
    victims.reserve(candidates.size());
    for (Page* page : candidates) {
      if (is_due(*page, eviction_.now_.tick, eviction_.options_.swap) && page->is_alone()) {
        victims.offer(*page, eviction_.plans_.distance_of(*page));
      }
    }
  }

  int64_t freed_bytes() override { return bytes_before_ - eviction_.account_.live_bytes(); }

  bool free_clean(Row& row) override {
    Page& page = static_cast<Page&>(row);
    const bool gone = eviction_.tiers_.free_clean(page);
    eviction_.counters_.clean_evictions += gone && page.below.clean_at_once ? 1 : 0;
    return counted(gone);
  }

  bool drop(Row& row) override { return counted(eviction_.drop(static_cast<Page&>(row))); }

  bool comes_free(const Row& row) override {
    return eviction_.on_device_.awaits_hash(static_cast<const Page&>(row));
  }

  bool is_refused(const Row& row) override {
    return eviction_.tiers_.is_refused(static_cast<const Page&>(row));
  }

  bool write_back(Row& row) override {
    Page& page = static_cast<Page&>(row);
    if (!eviction_.tiers_.write_back(page)) {
      return false;
    }
    page.below.clean_at_once = false;
    coming_.push_back(page.below.copy->transfer);
    return true;
  }

  bool look() override { return eviction_.on_device_.take_hashes(guard_); }

  bool wait() override {
    // Rather than wait for what is on its way back; but what pins memory may take the GIL (gil.h).
    if (eviction_.tiers_.wants_to_grow() && !inside_allocation_) {
      guard_.unlock();
      eviction_.tiers_.grow();
      guard_.lock();
      return true;
    }
    for (const auto& tier : eviction_.tiers_.all()) {
      if (coming_.empty() && !tier.flying_in.empty()) {
        coming_.push_back(tier.flying_in.front());
      }
    }
    if (coming_.empty()) {
      return false;
    }
    eviction_.wait_for(*coming_.front(), guard_);
    return true;
  }

 private:
  bool counted(bool gone) const {
    eviction_.counters_.boundary_evictions += gone && !inside_allocation_ ? 1 : 0;
    return gone;
  }

  Eviction& eviction_;
  Guard& guard_;
  bool inside_allocation_;
  int64_t bytes_before_;
  std::vector<TransferPtr> coming_;  // copies whose pages can go when they are done
};

int64_t Eviction::make_room(int64_t bytes, bool inside_allocation) {
  return evict(bytes, inside_allocation, /*tells=*/true);
}

int64_t Eviction::evict(int64_t bytes, bool inside_allocation, bool tells) {
  Guard guard(lock_, std::defer_lock);
  if (!inside_allocation) {
    guard.lock();
  } else if (!guard.lock_with_gil()) {  // see gil.h
    return 0;
  }
  on_device_.begin_evictions();
  size_t most_turns = 2 * pages_.candidates().size() + 8;
  for (const auto& tier : tiers_.all()) {
    most_turns += tier.flying_in.size();
  }
  Carrying carrying(*this, guard, inside_allocation);
  int64_t freed = delta::make_room(bytes, options_.swap, most_turns, carrying);
  if (freed < bytes && !inside_allocation && pages_.has_anchors() &&
      now_.phase == Phase::Backward) {
    guard.unlock();
    pages_.forget_past();  // sources may be held for values that backward is done with
    guard.lock();
    freed = carrying.freed_bytes();
  }
  if (inside_allocation) {
    note_rescue(bytes, freed);
  }
  if (freed < bytes && tells) {
    note_shortfall(bytes - freed);
  }
  return freed;
}

// Lets go of the lock meanwhile.
void Eviction::wait_for(Transfer& transfer, Guard& guard) {
  guard.unlock();
  double begin_s = seconds_of(std::chrono::steady_clock::now());
  if (transfer.out) {
    transfer.lane->wait(transfer);
  } else {
    transfer.lane->finish(transfer);
  }
  if (!options_.device.is_cpu() && transfer.ended()) {
    begin_s = std::max(begin_s, transfer.begin_s);  // before that the device had other things to do
  }
  const double waited_s = std::max(0.0, seconds_of(std::chrono::steady_clock::now()) - begin_s);
  guard.lock();
  if (transfer.out && !transfer.ended()) {  // on a stream: what is freed now is used again after it
    thread_trash().take(std::move(transfer.device));
    transfer.device = c10::Storage();
    guard.unlock();
    guard.lock();
  }
  if (!transfer.out || transfer.lane->host_waits()) {
    tiers_.note_host_wait(transfer.out, waited_s);
  }
}

void Eviction::note_rescue(int64_t bytes, int64_t freed_bytes) {
  ++counters_.rescues;
  counters_.rescued_bytes += freed_bytes;
  events_.emit(EventKind::Rescue, nullptr, bytes, 0);
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

}  // namespace delta

// Eviction: the walk over the published weights, by itself, without Python and without the GIL.
//
// Note: freeing inside an allocation
//  1. Only raw data pointers are freed here: the StorageImpl stays as an empty shell, so that no
//     object with a Python side dies in a place that must not take the GIL.
//  2. A page is a victim only if the use count of its storage is our own single reference: then
//     nobody else can read it, and no copy, no running op and no rebuild holds it.
//  3. Before the first byte of a page is freed, its whole recipe was walked down to sources that
//     are there and unchanged, and those were anchored.
//  4. What is credited is the allocator's own change, not the estimate.
#include <c10/core/impl/COW.h>

#include <algorithm>

#include "pool/cpu_pool.h"
#include "state/session.h"

namespace delta {

void Session::add_candidate(Page& page) {
  if (page.candidate >= 0) {
    return;
  }
  page.candidate = static_cast<int32_t>(candidates_.size());
  candidates_.push_back(&page);
  managed_resident_bytes_ += page.bytes;
}

void Session::remove_candidate(Page& page) {
  if (page.candidate < 0) {
    return;
  }
  Page* last = candidates_.back();
  candidates_[static_cast<size_t>(page.candidate)] = last;
  last->candidate = page.candidate;
  candidates_.pop_back();
  page.candidate = -1;
  managed_resident_bytes_ -= page.bytes;
}

// Whether `root` can be made again, whatever happens to the pages that are resident now. Checks the
// recipe down to its sources and, if all is well, anchors them. Iterative: recipes are as deep as
// the program.
bool Session::anchor_recipe(Value& root) {
  if (!root.producer) {
    return false;
  }
  if (const uint64_t now = op_removals(); now != op_removals_) {
    op_removals_ = now;
    ++anchor_epoch_;  // what was checked may need an op that is gone
  }
  const auto is_anchored = [&](const OpRecord& op) { return op.anchored_in == anchor_epoch_; };
  // Of each output by itself: another one of the same op may not repeat.
  const auto may_repeat = [&](const Value& v) {
    const OpRecord& op = *v.producer;
    return op.repeats && !op.info->is_gone.load(std::memory_order_relaxed) &&
           distrusted_.count(v.trust_key()) == 0 && distrusted_.count(v.sequence_key()) == 0 &&
           op.info->unrepeatable_return != op.outputs[static_cast<size_t>(v.output)].position &&
           std::all_of(op.kept_versions.begin(), op.kept_versions.end(),
                       [](const Versions& each) { return each.unchanged(); });
  };
  const auto is_trusted = [&](const Value& v) {
    return may_repeat(v) && (is_certain(*v.producer) || options_.verify == Verify::Off ||
                             trusted_.count(v.trust_key()) > 0);
  };
  if (is_anchored(*root.producer) && is_trusted(root)) {
    return true;
  }
  // mark_state of a value in this walk: 0 unseen, 1 open, 2 will be rebuilt, 3 will be a leaf,
  // 4 out of reach
  const uint64_t walk = ++walk_;
  std::vector<Value*> stack{&root};
  std::vector<OpRecord*> ops;
  std::vector<Value*> leaves;
  auto state = [&](Value& v) -> int8_t& {
    if (v.mark != walk) {
      v.mark = walk;
      v.mark_state = 0;
    }
    return v.mark_state;
  };
  while (!stack.empty()) {
    Value& v = *stack.back();
    int8_t& s = state(v);
    if (s >= 2) {
      stack.pop_back();
      continue;
    }
    if (v.anchor) {
      s = v.readable() ? 3 : 4;
      stack.pop_back();
      continue;
    }
    OpRecord* op = v.producer.get();
    bool reachable = op != nullptr;
    if (reachable && !is_trusted(v)) {
      reachable = false;
      for (Page* home : {v.home, root.home}) {
        if (home != nullptr && home->tickets > 0 && may_repeat(v)) {
          home->doubts.audit_pending = !op->info->collective;
        }
      }
    }
    const bool is_walked = op != nullptr && op->walk == walk;  // for another one of its outputs
    if (reachable && !is_walked && !is_anchored(*op) && s == 0) {
      s = 1;
      bool waiting = false;
      for (auto& ref : op->inputs) {
        if (!ref.needs_content()) {
          continue;
        }
        if (state(*ref.value) == 0) {
          stack.push_back(ref.value.get());
          waiting = true;
        }
      }
      if (waiting) {
        continue;
      }
    }
    if (reachable && is_walked) {
      reachable = op->in_reach;
    } else if (reachable && !is_anchored(*op)) {
      for (auto& ref : op->inputs) {
        if (!ref.needs_content()) {
          continue;
        }
        reachable &= state(*ref.value) == 2 || state(*ref.value) == 3;
      }
      op->walk = walk;
      op->in_reach = reachable;
      if (reachable) {
        ops.push_back(op);
      }
    }
    if (reachable) {
      s = 2;
    } else {
      // Not to be made again: it serves as a leaf if it is there and if holding it costs nothing
      // that would not be there anyway.
      const bool held_anyway =
          v.input || (v.home != nullptr && v.home->tickets > 0) || v.bytes <= 65536;
      if (&v != &root && held_anyway && can_be_leaf(v)) {
        s = 3;
        leaves.push_back(&v);
      } else {
        s = 4;
      }
    }
    stack.pop_back();
  }
  if (root.mark_state != 2) {
    return false;
  }
  has_anchors_ |= !leaves.empty();
  for (auto* leaf : leaves) {
    if (leaf->anchor) {
      continue;
    }
    if (leaf->home->strong) {
      leaf->set_anchor(leaf->home->strong);
    } else if (auto storage = lock(leaf->home->weak)) {
      leaf->set_anchor(c10::Storage(std::move(storage)));
    } else {
      return false;  // let go of meanwhile, by another thread
    }
    if (!leaf->versions.known()) {
      leaf->versions = leaf->home->versions;
    }
  }
  for (auto* op : ops) {
    op->anchored_in = anchor_epoch_;
  }
  return true;
}

// Whether an op repeats by construction. On an accelerator a factory's result cannot be watched, so
// it is compared once instead. After a recomputation that came out different nothing is certain.
bool Session::is_certain(const OpRecord& op) const {
  return op.info->certain && !mismatched_ && (!op.info->factory || options_.device.is_cpu());
}

// Whether what lies in the value's storage is the value, and is going to be as long as that is
// held.
bool Session::can_be_leaf(const Value& v) const {
  if (!storage_alive(v) || !v.readable()) {
    return false;
  }
  const Page& home = *v.home;
  if (home.doubts.being_written || home.doubts.tainted || home.doubts.resized ||
      !content_unchanged(home)) {
    return false;
  }
  if (home.outside.unguarded && (!v.watched || options_.verify == Verify::Off)) {
    return false;
  }
  c10::Storage storage = home.strong;
  if (!storage) {
    auto alive = lock(home.weak);
    if (!alive) {
      return false;
    }
    storage = c10::Storage(std::move(alive));
  }
  const bool holds_it = !was_moved(home, *storage.unsafeGetStorageImpl()) &&
                        holds(v, *storage.unsafeGetStorageImpl());
  thread_trash().take(std::move(storage));
  return holds_it;
}

void Session::note_dropped(Page& page) {
  page.move_to(Residency::Dropped);
  page.rebuilt = false;
  page.data = nullptr;
  dropped_now_bytes_ += page.bytes;
  ++counters_.drops;
  counters_.dropped_bytes += page.bytes;
  emit(EventKind::Dropped, &page, page.bytes, 0, key_of(*page.current));
}

bool Session::drop_page(Page& page) {
  if (page.candidate < 0 || !options_.drop || page.tickets == 0 || page.retry_tick > tick_) {
    return false;
  }
  if (page.strong.use_count() != 1 || page.many_streams || !content_unchanged(page) ||
      c10::impl::cow::is_cow_data_ptr(page.strong.data_ptr())) {
    return false;
  }
  if (page.outside.unguarded &&
      (!options_.device.is_cpu() || (watches() && !page.current->watched))) {
    return false;  // nobody can say whether its content is still what its recipe makes
  }
  if (options_.device.is_cpu() && !cpu_pool::owns(page.strong.data_ptr())) {
    return false;  // freeing it frees nothing that is counted, and its deleter may take the GIL
  }
  auto* storage = page.strong.unsafeGetStorageImpl();
  if (page.current->anchor || was_moved(page, *storage) || !anchor_recipe(*page.current)) {
    page.retry_tick = tick_ + 256;
    return false;
  }
  if (!take_evidence(page, /*copied=*/false)) {
    return false;
  }
  if (page.current->watched &&
      !(page.went.hashed ? page.went.hash == page.current->hash : holds(*page.current, *storage))) {
    page.went.hashed = false;
    page.retry_tick = tick_ + 256;  // somebody wrote to it past the dispatcher: it stays
    set_unguarded(page);
    return false;
  }
  forget_copy(page);
  remove_candidate(page);
  note_dropped(page);
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, options_.device));
  return true;
}

// How far away the next use of a page is, in ticks, as far as the policy wants to know. Where no
// plan tells: backward asks in the order opposite to that in which forward saved, so from the page
// that was asked for last, those saved long before it are far, and those saved after it are done.
int64_t Session::distance_of(Page& page) const {
  constexpr int64_t done = 1 << 20;
  int64_t distance = 1;
  if (distance_ == Distance::Staleness) {
    distance = tick_ - page.last_use;
  } else if (distance_ == Distance::NextUse) {
    const int64_t next = next_use_of(page, tick_);
    if (next >= 0) {
      distance = next - tick_;
    } else if (phase_ == Phase::Forward) {
      distance = tick_ - page.packed_at;
    } else {
      distance = page.packed_at <= frontier_ ? frontier_ - page.packed_at : done;
    }
  }
  return std::max<int64_t>(1, distance);
}

// Frees at least `bytes` if it can. Returns what the allocator got back.
//
// What is clean, and what may be dropped, goes in the order of the scores. Pages that have yet to
// be copied come last: that is a wait, and without the lock.
int64_t Session::make_room(int64_t bytes, bool inside_allocation) {
  Guard guard(*this, std::defer_lock);
  if (!inside_allocation) {
    guard.lock();
  } else if (!guard.lock_with_gil()) {  // see gil.h
    return 0;
  }
  begin_evictions();
  const int64_t before = live_bytes();
  int64_t freed = 0;
  size_t flying_in = 0;
  for (const auto& tier : tiers_) {
    flying_in += tier.flying_in.size();
  }
  // A wait frees at least one page, unless somebody writes to it at that very moment.
  for (size_t turn = 0, most = 2 * candidates_.size() + flying_in + 8; turn < most; ++turn) {
    if (reap()) {
      guard
          .unlock();  // what the transfers held is let go there: until then their pages are exposed
      hash_returned();  // so are those
      guard.lock();
    }
    std::vector<TransferPtr> coming;
    freed = evict(bytes, before, inside_allocation, coming);
    if (freed >= bytes) {
      break;
    }
    if (take_hashes(guard)) {
      continue;
    }
    for (auto& tier : tiers_) {
      if (coming.empty() && !tier.flying_in.empty()) {
        coming.push_back(tier.flying_in.front());  // once it is there it can go again
      }
    }
    if (coming.empty()) {
      break;
    }
    guard.unlock();
    const auto begin = std::chrono::steady_clock::now();
    Transfer& first = *coming.front();
    if (first.out) {
      first.lane->wait(first);
    } else {
      first.lane->finish(first);
    }
    const double waited_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    guard.lock();
    if (first.out && !first.ended()) {  // on a stream: what is freed now is used again after it
      thread_trash().take(std::move(first.device));
      first.device = c10::Storage();
      guard.unlock();
      guard.lock();
    }
    (first.out ? counters_.out_stall_s : counters_.in_stall_s) += waited_s;
  }
  if (freed < bytes && !inside_allocation && has_anchors_ && phase_ == Phase::Backward) {
    guard.unlock();
    forget_past();  // sources may be held for values that backward is done with
    guard.lock();
    freed = before - live_bytes();
  }
  if (inside_allocation) {
    ++counters_.rescues;
    counters_.rescued_bytes += freed;
    emit(EventKind::Rescue, nullptr, bytes, 0);
  }
  if (freed < bytes) {
    ++counters_.shortfalls;
    counters_.shortfall_bytes = std::max(counters_.shortfall_bytes, bytes - freed);
    int64_t exposed = 0;
    for (Page* page : candidates_) {
      exposed += is_alone(*page) ? 0 : page->bytes;
    }
    counters_.exposed_bytes = std::max(counters_.exposed_bytes, exposed);
    emit(EventKind::Shortfall, nullptr, bytes - freed, 0);
  }
  return freed;
}

// One walk over the candidates. Returns what the allocator has got back since it held `before`
// bytes; `coming` are copies whose pages can go when they are done.
int64_t Session::evict(int64_t bytes, int64_t before, bool inside_allocation,
                       std::vector<TransferPtr>& coming) {
  struct Scored {
    double score;
    Page* page;
  };
  std::vector<Scored> order;
  order.reserve(candidates_.size());
  for (Page* page : candidates_) {
    if ((page->retry_tick > tick_ && !options_.swap) || !is_alone(*page)) {
      continue;
    }
    order.push_back({page->weight / static_cast<double>(distance_of(*page)), page});
  }
  const auto later = [](const Scored& a, const Scored& b) {
    return a.score != b.score ? a.score > b.score : a.page->id > b.page->id;
  };
  std::make_heap(order.begin(), order.end(), later);
  int64_t freed = before - live_bytes();
  std::vector<Page*> dirty;
  int64_t planned_bytes = 0;  // of `dirty`
  int64_t coming_bytes = 0;
  while (!order.empty() && freed + coming_bytes < bytes) {
    std::pop_heap(order.begin(), order.end(), later);
    Page* page = order.back().page;
    order.pop_back();
    bool gone = free_clean(*page);
    counters_.clean_evictions += gone && page->below.clean_at_once ? 1 : 0;
    if (!gone && awaits_hash(*page)) {
      coming_bytes += page->bytes;
      continue;
    }
    if (!gone && page->exit == Exit::Swap && options_.swap && !is_refused(*page)) {
      dirty.push_back(page);
      planned_bytes += page->planned ? page->bytes : 0;
      continue;
    }
    if (!gone && !page->planned && freed + planned_bytes >= bytes) {
      break;  // what the plan wants to go is on its way
    }
    if (!gone) {
      gone = drop_page(*page);
      if (!gone && awaits_hash(*page)) {
        coming_bytes += page->bytes;
        continue;
      }
      if (!gone && options_.swap && page->tickets > 0) {
        dirty.push_back(page);
      }
    }
    if (gone) {
      freed = before - live_bytes();
      if (!inside_allocation) {
        ++counters_.boundary_evictions;
      }
    }
  }
  for (Page* page : dirty) {
    if (freed + coming_bytes >= bytes) {
      break;
    }
    if (write_back(*page)) {
      page->below.clean_at_once = false;
      coming_bytes += page->bytes;
      coming.push_back(page->below.copy->transfer);
    } else if (is_refused(*page) && drop_page(*page)) {
      freed = before - live_bytes();
    }
  }
  return freed;
}

// At an op boundary: makes room for `need_bytes` under the budget. Python may decide first.
int64_t Session::look_ahead(int64_t need_bytes) {
  constexpr int64_t slack = 64 * 1024;  // allocator rounding of a handful of blocks
  const bool planned = plan_ != nullptr;
  if (pump_ && !planned && !pumping_ && !thread_trash().locked &&
      tick_ - last_pump_tick_ >= pump_interval_ticks_) {
    last_pump_tick_ = tick_;
    pumping_ = true;
    ++counters_.pumps;
    pump_(need_bytes);
    pumping_ = false;
  }
  const int64_t room = live_bytes() + need_bytes + slack - limit_bytes();
  if (room <= 0) {
    return 0;
  }
  return std::max<int64_t>(0, room - slack - make_room(room, /*inside_allocation=*/false));
}

void Session::stress_boundary() {
  const bool all = options_.stress == Stress::DropAll || options_.stress == Stress::SwapAll;
  const bool swaps = options_.stress == Stress::SwapAll || options_.stress == Stress::RandomMix;
  if (!all && random_() % 4 != 0) {
    return;
  }
  Guard guard(*this);
  begin_evictions();
  std::vector<c10::intrusive_ptr<Page>> copied;
  auto pages = candidates_;
  for (Page* page : pages) {
    if (!all && random_() % 3 != 0) {
      continue;
    }
    if (options_.stress == Stress::SwapAll ||
        (options_.stress == Stress::RandomMix && random_() % 2 == 0)) {
      if (write_back(*page)) {
        copied.push_back(c10::intrusive_ptr<Page>::reclaim_copy(page));
      }
    } else {
      drop_page(*page);
    }
  }
  if (device_evidence_) {
    const auto dropped = device_evidence_->to_hash;
    take_hashes(guard);
    for (const auto& page : dropped) {
      drop_page(*page);
    }
    device_evidence_->to_hash.clear();
  }
  if (!swaps) {
    return;
  }
  std::vector<c10::intrusive_ptr<Page>> back;
  for (const auto& [order, id] : swapped_) {
    if (options_.stress == Stress::RandomMix && random_() % 8 == 0) {
      back.push_back(c10::intrusive_ptr<Page>::reclaim_copy(managed_.at(id)));
    }
  }
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
  reap();
  guard.unlock();  // what the transfers held is let go there
  hash_returned();
  guard.lock();
  begin_evictions();
  do {
    for (Page* page : std::vector<Page*>(candidates_)) {
      free_clean(*page);
    }
  } while (take_hashes(guard));
  copied.clear();
  guard.unlock();
  for (auto& page : back) {
    begin_swap_in(*page, /*prefetch=*/true);
  }
  guard.lock();
  back.clear();
}

}  // namespace delta

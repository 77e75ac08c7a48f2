// Rebuilding: runs the producing ops of a value again, bottom-up.
//
// Note: replay
//  1. The rerun is made under the lock by an iterative walk from the value to what is there:
//  resident
//     pages, storages that live for other reasons, anchored sources. Holding their storages pins
//     them.
//  2. Each op of the rerun runs once. What it makes and what has tickets is installed in its page,
//     the rest goes after its last use in the rerun.
//  3. Ops run below autograd and without autocast, with the random numbers, flags, thread count,
//     default dtype and grad mode that they were recorded with (random_draws.h, numeric_context.h);
//     all of that is put back afterwards, also when an op throws.
//  4. In-place ops run on copies, unless the rerun itself made the buffer and nothing else needs
//  it.
//  5. Room is made before each op; that only ever frees, it never starts another rebuild.
//  6. What the rerun starts from is held from its begin on, needed yet or not. Without room beside
//     that the rerun is given up: what it started from is dropped too, and all of it is made again
//     in the order of the forward.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "pool/cpu_pool.h"
#include "rebuild/quiet.h"
#include "rebuild/rerun.h"
#include "tiers/stream_lane.h"
#include "util/errors.h"
#include "util/signals.h"

namespace delta {
namespace {

bool same_bytes(const c10::Storage& a, const c10::Storage& b) {
  if (a.nbytes() != b.nbytes()) {
    return false;
  }
  if (a.device().is_cpu()) {
    return std::memcmp(a.data(), b.data(), a.nbytes()) == 0;
  }
  Quiet quiet;
  at::AutoDispatchBelowADInplaceOrView below;
  return at::equal(bytes_of(a), bytes_of(b));
}

// Under the lock. Fills the rerun with what has to run so that `root` is there. `wanted` are pages
// in host memory that it starts from: with any of them the rerun is not whole, and has to be made
// again when they are back.
void make_rerun(Session& session, Value& root, Rerun& rerun, PagePtrs& wanted) {
  std::vector<Value*> stack{&root};
  ska::flat_hash_map<OpRecord*, int8_t> ops;  // 1 open, 2 planned
  auto fetch = [&](Value& v) -> bool {        // is it there?
    auto it = rerun.slots.find(&v);
    if (it != rerun.slots.end()) {
      return true;
    }
    Slot slot;
    slot.value = c10::intrusive_ptr<Value>::reclaim_copy(&v);
    if (v.anchor && &v != &root) {
      if (!v.readable() || !session.holds(v, *v.anchor.unsafeGetStorageImpl())) {
        session.taint(v);
        throw InplaceModificationError(
            "delta_runtime: a tensor that recomputation needs was changed in place outside of what "
            "the runtime sees "
            "(an optimizer step or a write under another thread, between forward and backward). " +
            v.versions.text() +
            "Run backward before changing it, or run the writing code inside the runtime.");
      }
      slot.storage = v.anchor;
    } else if (&v != &root) {
      slot.storage = session.storage_there(v);
    }
    if (!slot.storage) {
      Page* home = v.home;
      if (&v == &root || home == nullptr || home->tickets == 0 ||
          (home->residency() != Residency::Swapped && home->residency() != Residency::SwappingIn)) {
        return false;
      }
      const auto known = [&](const auto& page) { return page.get() == home; };
      if (std::none_of(wanted.begin(), wanted.end(), known)) {
        wanted.push_back(c10::intrusive_ptr<Page>::reclaim_copy(home));
      }
      return true;
    }
    rerun.slots.emplace(&v, std::move(slot));
    return true;
  };
  while (!stack.empty()) {
    Value& v = *stack.back();
    if (fetch(v)) {
      stack.pop_back();
      continue;
    }
    OpRecord* op = v.producer.get();
    if (op == nullptr) {
      throw InplaceModificationError(
          "delta_runtime: a tensor that recomputation needs is gone: its content was overwritten "
          "by code that the "
          "runtime does not see.");
    }
    auto& state = ops[op];
    if (state == 2) {
      stack.pop_back();
      continue;
    }
    if (state == 0) {
      state = 1;
      bool waiting = false;
      for (auto& ref : op->inputs) {
        if (ref.needs_content() && !fetch(*ref.value) && ops[ref.value->producer.get()] != 2) {
          stack.push_back(ref.value.get());
          waiting = true;
        }
      }
      if (waiting) {
        continue;
      }
    }
    ops[op] = 2;
    rerun.ops.push_back(c10::intrusive_ptr<OpRecord>::reclaim_copy(op));
    stack.pop_back();
  }
  auto slot_of = [&](Value& v) -> Slot& {
    auto& slot = rerun.slots[&v];
    if (!slot.value) {
      slot.value = c10::intrusive_ptr<Value>::reclaim_copy(&v);
    }
    return slot;
  };
  for (auto& op : rerun.ops) {
    for (auto& ref : op->inputs) {
      if (ref.needs_content()) {
        ++slot_of(*ref.value).uses;
      }
    }
  }
  ++slot_of(root).uses;
}

}  // namespace

// The page lives in this storage from here on.
void Session::rehome(Page& page, const c10::Storage& storage) {
  auto self = pages_.find(page.strong.unsafeGetStorageImpl());
  c10::intrusive_ptr<Page> keep = self != pages_.end() ? self->second : nullptr;
  if (self != pages_.end()) {
    pages_.erase(self);
  }
  thread_trash().take(std::move(page.strong));
  page.strong = storage;
  page.weak = storage.getWeakStorageImpl();
  look(page, *storage.unsafeGetStorageImpl());
  page.last_use = tick_;
  page.stream = current_stream_id(options_.device);
  page.many_streams = false;
  page.below.arrival.reset();
  if (keep) {
    pages_.emplace(storage.unsafeGetStorageImpl(), std::move(keep));
  }
}

namespace {

// Thrown where what was made again differs from what went.
struct Different {
  Page* page;
};

void install(Session& session, Rerun& rerun, Page& page, const c10::Storage& storage,
             double seconds) {
  if (page.went.hashed && session.device_evidence_ && !rerun.suspects) {
    rerun.suspects = session.suspects_of(rerun.ops);
  }
  std::vector<uint64_t> proved;
  if (page.went.hashed) {
    proved = session.proved_by(*page.current, rerun.ran);
  }
  if (!session.is_as_it_went(page, storage, /*copied=*/false, rerun.suspects, std::move(proved))) {
    throw Different{&page};
  }
  session.rehome(page, storage);
  page.move_to(Residency::Resident);
  page.rebuilt = true;
  page.retry_tick = 0;
  session.dropped_now_bytes_ -= page.bytes;
  ++session.counters_.rebuilds;
  session.counters_.rebuilt_bytes += page.bytes;
  session.attach_plan(page);
  session.add_candidate(page);
  session.emit(EventKind::Rebuilt, &page, page.bytes, seconds, session.key_of(*page.current));
}

// There is no room for an op of the rerun, and some of what it starts from could be dropped.
struct ShortOfRoom {};

// What the op will ask for beside what is there: its watermark, copies of what it writes in place,
// and what the pool reserves for rounding, since that can be refused too.
int64_t room_for(const OpRecord& op) {
  int64_t bytes = op.watermark_bytes;
  for (const auto& out : op.outputs) {
    bytes += op.device.is_cpu() ? cpu_pool::most_rounding_bytes(out.bytes) : 0;
  }
  for (const auto& ref : op.inputs) {
    bytes += ref.write == Write::InPlace ? ref.value->bytes : 0;
  }
  return bytes;
}

using Inspect = std::function<void(const OpRecord&, const std::vector<c10::Storage>&)>;

// Runs the rerun. With `installs`, values that dropped pages wait for go there as soon as they are
// made. `inspect` sees what each op made.
c10::Storage execute(Session& session, Rerun& rerun, Value& root, bool installs, bool gives_up,
                     const Inspect& inspect = nullptr) {
  const auto begin = std::chrono::steady_clock::now();
  const auto stalled = [&session] {
    Session::Guard guard(session);
    return session.counters_.out_stall_s + session.counters_.in_stall_s;
  };
  const double stalled_before = stalled();
  for (auto& op : rerun.ops) {
    let_signals_in();
    if (session.options_.budget_bytes > 0 && session.look_ahead(room_for(*op)) > 0 && gives_up) {
      Session::Guard guard(session);
      session.counters_.rebuild_s += seconds_since(begin);
      throw ShortOfRoom();
    }
    double seconds = 0;
    auto made = make_outputs(session, *op, rerun, seconds);
    if (inspect) {
      inspect(*op, made);
    }
    Session::Guard guard(session);
    ++session.counters_.replayed_ops;
    rerun.ran.insert(op.get());
    for (auto& ref : op->inputs) {
      if (!ref.needs_content()) {
        continue;
      }
      auto& slot = rerun.slots.at(ref.value.get());
      if (--slot.uses == 0) {
        thread_trash().take(std::move(slot.storage));
        slot.storage = c10::Storage();
      }
    }
    for (const auto& out : op->outputs) {
      if (out.value != nullptr && session.key_of(*out.value) >= 0) {
        session.emit(EventKind::Replayed, nullptr, 0, seconds, out.value->key);
        break;
      }
    }
    for (size_t i = 0; i < made.size(); ++i) {
      Value* value = op->outputs[i].value;
      if (value == nullptr || !made[i]) {
        continue;
      }
      if (installs && value->home != nullptr && value->home->tickets > 0 &&
          value->home->residency() == Residency::Dropped) {
        install(session, rerun, *value->home, made[i], seconds);
      }
      auto slot = rerun.slots.find(value);
      if (slot != rerun.slots.end() && slot->second.uses > 0 && !slot->second.storage) {
        slot->second.storage = made[i];
        slot->second.ours = true;
      }
    }
    for (auto& storage : made) {
      thread_trash().take(std::move(storage));
      storage = c10::Storage();
    }
    if (session.device_evidence_) {
      guard.unlock();
      session.hash_returned();
    }
  }
  {
    const double waited = stalled() - stalled_before;  // for lanes, to make room: counted there
    Session::Guard guard(session);
    const double seconds = seconds_since(begin);
    session.counters_.rebuild_s += std::max(0.0, seconds - waited);
    if (session.tracing_) {
      session.trace_.push_back({static_cast<int64_t>(TraceKind::Rebuild), root.key, root.bytes, 0,
                                0, seconds_of(begin), seconds_of(begin) + seconds});
    }
  }
  const c10::Storage& result = rerun.slots.at(&root).storage;
  TORCH_CHECK(result, "delta_runtime: the value that was asked for was not made");
  return result;
}

// The rerun's values may be the last owners of records: they die under the lock.
void discard(Session& session, Rerun& rerun, c10::intrusive_ptr<Value>* root = nullptr) {
  Session::Guard guard(session);
  for (auto& [value, slot] : rerun.slots) {
    thread_trash().take(std::move(slot.storage));
    slot.storage = c10::Storage();
    slot.value.reset();
  }
  rerun.slots.clear();
  rerun.ops.clear();
  rerun.ran.clear();
  rerun.suspects.reset();
  if (root != nullptr) {
    root->reset();
  }
}

// Lets go of a rerun that was not begun, and drops what it would have started from, but for what is
// hardly worth it. Returns whether anything went.
bool drop_starts(Session& session, Rerun& rerun) {
  constexpr int64_t small = 64;  // so many times smaller than all of it
  std::vector<c10::intrusive_ptr<Value>> starts;
  int64_t bytes = 0;
  {
    Session::Guard guard(session);
    for (const auto& [value, slot] : rerun.slots) {
      if (slot.storage && value->home != nullptr && value->home->candidate >= 0) {
        starts.push_back(slot.value);
        bytes += value->bytes;
      }
    }
  }
  discard(session, rerun);
  Session::Guard guard(session);
  session.begin_evictions();
  bool any = false;
  do {
    for (const auto& value : starts) {
      Page* home = value->home;
      any |= home != nullptr && home->tickets > 0 && home->bytes * small >= bytes &&
             session.is_alone(*home) && session.drop_page(*home);
    }
  } while (session.take_hashes(guard));
  starts.clear();  // a value may die with this
  return any;
}

using Pins = std::vector<c10::Storage>;

// Brings pages back, all on their way before the first is waited for, and holds them.
void pin(Session& session, PagePtrs& pages, Pins& pins) {
  for (auto& page : pages) {
    session.begin_swap_in(*page, /*prefetch=*/false);
  }
  for (auto& page : pages) {
    pins.push_back(session.bring_back(*page));
  }
  session.hash_returned();
  Session::Guard guard(session);
  pages.clear();  // a page may die with this
}

}  // namespace

c10::Storage Session::rebuild(Page& page) {
  Rerun rerun;
  Pins pins;
  c10::intrusive_ptr<Value> root;
  bool retried = false;       // without shortcuts
  bool from_scratch = false;  // and with all that the rerun would start from dropped too
  bool any_dropped = true;
  for (;;) {
    if (c10::Storage storage = bring_back(page)) {
      discard(*this, rerun, &root);
      hash_returned();
      return storage;
    }
    try {
      PagePtrs wanted;
      {
        Guard guard(*this);
        if (page.residency() != Residency::Dropped) {
          continue;  // somebody else made it, and it may have been swapped out again
        }
        root = page.current;
        make_rerun(*this, *root, rerun, wanted);
      }
      if (!wanted.empty()) {
        discard(*this, rerun);
        pin(*this, wanted, pins);
        continue;
      }
      if (from_scratch && any_dropped) {
        any_dropped = drop_starts(*this, rerun);
        continue;  // with a rerun that starts further back; that may go in turn
      }
      if (from_scratch) {
        std::stable_sort(rerun.ops.begin(), rerun.ops.end(),
                         [](const auto& a, const auto& b) { return a->tick < b->tick; });
      }
      const int64_t limit = limit_bytes();
      execute(*this, rerun, *root, /*installs=*/true, /*gives_up=*/!from_scratch && !hopeless_);
      hopeless_ |= from_scratch && limit_bytes() > limit;
      c10::Storage result = rerun.slots.at(root.get()).storage;
      discard(*this, rerun, &root);
      return result;
    } catch (const ShortOfRoom&) {
      discard(*this, rerun);
      from_scratch = true;
    } catch (const Different& different) {
      Guard guard(*this);
      ++counters_.mismatches;
      if (!retried && !rerun.shortcuts.empty()) {
        retried = true;  // without them
        for (const uint64_t key : rerun.shortcuts) {
          shortcut_holds_[key] = false;
          ++counters_.shortcut_failures;
        }
        rerun.shortcuts.clear();
        guard.unlock();
        discard(*this, rerun, &root);
        guard.lock();
        continue;
      }
      const std::string text = mismatch_text(*different.page, rerun.ops);
      lose_trust(rerun.ops);
      guard.unlock();
      discard(*this, rerun, &root);
      throw RecomputeMismatchError(text);
    } catch (const RecomputeMismatchError&) {  // an op says itself that it did not repeat
      {
        Guard guard(*this);
        ++counters_.mismatches;
        lose_trust(rerun.ops);
      }
      discard(*this, rerun, &root);
      throw;
    } catch (...) {
      discard(*this, rerun, &root);
      throw;
    }
  }
}

// Makes the value of a resident page again and compares, bit by bit, it and whatever else is there
// of what uncertain ops made on the way. A verdict is for one output of one op; one failure is for
// good.
bool Session::audit(Page& page) {
  struct Verdict {
    uint64_t key;
    bool compared;
    bool equal;
  };
  Rerun rerun;
  Pins pins;
  c10::intrusive_ptr<Value> root;
  c10::Storage kept;
  bool ran = false;
  bool equal = false;
  Shield shield;  // what a signal handler raises inside of an op says nothing of the op
  std::vector<Verdict> verdicts;
  const auto inspect = [&](const OpRecord& op, const std::vector<c10::Storage>& made) {
    if (is_certain(op)) {
      return;
    }
    for (size_t i = 0; i < made.size(); ++i) {
      c10::Storage original;
      uint64_t key = 0;
      {
        Guard guard(*this);
        const Value* value = op.outputs[i].value;
        if (value == nullptr || !made[i]) {
          continue;
        }
        key = value->trust_key();
        original = storage_there(*value);
      }
      verdicts.push_back(
          {key, static_cast<bool>(original), original && same_bytes(made[i], original)});
    }
  };
  try {
    for (;;) {
      PagePtrs wanted;
      {
        Guard guard(*this);
        if (page.residency() != Residency::Resident || !page.current->producer) {
          return false;
        }
        root = page.current;
        kept = page.strong;
        make_rerun(*this, *root, rerun, wanted);
      }
      if (wanted.empty()) {
        break;
      }
      discard(*this, rerun);
      pin(*this, wanted, pins);
    }
    equal = same_bytes(
        execute(*this, rerun, *root, /*installs=*/false, /*gives_up=*/false, inspect), kept);
    ran = true;
  } catch (const std::exception&) {
    equal = false;
  }
  if (!ran) {
    verdicts.clear();  // no room, most likely: nothing was shown
  }
  {
    Guard guard(*this);
    ++counters_.audits;
    counters_.audit_failures += equal ? 0 : 1;
    const auto judge = [&](uint64_t key, bool good) {
      if (good) {
        trusted_.insert(key);
      } else if (distrusted_.insert(key).second) {
        ++anchor_epoch_;  // recipes that were checked before may go through it
      }
    };
    for (const auto& verdict : verdicts) {
      // What could not be compared itself stands or falls with what was made from it.
      judge(verdict.key, verdict.compared ? verdict.equal : equal);
    }
    if (ran && !equal) {
      judge(root->trust_key(), false);
    }
  }
  discard(*this, rerun, &root);
  return equal;
}

}  // namespace delta

#include "rebuild/replay.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/equal.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "pool/cpu_pool.h"
#include "rebuild/quiet.h"
#include "util/bytes_of.h"
#include "util/errors.h"
#include "util/rounding.h"
#include "util/signals.h"
#include "util/streams.h"

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

// Thrown where what was made again differs from what went.
struct Different {
  Page* page;
};

// There is no room for an op of the rerun, and some of what it starts from could be dropped.
struct ShortOfRoom {};

// What the rerun was to take from a tier below is not there any more.
struct StartGone {
  bool in_vain;  // nothing has changed that the next rerun would begin with
};

// What the rerun was to take from a tier below came back different, and cannot be made again.
struct StartDiffers {
  std::exception_ptr error;
};

constexpr int kMostInVain = 3;  // so often a rerun is made anew; then it holds all of its starts

// What the op will ask for beside what is there: its watermark, copies of what it writes in place,
// and what the pool reserves for rounding, since that can be refused too.
int64_t room_for(const OpRecord& op) {
  int64_t bytes = op.watermark_bytes;
  for (const auto& out : op.outputs) {
    bytes += op.device.is_cpu() ? most_rounding_bytes(out.bytes) : 0;
  }
  for (const auto& ref : op.inputs) {
    bytes += ref.write == Write::InPlace ? ref.value->bytes : 0;
  }
  return bytes;
}

}  // namespace

// ---------------------------------------------------------------- what has to run

// Whether the value is there, or on its way: then it gets a slot, or its page is among the wanted.
bool Replay::fetch(Value& v, const Value& root, Rerun& rerun, PagePtrs& wanted) {
  if (rerun.slots.find(&v) != rerun.slots.end()) {
    return true;
  }
  if (&v == &root) {
    return false;
  }
  Slot slot;
  slot.value = c10::intrusive_ptr<Value>::reclaim_copy(&v);
  if (v.anchor) {
    if (!v.readable() || !v.lies_in(*v.anchor.unsafeGetStorageImpl())) {
      evidence_.taint(v);
      throw InplaceModificationError(
          "delta_runtime: a tensor that recomputation needs was changed in place outside of what "
          "the runtime sees "
          "(an optimizer step or a write under another thread, between forward and backward). " +
          v.versions.text() +
          "Run backward before changing it, or run the writing code inside the runtime.");
    }
    slot.storage = v.anchor;
  } else if (rerun.one_by_one && tiers_.has_copy_of(v)) {
    slot.page = c10::intrusive_ptr<Page>::reclaim_copy(v.home);
  } else {
    slot.storage = tiers_.storage_there(v);
  }
  if (slot.storage || slot.page) {
    rerun.slots.emplace(&v, std::move(slot));
    return true;
  }
  Page* home = v.home;
  if (home == nullptr || home->tickets == 0 ||
      (home->residency() != Residency::Swapped && home->residency() != Residency::SwappingIn)) {
    return false;
  }
  const auto known = [&](const auto& page) { return page.get() == home; };
  if (std::none_of(wanted.begin(), wanted.end(), known)) {
    wanted.push_back(c10::intrusive_ptr<Page>::reclaim_copy(home));
  }
  return true;
}

// Under the lock. Fills the rerun with what has to run so that `root` is there. `wanted` are pages
// in a tier below that it starts from: with any of them the rerun is not whole, and has to be made
// again when they are back.
void Replay::make_rerun(Value& root, Rerun& rerun, PagePtrs& wanted) {
  enum State : int8_t { Unseen = 0, Open, Planned };
  std::vector<Value*> stack{&root};
  ska::flat_hash_map<OpRecord*, int8_t> ops;
  bool numbered = true;  // each op after what it reads; threads of backward count ops at once
  while (!stack.empty()) {
    Value& v = *stack.back();
    if (fetch(v, root, rerun, wanted)) {
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
    if (state == Planned) {
      stack.pop_back();
      continue;
    }
    if (state == Unseen) {
      state = Open;
      bool waiting = false;
      for (auto& ref : op->inputs) {
        if (!ref.needs_content() || fetch(*ref.value, root, rerun, wanted)) {
          continue;
        }
        OpRecord* producer = ref.value->producer.get();
        numbered = numbered && (producer == nullptr || producer->tick < op->tick);
        if (ops[producer] != Planned) {
          stack.push_back(ref.value.get());
          waiting = true;
        }
      }
      if (waiting) {
        continue;
      }
    }
    ops[op] = Planned;
    rerun.ops.push_back(c10::intrusive_ptr<OpRecord>::reclaim_copy(op));
    stack.pop_back();
  }
  if (numbered) {
    std::stable_sort(rerun.ops.begin(), rerun.ops.end(),
                     [](const auto& a, const auto& b) { return a->tick < b->tick; });
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

// ---------------------------------------------------------------- running it

// Under the lock.
void Replay::install(Rerun& rerun, Page& page, const c10::Storage& storage, double seconds) {
  if (page.went.hashed && on_device_.exists() && !rerun.suspects) {
    rerun.suspects = Suspects::of(rerun.ops);
  }
  std::vector<uint64_t> proved;
  if (page.went.hashed) {
    proved = evidence_.proved_by(*page.current, rerun.ran);
  }
  if (!evidence_.is_as_it_went(page, storage, /*copied=*/false, rerun.suspects,
                               std::move(proved))) {
    throw Different{&page};
  }
  pages_.rehome(page, storage);
  page.move_to(Residency::Resident);
  page.rebuilt = true;
  page.retry_tick = 0;
  levels_.dropped_now_bytes -= page.bytes;
  ++counters_.rebuilds;
  counters_.rebuilt_bytes += page.bytes;
  plans_.attach(page);
  pages_.add_candidate(page);
  events_.emit(EventKind::Rebuilt, &page, page.bytes, seconds, now_.key_of(*page.current));
}

double Replay::stalled_s() {
  Guard guard(lock_);
  return counters_.out_stall_s + counters_.in_stall_s;
}

// Brings back what the op reads of the values that wait in a tier below.
void Replay::bring_inputs(const OpRecord& op, Rerun& rerun) {
  for (const auto& ref : op.inputs) {
    if (!ref.needs_content()) {
      continue;
    }
    auto& slot = rerun.slots.at(ref.value.get());
    if (slot.storage || !slot.page) {
      continue;
    }
    c10::Storage there;
    try {
      there = swap_in_.bring_back(*slot.page);
    } catch (const RecomputeMismatchError&) {
      throw StartDiffers{std::current_exception()};
    }
    on_device_.hash_returned();
    Guard guard(lock_);
    if (there && slot.page->current == ref.value) {
      slot.storage = tiers_.storage_there(*ref.value);
    }
    if (!slot.storage) {
      throw StartGone{slot.page->residency() == Residency::Resident};
    }
  }
}

// Runs the rerun. With `installs`, values that dropped pages wait for go there as soon as they are
// made. `inspect` sees what each op made.
c10::Storage Replay::execute(Rerun& rerun, Value& root, bool installs, bool gives_up,
                             const Inspect& inspect) {
  const auto begin = std::chrono::steady_clock::now();
  const StreamSpans::Span span(tiers_.spans(), SpanKind::Rerun, current_stream_id(options_.device));
  const double stalled_before_s = stalled_s();
  const bool counts = options_.device.is_cpu();  // else the span does
  const auto count_in_vain = [&] {
    Guard guard(lock_);
    counters_.rebuild_s += counts ? seconds_since(begin) : 0;
  };
  for (auto& op : rerun.ops) {
    let_signals_in();
    if (rerun.one_by_one) {
      try {
        bring_inputs(*op, rerun);
      } catch (const StartGone&) {
        count_in_vain();
        throw;
      }
    }
    if (options_.budget_bytes > 0 && eviction_.look_ahead(room_for(*op)) > 0 && gives_up) {
      count_in_vain();
      throw ShortOfRoom();
    }
    double seconds = 0;
    auto made = runner_.make_outputs(*op, rerun, seconds);
    if (inspect) {
      inspect(*op, made);
    }
    take_outputs(rerun, *op, root, made, installs, seconds);
    on_device_.hash_returned();
  }
  {
    const double waited_s = stalled_s() - stalled_before_s;  // for lanes: counted there
    Guard guard(lock_);
    const double seconds = seconds_since(begin);
    counters_.rebuild_s += counts ? std::max(0.0, seconds - waited_s) : 0;
    if (events_.tracing()) {
      events_.trace({static_cast<int64_t>(TraceKind::Rebuild), root.key, root.bytes, 0, 0,
                     seconds_of(begin), seconds_of(begin) + seconds});
    }
  }
  const c10::Storage& result = rerun.slots.at(&root).storage;
  TORCH_CHECK(result, "delta_runtime: the value that was asked for was not made");
  return result;
}

// What one op of the rerun has made goes to the pages and to the ops that need it; the rest goes.
void Replay::take_outputs(Rerun& rerun, const OpRecord& op, const Value& root,
                          std::vector<c10::Storage>& made, bool installs, double seconds) {
  Guard guard(lock_);
  ++counters_.replayed_ops;
  rerun.ran.insert(&op);
  for (auto& ref : op.inputs) {
    if (!ref.needs_content()) {
      continue;
    }
    auto& slot = rerun.slots.at(ref.value.get());
    if (--slot.uses == 0 || slot.page) {
      thread_trash().take(std::move(slot.storage));
      slot.storage = c10::Storage();
    }
  }
  for (const auto& out : op.outputs) {
    if (out.value != nullptr && now_.key_of(*out.value) >= 0) {
      events_.emit(EventKind::Replayed, nullptr, 0, seconds, out.value->key);
      break;
    }
  }
  for (size_t i = 0; i < made.size(); ++i) {
    Value* value = op.outputs[i].value;
    if (value == nullptr || !made[i]) {
      continue;
    }
    if (installs && value->home != nullptr && value->home->tickets > 0 &&
        value->home->residency() == Residency::Dropped &&
        (value == &root || plans_.keeps(*value))) {
      install(rerun, *value->home, made[i], seconds);
    }
    auto slot = rerun.slots.find(value);
    if (slot != rerun.slots.end() && slot->second.uses > 0 && !slot->second.storage &&
        !slot->second.page) {
      slot->second.storage = made[i];
      slot->second.ours = true;
    }
  }
  for (auto& storage : made) {
    thread_trash().take(std::move(storage));
    storage = c10::Storage();
  }
}

// The rerun's values may be the last owners of records: they die under the lock.
void Replay::discard(Rerun& rerun, c10::intrusive_ptr<Value>* root) {
  Guard guard(lock_);
  for (auto& [value, slot] : rerun.slots) {
    thread_trash().take(std::move(slot.storage));
    slot.storage = c10::Storage();
    slot.value.reset();
    slot.page.reset();
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
bool Replay::drop_starts(Rerun& rerun) {
  constexpr int64_t small = 64;  // so many times smaller than all of it
  std::vector<c10::intrusive_ptr<Value>> starts;
  int64_t bytes = 0;
  {
    Guard guard(lock_);
    for (const auto& [value, slot] : rerun.slots) {
      if (slot.storage && value->home != nullptr && value->home->candidate >= 0) {
        starts.push_back(slot.value);
        bytes += value->bytes;
      }
    }
  }
  discard(rerun);
  Guard guard(lock_);
  on_device_.begin_evictions();
  bool any = false;
  do {
    for (const auto& value : starts) {
      Page* home = value->home;
      any |= home != nullptr && home->tickets > 0 && home->bytes * small >= bytes &&
             home->is_alone() && eviction_.drop(*home);
    }
  } while (on_device_.take_hashes(guard));
  starts.clear();  // a value may die with this
  return any;
}

// Brings pages back, all on their way before the first is waited for, and holds them.
void Replay::pin(PagePtrs& pages, Pins& pins) {
  for (auto& page : pages) {
    swap_in_.begin(*page, /*prefetch=*/false);
  }
  for (auto& page : pages) {
    pins.push_back(swap_in_.bring_back(*page));
  }
  on_device_.hash_returned();
  Guard guard(lock_);
  pages.clear();  // a page may die with this
}

// ---------------------------------------------------------------- rebuild

// What is tried to bring one page back, perhaps in several turns.
struct Replay::Attempt {
  Rerun rerun;
  Pins pins;
  c10::intrusive_ptr<Value> root;
  c10::Storage result;
  bool without_shortcuts = false;
  bool early = false;         // nobody waits for it
  bool from_scratch = false;  // with all that the rerun would start from dropped too
  bool any_dropped = true;
  int in_vain = 0;
};

c10::Storage Replay::rebuild(Page& page) {
  Attempt attempt;
  return rebuild(page, attempt);
}

bool Replay::rebuild_early(Page& page) {
  Attempt attempt;
  attempt.early = true;
  return static_cast<bool>(rebuild(page, attempt));
}

// Empty: an early one, for which there is no room, or that has no ticket any more.
c10::Storage Replay::rebuild(Page& page, Attempt& attempt) {
  for (;;) {
    if (c10::Storage storage = swap_in_.bring_back(page)) {
      discard(attempt.rerun, &attempt.root);
      on_device_.hash_returned();
      return storage;
    }
    try {
      if (run_once(page, attempt)) {
        discard(attempt.rerun, &attempt.root);
        return attempt.result;
      }
    } catch (const ShortOfRoom&) {
      if (attempt.early) {
        discard(attempt.rerun, &attempt.root);
        return {};
      }
      discard(attempt.rerun);
      attempt.pins.clear();
      attempt.from_scratch = true;
    } catch (const StartGone& gone) {
      discard(attempt.rerun);
      attempt.in_vain += gone.in_vain ? 1 : 0;
    } catch (const StartDiffers& differs) {  // the ops of the rerun have no part in it
      discard(attempt.rerun, &attempt.root);
      std::rethrow_exception(differs.error);
    } catch (const Different& different) {
      give_up(attempt, *different.page);
    } catch (const RecomputeMismatchError&) {  // an op says itself that it did not repeat
      {
        Guard guard(lock_);
        ++counters_.mismatches;
        evidence_.lose_trust(attempt.rerun.ops);
      }
      discard(attempt.rerun, &attempt.root);
      throw;
    } catch (...) {
      discard(attempt.rerun, &attempt.root);
      throw;
    }
  }
}

// False: once more, for what there is has changed.
bool Replay::run_once(Page& page, Attempt& attempt) {
  Rerun& rerun = attempt.rerun;
  PagePtrs wanted;
  {
    Guard guard(lock_);
    if (page.residency() != Residency::Dropped) {
      return false;  // somebody else made it, and it may have been swapped out again
    }
    attempt.root = page.current;
    rerun.one_by_one = attempt.from_scratch && !tiers_.none() && attempt.in_vain < kMostInVain;
    make_rerun(*attempt.root, rerun, wanted);
  }
  if (!wanted.empty()) {
    discard(rerun);
    pin(wanted, attempt.pins);
    return false;
  }
  if (attempt.from_scratch && attempt.any_dropped) {
    attempt.any_dropped = drop_starts(rerun);
    return false;  // with a rerun that starts further back; that may go in turn
  }
  const int64_t limit = account_.limit_bytes();
  const bool gives_up = attempt.early || (!attempt.from_scratch && !now_.hopeless);
  execute(rerun, *attempt.root, /*installs=*/true, gives_up);
  now_.hopeless |= attempt.from_scratch && account_.limit_bytes() > limit;
  attempt.result = rerun.slots.at(attempt.root.get()).storage;
  return true;
}

// What was made again differs from what went. Raises, unless shortcuts were taken: without them it
// may be as it went.
void Replay::give_up(Attempt& attempt, const Page& different) {
  Rerun& rerun = attempt.rerun;
  std::string text;
  {
    Guard guard(lock_);
    ++counters_.mismatches;
    if (!attempt.without_shortcuts && !rerun.shortcuts.empty()) {
      attempt.without_shortcuts = true;
      runner_.give_up_shortcuts(rerun.shortcuts);
      rerun.shortcuts.clear();
    } else {
      text = mismatch_text(different, rerun.ops);
      evidence_.lose_trust(rerun.ops);
    }
  }
  discard(rerun, &attempt.root);
  tell(text);
}

// ---------------------------------------------------------------- audit

struct Replay::Verdict {
  uint64_t key;
  bool compared;
  bool equal;
};

bool Replay::audit(Page& page) {
  Rerun rerun;
  Pins pins;
  c10::intrusive_ptr<Value> root;
  c10::Storage original;
  bool ran = false;
  bool equal = false;
  Shield shield;  // what a signal handler raises inside of an op says nothing of the op
  std::vector<Verdict> verdicts;
  const auto inspect = [&](const OpRecord& op, const std::vector<c10::Storage>& made) {
    if (recipes_.is_certain(op)) {
      return;
    }
    for (size_t i = 0; i < made.size(); ++i) {
      c10::Storage there;
      uint64_t key = 0;
      {
        Guard guard(lock_);
        const Value* value = op.outputs[i].value;
        if (value == nullptr || !made[i]) {
          continue;
        }
        key = value->trust_key();
        there = tiers_.storage_there(*value);
      }
      verdicts.push_back({key, static_cast<bool>(there), there && same_bytes(made[i], there)});
    }
  };
  try {
    for (;;) {
      PagePtrs wanted;
      {
        Guard guard(lock_);
        if (page.residency() != Residency::Resident || !page.current->producer) {
          return false;
        }
        root = page.current;
        original = page.strong;
        make_rerun(*root, rerun, wanted);
      }
      if (wanted.empty()) {
        break;
      }
      discard(rerun);
      pin(wanted, pins);
    }
    equal = same_bytes(execute(rerun, *root, /*installs=*/false, /*gives_up=*/false, inspect),
                       original);
    ran = true;
  } catch (const std::exception&) {
    equal = false;
  }
  if (!ran) {
    verdicts.clear();  // no room, most likely: nothing was shown
  }
  note_audit(verdicts, *root, ran, equal);
  discard(rerun, &root);
  return equal;
}

void Replay::note_audit(const std::vector<Verdict>& verdicts, const Value& root, bool ran,
                        bool equal) {
  Guard guard(lock_);
  ++counters_.audits;
  counters_.audit_failures += equal ? 0 : 1;
  for (const auto& verdict : verdicts) {
    // What could not be compared itself stands or falls with what was made from it.
    evidence_.note_audit(verdict.key, verdict.compared ? verdict.equal : equal);
  }
  if (ran && !equal) {
    evidence_.note_audit(root.trust_key(), false);
  }
}

}  // namespace delta

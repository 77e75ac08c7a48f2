#include "rebuild/evidence.h"

#include <algorithm>
#include <optional>
#include <sstream>

#include "util/errors.h"

namespace delta {
namespace {

constexpr size_t kMostKnown = 1 << 17;
constexpr int32_t kFirstSteps = 2;         // in which everything is compared
constexpr int64_t kMostStepsBetween = 49;  // two comparisons of a value after that

uint64_t value_key(const Value& value, bool copied) {
  return mix(value.sequence_key(), copied ? 1 : 0);
}
uint64_t op_key(const Value& made) { return mix(made.sequence, 2); }

// Calls `act(value)` with the value and those behind it that are made again with it: not saved, and
// not held for recipes. Stops where `act` returns false; returns whether it never did.
template <class Act>
bool each_of_recipe(const Value& value, const Act& act) {
  constexpr size_t most = 64;
  c10::SmallVector<const Value*, 8> stack{&value};
  c10::SmallVector<const OpRecord*, 8> seen;
  while (!stack.empty()) {
    const Value& made = *stack.back();
    stack.pop_back();
    const OpRecord& op = *made.producer;
    if (std::find(seen.begin(), seen.end(), &op) != seen.end()) {
      continue;
    }
    seen.push_back(&op);
    if (seen.size() > most || !act(made)) {
      return false;
    }
    for (const auto& ref : op.inputs) {
      const Value& read = *ref.value;
      const bool saved = read.home != nullptr && read.home->tickets > 0;
      if (ref.needs_content() && read.producer && !read.anchor && !saved) {
        stack.push_back(&read);
      }
    }
  }
  return true;
}

std::string names_of(const std::vector<const OpInfo*>& ops) {
  std::string text;
  size_t shown = 0;
  for (const OpInfo* op : ops) {
    if (++shown > 6) {
      return text + " ...";
    }
    text += (shown > 1 ? ", " : " ") + op->name;
  }
  return text;
}

std::string name_of(const OpInfo* op) { return op != nullptr ? op->name : std::string("?"); }

std::string likely_causes() {
  return "Likely causes: code that PyTorch does not see wrote to a tensor (numpy, ctypes, a C++ "
         "extension, a kernel of your own: tell it with delta_runtime.mark_written); an op of your "
         "own does not repeat; a thread changed a tensor or a flag. From now on these ops are not "
         "run again and their results are kept or swapped: the next step works.";
}

}  // namespace

std::string mismatch_text(const Page& page, const std::vector<c10::intrusive_ptr<OpRecord>>& ops) {
  std::ostringstream text;
  std::vector<const OpInfo*> infos;
  for (const auto& op : ops) {
    infos.push_back(op->info);
  }
  const auto& maker = page.current->producer;
  text << "delta_runtime: a saved tensor of " << page.bytes << " bytes, made by "
       << name_of(maker ? maker->info : nullptr) << ", came out different when it was recomputed by"
       << names_of(infos)
       << ". It is not used, and gradients of this backward are incomplete; weights and optimizer "
          "state are as they were. "
       << likely_causes();
  return text.str();
}

void tell(const std::string& verdict) {
  if (!verdict.empty()) {
    throw RecomputeMismatchError(verdict);
  }
}

Evidence::Evidence(SessionState& state, Sources& sources, DeviceEvidence& on_device)
    : Part(state), sources_(sources), on_device_(on_device), random_(options_.seed + 1) {}

bool Evidence::take(Page& page, bool copied) {
  page.went.hashed = false;
  if (options_.verify == Verify::Off) {
    return true;
  }
  const Value& value = *page.current;
  bool wanted = options_.verify == Verify::Always || mismatched_;
  if (!copied && sabotage() != Sabotage::AuditedForEver) {
    wanted |= value.producer && value.producer->uncertain_behind;
  }
  if (!wanted) {
    if (known_.size() >= kMostKnown) {
      known_.clear();
    }
    const Known& known = known_[value_key(value, copied)];
    wanted = known.steps < kFirstSteps || now_.step >= known.due_step ||
             (!copied && !is_proven(value) && sabotage() != Sabotage::AuditedForEver);
  }
  if (!wanted) {
    return true;
  }
  if (on_device_.exists()) {
    return on_device_.take(page);
  }
  page.went.hash = hash_of(page.strong.data(), page.bytes);
  page.went.hashed = true;
  return true;
}

bool Evidence::is_as_it_went(Page& page, const c10::Storage& storage, bool copied,
                             std::shared_ptr<const Suspects> suspects,
                             std::vector<uint64_t> proved) {
  if (!page.went.hashed) {
    return true;
  }
  const uint64_t key = value_key(*page.current, copied);
  const bool fits = static_cast<int64_t>(storage.nbytes()) == page.bytes;
  if (on_device_.exists() && fits) {
    on_device_.compare_later(page, storage, key, copied, std::move(suspects), std::move(proved));
    return true;
  }
  ++counters_.comparisons;
  if (!fits || hash_of(storage.data(), page.bytes) != page.went.hash) {
    return false;
  }
  page.went.hashed = false;
  note_same(known_[key]);
  for (const uint64_t each : proved) {
    note_same(known_[each]);
  }
  return true;
}

bool Evidence::is_proven(const Value& value) const {
  return !value.producer || each_of_recipe(value, [&](const Value& made) {
    const auto known = known_.find(op_key(made));
    return known != known_.end() && known->second.steps >= kFirstSteps;
  });
}

std::vector<uint64_t> Evidence::proved_by(const Value& value, const RanOps& ran) const {
  std::vector<uint64_t> keys;
  each_of_recipe(value, [&](const Value& made) {
    if (ran.count(made.producer.get()) > 0) {
      keys.push_back(op_key(made));
    }
    return true;
  });
  return keys;
}

// Says when a value that came back as it went is to be compared again. On an accelerator that is
// the same step for all, so that the host waits in few of them.
void Evidence::note_same(Known& known) {
  if (known.last_step != now_.step) {
    known.last_step = now_.step;
    ++known.steps;
  }
  if (on_device_.exists()) {
    const int64_t phase = static_cast<int64_t>(options_.seed % kMostStepsBetween);
    known.due_step = known.steps < kFirstSteps
                         ? now_.step + 1
                         : now_.step + kMostStepsBetween - (now_.step + phase) % kMostStepsBetween;
    return;
  }
  const int64_t least = known.steps > kFirstSteps ? kMostStepsBetween / 2 : 1;
  known.due_step =
      now_.step + least +
      static_cast<int64_t>(random_() % static_cast<uint64_t>(kMostStepsBetween - least + 1));
}

bool Evidence::is_trusted(const Value& value) const {
  return trusted_.count(value.trust_key()) > 0;
}

bool Evidence::is_distrusted(const Value& value) const {
  return distrusted_.count(value.trust_key()) > 0 || distrusted_.count(value.sequence_key()) > 0;
}

bool Evidence::may_swap(const Value& value) const {
  return unswappable_.empty() || (unswappable_.count(value.trust_key()) == 0 &&
                                  unswappable_.count(value.sequence_key()) == 0);
}

void Evidence::note_audit(uint64_t trust_key, bool repeated) {
  if (repeated) {
    trusted_.insert(trust_key);
  } else if (distrusted_.insert(trust_key).second) {
    sources_.doubt_recipes();  // those that were checked before may go through it
  }
}

void Evidence::distrust(uint64_t key) {
  distrusted_.insert(key);
  trusted_.erase(key);
}

void Evidence::taint(const Value& source) {
  Page* page =
      source.home != nullptr ? source.home : pages_.find(source.anchor.unsafeGetStorageImpl());
  if (page != nullptr) {
    page->doubts.tainted = true;
    sources_.doubt_recipes();
  }
}

void Evidence::lose_trust(const std::vector<c10::intrusive_ptr<OpRecord>>& ops) {
  mismatched_ = true;
  for (const auto& op : ops) {
    op->repeats = false;
    for (const auto& out : op->outputs) {
      if (out.value != nullptr) {
        distrust(out.value->trust_key());
        distrusted_.insert(out.value->sequence_key());
      }
    }
    for (const auto& ref : op->inputs) {
      if (!ref.value->producer && ref.value->home != nullptr) {
        ref.value->home->doubts.tainted = true;
      }
    }
  }
  sources_.doubt_recipes();
}

std::string Evidence::judge() {
  std::optional<Guard> guard;  // what differs is doubted before anybody can use it
  const std::vector<Comparison> compared = on_device_.compare(guard);
  std::ostringstream text;
  int64_t different = 0;
  for (const auto& each : compared) {
    if (each.same) {
      note_same(known_[each.key]);
      for (const uint64_t key : each.proved) {
        note_same(known_[key]);
      }
      continue;
    }
    ++counters_.mismatches;
    mismatched_ = true;
    for (const uint64_t key : each.value_keys) {
      distrust(key);
      if (each.copied) {
        unswappable_.insert(key);
      }
    }
    if (each.suspects) {
      for (const uint64_t key : each.suspects->keys) {
        distrust(key);
      }
      for (const auto& source : each.suspects->sources) {
        if (Page* page = pages_.find(source._unsafe_get_target()); page != nullptr) {
          page->doubts.tainted = true;
        }
      }
    }
    sources_.doubt_recipes();
    if (++different > 1) {
      continue;
    }
    text << "delta_runtime: a saved tensor of " << each.bytes << " bytes, made by "
         << name_of(each.maker);
    if (each.copied) {
      text << ", was swapped out, and what came back is not what was freed";
    } else {
      text << ", came out different when it was recomputed by"
           << names_of(each.suspects ? each.suspects->ops : std::vector<const OpInfo*>());
    }
  }
  if (different > 1) {
    text << "; and so did " << different - 1 << " more";
  }
  std::string found = text.str();
  if (!found.empty()) {
    found +=
        ". On an accelerator this shows when the step's backward is over: its gradients were "
        "computed with it and must not be used. If an update was made with them already, go back "
        "to weights of before. ";
    found += likely_causes();
  }
  return found;
}

std::string Evidence::keep_verdict(const std::string& text) {
  Guard guard(lock_);
  if (verdict_.empty()) {
    verdict_ = text;
    has_verdict_.store(!text.empty(), std::memory_order_relaxed);
  }
  return verdict_;
}

std::string Evidence::take_verdict() {
  Guard guard(lock_);
  has_verdict_.store(false, std::memory_order_relaxed);
  return std::exchange(verdict_, {});
}

}  // namespace delta

// Evidence: what left device memory is compared with what comes back.
//
// Note: trust by evidence
//  1. Where an op comes from proves nothing: flags, modes, other threads and writes past the
//     dispatcher have all made plain ops come out different. So the bytes of a value are hashed
//     when it goes and compared when it is back: always in the first steps of each sequence of ops,
//     then in a seeded sample that takes each value once in `kMostStepsBetween` steps.
//  2. A value is rebuilt from what is there by then, once by one op, once by three. So evidence is
//     counted for ops too: each that ran in a rebuild whose result was compared. A value is
//     compared as long as some op between it and the saved values it comes from was never seen.
//  3. What an op that is not PyTorch's own stands behind is compared each time.
//  4. What differs is never used. A copy that differs is as good as none: the recipe is run. Where
//     that differs too, an error is raised; its ops are not run again from then on, and nothing is
//     recomputed from what it read. From then on no op is certain: each is compared while the
//     original is there.
//  5. On an accelerator hashes are made and kept there, and are compared when the step's backward
//     is over: see device_evidence.cpp. What differs has been used by then, and the error says so.
#include <sstream>

#include "state/session.h"
#include "util/errors.h"
#include "util/python_random.h"

namespace delta {
namespace {

constexpr int32_t kFirstSteps = 2;         // in which everything is compared
constexpr int64_t kMostStepsBetween = 49;  // two comparisons of a value after that

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

PythonRandom& python_random() {
  static auto* hooks = new PythonRandom();  // never freed: they hold Python objects
  return *hooks;
}

}  // namespace

uint64_t evidence_key(const Value& value, bool copied) {
  return mix(value.sequence_key(), copied ? 1 : 0);
}

bool Session::take_evidence(Page& page, bool copied) {
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
    if (evidence_.size() >= kMostEvidence) {
      evidence_.clear();
    }
    const Evidence& known = evidence_[evidence_key(value, copied)];
    wanted = known.steps < kFirstSteps || step_ >= known.due_step ||
             (!copied && !is_proven(value) && sabotage() != Sabotage::AuditedForEver);
  }
  if (!wanted) {
    return true;
  }
  if (device_evidence_) {
    return take_device_evidence(page);
  }
  page.went.hash = hash_of(page.strong.data(), page.bytes);
  page.went.hashed = true;
  return true;
}

bool Session::is_as_it_went(Page& page, const c10::Storage& storage, bool copied,
                            std::shared_ptr<const Suspects> suspects,
                            std::vector<uint64_t> proved) {
  if (!page.went.hashed) {
    return true;
  }
  if (device_evidence_ && static_cast<int64_t>(storage.nbytes()) == page.bytes) {
    compare_later(page, storage, copied, std::move(suspects), std::move(proved));
    return true;
  }
  ++counters_.comparisons;
  if (device_evidence_ || static_cast<int64_t>(storage.nbytes()) != page.bytes ||
      hash_of(storage.data(), page.bytes) != page.went.hash) {
    return false;
  }
  page.went.hashed = false;
  note_same(evidence_[evidence_key(*page.current, copied)]);
  for (const uint64_t key : proved) {
    note_same(evidence_[key]);
  }
  return true;
}

bool Session::is_proven(const Value& value) const {
  return !value.producer || each_of_recipe(value, [&](const Value& made) {
    const auto known = evidence_.find(op_key(made));
    return known != evidence_.end() && known->second.steps >= kFirstSteps;
  });
}

// The keys of the ops behind the value that a rebuild of it has run.
std::vector<uint64_t> Session::proved_by(const Value& value, const RanOps& ran) const {
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
void Session::note_same(Evidence& known) {
  if (known.last_step != step_) {
    known.last_step = step_;
    ++known.steps;
  }
  if (device_evidence_) {
    const int64_t phase = static_cast<int64_t>(options_.seed % kMostStepsBetween);
    known.due_step = known.steps < kFirstSteps
                         ? step_ + 1
                         : step_ + kMostStepsBetween - (step_ + phase) % kMostStepsBetween;
    return;
  }
  const int64_t least = known.steps > kFirstSteps ? kMostStepsBetween / 2 : 1;
  known.due_step = step_ + least +
                   static_cast<int64_t>(evidence_random_() %
                                        static_cast<uint64_t>(kMostStepsBetween - least + 1));
}

// What the value lay in changes unseen: nothing is recomputed from there any more.
void Session::taint(const Value& source) {
  Page* page =
      source.home != nullptr ? source.home : find_page(source.anchor.unsafeGetStorageImpl());
  if (page != nullptr) {
    page->doubts.tainted = true;
    ++anchor_epoch_;
  }
}

void Session::lose_trust(const std::vector<c10::intrusive_ptr<OpRecord>>& ops) {
  mismatched_ = true;
  for (const auto& op : ops) {
    op->repeats = false;
    for (const auto& out : op->outputs) {
      if (out.value != nullptr) {
        trusted_.erase(out.value->trust_key());
        distrusted_.insert(out.value->trust_key());
        distrusted_.insert(out.value->sequence_key());
      }
    }
    for (const auto& ref : op->inputs) {
      if (!ref.value->producer && ref.value->home != nullptr) {
        ref.value->home->doubts.tainted = true;
      }
    }
  }
  ++anchor_epoch_;
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

std::string likely_causes() {
  return "Likely causes: code that PyTorch does not see wrote to a tensor (numpy, ctypes, a C++ "
         "extension, a kernel of your own: tell it with delta_runtime.mark_written); an op of your "
         "own does not repeat; a thread changed a tensor or a flag. From now on these ops are not "
         "run again and their results are kept or swapped: the next step works.";
}

std::string mismatch_text(const Page& page, const std::vector<c10::intrusive_ptr<OpRecord>>& ops) {
  std::ostringstream text;
  std::vector<const OpInfo*> infos;
  for (const auto& op : ops) {
    infos.push_back(op->info);
  }
  text << "delta_runtime: a saved tensor of " << page.bytes << " bytes, made by "
       << (page.current->producer ? page.current->producer->info->name : std::string("?"))
       << ", came out different when it was recomputed by" << names_of(infos)
       << ". It is not used, and gradients of this backward are incomplete; weights and optimizer "
          "state are as they were. "
       << likely_causes();
  return text.str();
}

void set_python_random(PythonRandom hooks) { python_random() = std::move(hooks); }

PythonRandomGuard::PythonRandomGuard(const OpRecord& op) {
  if (!op.info->certain && python_random().save && sabotage() != Sabotage::PythonRandomMoves) {
    saved_ = python_random().save();
  }
}

PythonRandomGuard::~PythonRandomGuard() {
  if (saved_) {
    python_random().restore(saved_);
  }
}

}  // namespace delta

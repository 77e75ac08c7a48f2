#include "rebuild/run_op.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>

#include "rebuild/quiet.h"
#include "rebuild/random_state.h"
#include "rebuild/replay_thread.h"
#include "rebuild/shortcuts.h"
#include "util/bytes_of.h"
#include "util/errors.h"
#include "util/python_random.h"
#include "util/signals.h"

namespace delta {
namespace {

c10::Storage clone_storage(const c10::Storage& storage) {
  Quiet quiet;
  at::AutoDispatchBelowADInplaceOrView below;
  auto source = bytes_of(storage);
  auto copy = at::empty(source.sizes(), source.options());
  copy.copy_(source);
  return copy.storage();
}

// What surrounded the op when it was recorded.
class RecordedContext {
 public:
  explicit RecordedContext(const OpRecord& op, uint8_t needs)
      : numbers_(sabotage() == Sabotage::NumericContextLost
                     ? NumericContext::now(op.device.type(), needs)
                     : op.numbers.only(needs),
                 op.device.type()),
        grad_(op.info->has_backend_kernel && op.grad_mode) {
    if (op.info->has_backend_kernel) {
      below_.emplace();
    }
  }
  RecordedContext(const RecordedContext&) = delete;
  RecordedContext& operator=(const RecordedContext&) = delete;

 private:
  NumericContextGuard numbers_;
  Quiet quiet_;
  at::AutoGradMode grad_;
  std::optional<at::AutoDispatchBelowADInplaceOrView> below_;
};

const at::Tensor element(const c10::IValue& x, int index) {
  if (index < 0) {
    return x.toTensor();
  }
  const c10::IValue& found = x.toListRef()[static_cast<size_t>(index)];
  return found.isTensor() ? found.toTensor() : at::Tensor();
}

// The default dtype is that of all threads: an op that takes its result's dtype is told that
// instead. Returns what else the op needs of its surroundings.
uint8_t told_its_dtype(const OpRecord& op, torch::jit::Stack& stack) {
  const uint8_t needs = op.numbers.needs;
  if ((needs & kNeedsDefaultDtype) == 0 || op.info->dtype_argument < 0 ||
      op.result_dtype == at::ScalarType::Undefined) {
    return needs;
  }
  auto& dtype = stack[static_cast<size_t>(op.info->dtype_argument)];
  if (dtype.isNone()) {
    dtype = static_cast<int64_t>(op.result_dtype);
  }
  return needs & static_cast<uint8_t>(~kNeedsDefaultDtype);
}

// Storages for what the op writes: its own where nothing else needs the old content, else copies.
ska::flat_hash_map<Value*, c10::Storage> buffers_of(OpRecord& op, Rerun& rerun) {
  struct Need {
    bool content = false;
    bool scratch = false;
    int refs = 0;
    int64_t bytes = 0;
  };
  ska::flat_hash_map<Value*, Need> needs;
  for (auto& ref : op.inputs) {
    if (ref.write != Write::No) {
      needs[ref.value.get()].bytes = ref.value->bytes;
    }
  }
  ska::flat_hash_map<Value*, c10::Storage> buffers;
  if (needs.empty()) {
    return buffers;
  }
  for (auto& ref : op.inputs) {
    auto need = needs.find(ref.value.get());
    if (need != needs.end()) {
      need->second.content |= ref.needs_content();
      need->second.scratch |= ref.write == Write::Scratch;
      need->second.refs += ref.needs_content() ? 1 : 0;
      need->second.bytes = std::max(need->second.bytes, ref.view.storage_bytes());
    }
  }
  for (const auto& [value, need] : needs) {
    if (!need.content) {
      buffers.emplace(value, fresh_storage(need.bytes, op.device, need.scratch));
      continue;
    }
    auto& slot = rerun.slots.at(value);
    const bool steal = slot.ours && slot.uses == need.refs && slot.storage.use_count() == 1;
    if (steal || sabotage() == Sabotage::InplaceWithoutCopy) {
      buffers.emplace(value, slot.storage);
    } else {
      buffers.emplace(value, clone_storage(slot.storage));
    }
  }
  return buffers;
}

// The arguments of the op, with its tensors over what is in the slots, or over `buffers` where it
// writes to them.
torch::jit::Stack arguments_of(const OpRecord& op, const Rerun& rerun,
                               const ska::flat_hash_map<Value*, c10::Storage>& buffers) {
  torch::jit::Stack stack;
  stack.reserve(op.arguments.size());
  for (const auto& x : op.arguments) {
    if (x.isTensorList()) {
      stack.emplace_back(c10::List<at::Tensor>(x.toTensorVector()));
    } else if (x.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& t : x.toOptionalTensorVector()) {
        list.push_back(t);
      }
      stack.emplace_back(std::move(list));
    } else {
      stack.push_back(x);
    }
  }
  {
    Quiet quiet;
    for (auto& ref : op.inputs) {
      auto buffer = buffers.find(ref.value.get());
      const c10::Storage& storage =
          buffer != buffers.end() ? buffer->second : rerun.slots.at(ref.value.get()).storage;
      TORCH_CHECK(static_cast<int64_t>(storage.nbytes()) >= ref.view.storage_bytes(),
                  "delta_runtime: a tensor that recomputing ", op.info->name,
                  " needs was shrunk to ", storage.nbytes(), " bytes; ", ref.view.storage_bytes(),
                  " are needed");
      at::Tensor t = ref.view.over(storage, op.device);
      if (ref.view.requires_grad && op.info->has_backend_kernel) {
        t.set_requires_grad(true);
      }
      auto& place = stack[static_cast<size_t>(ref.argument)];
      if (ref.index < 0) {
        place = std::move(t);
      } else if (place.isTensorList()) {
        auto list = place.toTensorList();
        list.set(static_cast<size_t>(ref.index), std::move(t));
      } else {
        auto list = place.to<c10::List<std::optional<at::Tensor>>>();
        list.set(static_cast<size_t>(ref.index), std::move(t));
      }
    }
  }
  return stack;
}

// The storages of what the op has returned and written.
std::vector<c10::Storage> storages_of(const OpRecord& op, const torch::jit::Stack& written,
                                      const torch::jit::Stack& returned, bool some_are_given) {
  std::vector<c10::Storage> made(op.outputs.size());
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    auto& out = op.outputs[i];
    const auto& from = out.is_argument ? written[static_cast<size_t>(out.position)]
                                       : returned[static_cast<size_t>(out.position)];
    at::Tensor t = element(from, out.index);
    if (some_are_given && !t.defined()) {
      continue;
    }
    TORCH_CHECK(static_cast<int64_t>(t.storage().nbytes()) == out.bytes,
                "delta_runtime: recomputing ", op.info->name, " made a storage of ",
                t.storage().nbytes(), " bytes where the recorded one had ", out.bytes);
    made[i] = t.storage();
  }
  return made;
}

// Runs one op of the rerun. Returns the storages of its outputs, in the order of op.outputs; a
// shortcut (which is set to null where it does not apply) leaves those empty that it was given.
std::vector<c10::Storage> run(OpRecord& op, Rerun& rerun, const Shortcut*& shortcut,
                              const std::array<c10::Storage, 2>& given) {
  torch::jit::Stack stack = arguments_of(op, rerun, buffers_of(op, rerun));
  torch::jit::Stack inputs;
  for (auto& out : op.outputs) {
    if (out.is_argument) {
      inputs = stack;  // written arguments are read from here after the call
      break;
    }
  }
  if (inputs.empty() || sabotage() != Sabotage::PreWriteValue) {
    const auto call = [&] {
      RecordedContext context(op, told_its_dtype(op, stack));
      if (shortcut != nullptr && op.info->takes_generator() && !op.draws.empty()) {
        stack[static_cast<size_t>(op.info->generator_argument)] = op.draws.front().before.clone();
      }
      if (shortcut != nullptr && !(shortcut->applies(stack) && shortcut->proven(stack))) {
        shortcut = nullptr;
      }
      if (shortcut != nullptr) {
        shortcut->run(stack, given);
        return;
      }
      PythonRandomGuard python(!op.info->certain && sabotage() != Sabotage::PythonRandomMoves);
      run_with_draws(*op.info, op.draws, stack);
    };
    // On an accelerator the streams of the calling thread order what runs.
    const bool here = !op.device.is_cpu() || op.thread == thread_serial() ||
                      sabotage() == Sabotage::ReplayOnAnyThread;
    if (here) {
      call();
    } else {
      run_on_replay_thread(op.numbers.threads, call);
    }
  } else {
    stack.assign(op.info->n_returns, c10::IValue());  // the in-place op is left out
  }
  return storages_of(op, inputs, stack, shortcut != nullptr);
}

std::vector<c10::Storage> run_whole(OpRecord& op, Rerun& rerun) {
  const Shortcut* none = nullptr;
  return run(op, rerun, none, {});
}

constexpr size_t kMostVerdicts = 65536;  // numbers that change with each step are not kept forever

}  // namespace

// How an op is run again: as it ran before, or by a shortcut.
struct OpRunner::Way {
  const Shortcut* shortcut = nullptr;
  std::array<c10::Storage, 2> given;
  uint64_t key = 0;  // of the verdict
  bool tried = false;
};

// The shortcut that may be taken, or has to be tried first.
OpRunner::Way OpRunner::way_of(const OpRecord& op, Rerun& rerun) {
  Way way;
  const Shortcut* shortcut = op.device.is_cpu() ? op.info->shortcut : nullptr;
  if (shortcut == nullptr) {
    return way;
  }
  Guard guard(lock_);
  const c10::ArrayRef<const c10::IValue> numbers(op.arguments.data(), op.arguments.size());
  bool wanted = false;
  size_t found = 0;
  for (const auto& out : op.outputs) {
    if (out.value == nullptr) {
      continue;
    }
    if (out.position == 0) {
      wanted = true;
      way.key = mix_numbers(out.value->trust_key(), numbers);
      for (const auto& ref : op.inputs) {
        way.key = mix(way.key, static_cast<uint64_t>(c10::typeMetaToScalarType(ref.view.dtype)));
        for (const auto stride : ref.view.geometry.strides_arrayref()) {
          way.key = mix(way.key, static_cast<uint64_t>(stride));
        }
      }
    }
    for (size_t i = 0; i < way.given.size(); ++i) {
      if (out.position == shortcut->given[i] && !out.is_argument) {
        const auto slot = rerun.slots.find(out.value);
        if (slot != rerun.slots.end() && slot->second.uses > 0 && !slot->second.storage &&
            !slot->second.page) {
          return {};  // to be made by this rerun: an audit of a value that is there
        }
        way.given[i] = tiers_.storage_there(*out.value);
        found += way.given[i] ? 1 : 0;
      }
    }
  }
  const auto needed = static_cast<size_t>(
      std::count_if(shortcut->given.begin(), shortcut->given.end(), [](int i) { return i >= 0; }));
  const auto verdict = shortcut_holds_.find(way.key);
  way.tried = verdict != shortcut_holds_.end();
  if (wanted && found == needed && (!way.tried || verdict->second)) {
    way.shortcut = shortcut;
  }
  return way;
}

std::vector<c10::Storage> OpRunner::make_outputs(OpRecord& op, Rerun& rerun, double& seconds) {
  Way way = way_of(op, rerun);
  const bool trial = way.shortcut != nullptr && !way.tried;
  return trial ? try_shortcut(op, rerun, way, seconds) : run_known(op, rerun, way, seconds);
}

// Nothing has to be tried.
std::vector<c10::Storage> OpRunner::run_known(OpRecord& op, Rerun& rerun, Way& way,
                                              double& seconds) {
  const auto begin = std::chrono::steady_clock::now();
  std::vector<c10::Storage> made;
  try {
    made = run(op, rerun, way.shortcut, way.given);
  } catch (const std::exception&) {
    if (way.shortcut == nullptr) {
      throw;
    }
    way.shortcut = nullptr;
    made = run_whole(op, rerun);
  }
  seconds = seconds_since(begin);
  Guard guard(lock_);
  if (way.shortcut != nullptr) {
    ++counters_.shortcuts;
    rerun.shortcuts.push_back(way.key);
  }
  return made;
}

// By the shortcut and as it ran before, one after the other, with hashes compared, so that it needs
// no more room than the op itself.
std::vector<c10::Storage> OpRunner::try_shortcut(OpRecord& op, Rerun& rerun, Way& way,
                                                 double& seconds) {
  auto begin = std::chrono::steady_clock::now();
  std::vector<Hash128> hashes(op.outputs.size());
  const auto hash = [](const c10::Storage& storage) {
    return hash_of(storage.data(), static_cast<int64_t>(storage.nbytes()));
  };
  std::vector<bool> compared(op.outputs.size());
  bool holds = false;
  bool decided = true;
  double shortcut_s = 0;
  try {
    auto made = run(op, rerun, way.shortcut, way.given);
    shortcut_s = seconds_since(begin);
    for (size_t i = 0; i < made.size(); ++i) {
      if (made[i]) {
        hashes[i] = hash(made[i]);
        compared[i] = holds = true;
      }
    }
  } catch (const c10::OutOfMemoryError&) {
    holds = decided = false;
  } catch (const BudgetPassed&) {
    holds = decided = false;
  } catch (const std::exception&) {
    holds = false;
  }
  if (way.shortcut == nullptr) {  // does not apply to these arguments
    holds = false;
  }
  begin = std::chrono::steady_clock::now();
  auto made = run_whole(op, rerun);
  seconds = seconds_since(begin);
  for (size_t i = 0; i < made.size(); ++i) {
    if (compared[i]) {
      const Hash128 whole = hash(made[i]);
      holds &= whole == hashes[i];
    }
  }
  if (holds) {
    seconds = shortcut_s;
  }
  if (decided) {
    note_trial(way, holds);
  }
  return made;
}

void OpRunner::note_trial(const Way& way, bool holds) {
  Guard guard(lock_);
  if (shortcut_holds_.size() >= kMostVerdicts) {
    shortcut_holds_.clear();
  }
  shortcut_holds_[way.key] = holds;
  counters_.shortcut_failures += holds || way.shortcut == nullptr ? 0 : 1;
}

void OpRunner::give_up_shortcuts(const std::vector<uint64_t>& keys) {
  for (const uint64_t key : keys) {
    shortcut_holds_[key] = false;
    ++counters_.shortcut_failures;
  }
}

}  // namespace delta

#include "observe/op_rescue.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/clone.h>
#include <c10/core/impl/COW.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "observe/op_info.h"
#include "observe/operands.h"
#include "observe/pack_hooks.h"
#include "observe/random_draws.h"
#include "rebuild/quiet.h"
#include "state/entered.h"
#include "state/session.h"

namespace delta {
namespace {

std::atomic<bool> g_enabled{true};
thread_local bool t_gave_up = false;  // an op inside of the one that runs was not given its room

c10::intrusive_ptr<Session> session_here() {
  if (Session* own = thread_state().session) {
    return c10::intrusive_ptr<Session>::reclaim_copy(own);
  }
  return torch::autograd::get_current_graph_task_id() == -1 ? c10::intrusive_ptr<Session>()
                                                            : entered_session();
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) {
    return false;
  }
  if (!is_plain(a) || !is_plain(b)) {
    return true;  // for all that is known
  }
  const auto* from_a = static_cast<const char*>(a.storage().data());
  const auto* from_b = static_cast<const char*>(b.storage().data());
  return from_a < from_b + b.storage().nbytes() && from_b < from_a + a.storage().nbytes();
}

// Whether what lies in the memory of that argument is among the others too.
bool is_read(c10::ArrayRef<const c10::IValue> inputs, size_t written) {
  bool found = false;
  for_each_tensor(inputs[written], [&](const at::Tensor& out, int) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      for_each_tensor(inputs[i],
                      [&](const at::Tensor& t, int) { found |= i != written && overlap(out, t); });
    }
  });
  return found;
}

// Whether each run tells somebody else of what it was given: hooks that are not ours, which may
// count what autograd saves (those of checkpointing do), or a tracer.
bool tells_others(c10::DispatchKeySet keys, c10::ArrayRef<const c10::IValue> inputs) {
  if (keys.has(c10::DispatchKey::Tracer)) {
    return true;
  }
  if (!at::GradMode::is_enabled() || !keys.has_any(c10::autograd_dispatch_keyset) ||
      !has_foreign_pack_hook()) {
    return false;
  }
  bool saves = false;
  for (const auto& x : inputs) {
    for_each_tensor(x,
                    [&](const at::Tensor& t, int) { saves |= t.defined() && t.requires_grad(); });
  }
  return saves;
}

// Whether some of it is a lazy clone. Where the memory for a true copy gives out, PyTorch has taken
// the tensor from the clone's holders already: the next run would write into what is theirs.
bool is_lazy(c10::ArrayRef<const c10::IValue> inputs) {
  bool found = false;
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      found |= is_plain(t) && c10::impl::cow::is_cow_data_ptr(t.storage().data_ptr());
    });
  }
  return found;
}

// Whether another run gives what the first one would have given, once what `Given` keeps is put
// back. Not of an op that is not certain: it may write, or draw, without saying so.
bool may_run_again(const OpInfo& info, c10::DispatchKeySet keys,
                   c10::ArrayRef<const c10::IValue> inputs) {
  if (!info.certain || info.view_only || info.composite_accelerator || info.collective ||
      info.moves_storage || info.never_replay || tells_others(keys, inputs) || is_lazy(inputs)) {
    return false;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Write write = info.write_of(i);
    if (write == Write::InPlace || (write == Write::Overwrite && is_read(inputs, i))) {
      return false;
    }
  }
  return true;
}

// Whether the op takes memory of that device, as far as its arguments say.
bool is_of_device(c10::ArrayRef<const c10::IValue> inputs, c10::Device device) {
  bool found = false;
  for (const auto& x : inputs) {
    if (x.isDevice()) {
      const c10::Device to = x.toDevice();
      if (to.type() != device.type() || (to.has_index() && to != device)) {
        return false;
      }
      found = true;
    }
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      found |= t.defined() && is_plain(t) && t.device() == device;
    });
  }
  return found;
}

// The least that a factory takes, by the sizes that it was given; 0 of another op.
int64_t bytes_of_factory(const OpInfo& info, c10::ArrayRef<c10::IValue> inputs) {
  if ((!info.factory && !info.makes_unknown) || inputs.empty() || !inputs[0].isIntList()) {
    return 0;
  }
  double bytes = 1;
  for (const int64_t size : inputs[0].toIntVector()) {
    bytes *= static_cast<double>(size);
  }
  const auto& arguments = info.handle.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "dtype" && inputs[i].isInt()) {
      bytes *= static_cast<double>(c10::elementSize(inputs[i].toScalarType()));
    }
  }
  return static_cast<int64_t>(std::min(bytes, 1e18));
}

// What an op was given, so that it can be given it again.
class Given {
 public:
  Given(const OpInfo& info, const torch::jit::Stack& stack, size_t n_arguments, Session& session)
      : session_(session),
        below_(stack.size() - n_arguments),
        arguments_(stack.begin() + static_cast<int64_t>(below_), stack.end()),
        saves_(session.state.now.saves),
        packs_(session.state.counters.packs) {
    for (const auto& x : arguments_) {
      for_each_tensor(x, [&](const at::Tensor& t, int) {
        if (t.defined() && is_plain(t)) {
          input_bytes_ += t.numel() * static_cast<int64_t>(t.itemsize());
        }
      });
    }
    if (info.random) {
      const c10::ArrayRef<const c10::IValue> given(arguments_.data(), arguments_.size());
      draws_ = copy_generators(info, given, session.device());
    }
    keep_statistics(info);
  }

  // What it will take, at a guess: nothing is known of an op that did not run yet.
  int64_t most_bytes() const { return 3 * input_bytes_ + (int64_t{1} << 20); }

  // Whether it could fit on an empty device, as far as can be told.
  bool may_fit(const OpInfo& info) {
    const int64_t budget_bytes = session_.state.options.budget_bytes;
    return budget_bytes <= 0 || bytes_of_factory(info, arguments_) <= budget_bytes;
  }

  bool can_be_given_again() const { return all_kept_; }

  // False: it could not be put back as it was.
  bool give_again(torch::jit::Stack& stack) const {
    stack.resize(below_);
    stack.insert(stack.end(), arguments_.begin(), arguments_.end());
    try {
      for (const auto& draw : draws_) {
        at::Generator generator = draw.generator;
        std::lock_guard<std::mutex> lock(generator.mutex());
        generator.set_state(draw.before.get_state());
      }
      if (!kept_.empty()) {
        const Quiet quiet;
        const WithoutRescue at_once;
        at::AutoDispatchBelowADInplaceOrView below;
        for (const auto& [tensor, copy] : kept_) {
          tensor.copy_(copy);
        }
      }
    } catch (const c10::Error&) {
      return false;
    }
    // What the session's hooks took for the run that failed is gone again: the step is as if that
    // had not been.
    Guard guard(session_.state.lock);
    session_.state.now.saves = saves_;
    session_.state.counters.packs = packs_;
    return true;
  }

 private:
  // Copies of what the op writes on the side: of all of it, or the op is not run again.
  void keep_statistics(const OpInfo& info) {
    const bool trains = info.training_argument < 0 ||
                        !arguments_[static_cast<size_t>(info.training_argument)].isBool() ||
                        arguments_[static_cast<size_t>(info.training_argument)].toBool();
    std::vector<at::Tensor> written;
    for (size_t i = 0; trains && i < arguments_.size(); ++i) {
      if (info.write_of(i) == Write::Scratch && arguments_[i].isTensor() &&
          arguments_[i].toTensor().defined()) {
        written.push_back(arguments_[i].toTensor());
      }
    }
    all_kept_ = written.empty();
    if (all_kept_) {
      return;
    }
    try {
      const Quiet quiet;
      const WithoutRescue at_once;
      at::AutoDispatchBelowADInplaceOrView below;
      for (const auto& tensor : written) {
        kept_.emplace_back(tensor, at::clone(tensor));
      }
      all_kept_ = true;
    } catch (const c10::Error&) {  // the op may do well all the same
      kept_.clear();
    }
  }

  Session& session_;
  size_t below_;
  std::vector<c10::IValue> arguments_;
  std::vector<RecordedDraw> draws_;
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
  uint64_t saves_;
  int64_t packs_;
  int64_t input_bytes_ = 0;
  bool all_kept_ = true;
};

// Where that fails by itself the op's own error is what the user is told. (A stream that is
// captured must not be waited for; an error of memory ends its capture in any case.)
bool made_room(Session& session, int64_t bytes, int attempt) {
  const WithoutRescue making;
  try {
    return session.eviction.rescue(bytes, attempt);
  } catch (const c10::Error&) {
    return false;
  }
}

// What the user is told beside the allocator's own words. From here on nothing that called the op
// is run again either.
void give_up(c10::OutOfMemoryError& error, const OpInfo& info, const char* why) {
  if (std::exchange(t_gave_up, true)) {
    error.add_context("in " + info.name);
  } else {
    error.add_context("delta_runtime: " + info.name + " ran out of memory" + why);
  }
}

void run_once(const c10::OperatorHandle& op, const OpInfo* info, c10::DispatchKeySet keys,
              torch::jit::Stack* stack) {
  t_gave_up = false;
  try {
    op.redispatchBoxed(keys, stack);
  } catch (c10::OutOfMemoryError& error) {
    if (info == nullptr) {
      t_gave_up = true;
    } else if (!info->composite_accelerator) {
      const bool may_write = info->any_write || !info->certain;
      give_up(error, *info,
              may_write ? ". It is not run again: it may have done a part of its work."
                        : ". It is not run again.");
    }
    throw;
  }
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kRescuesOps);
  const size_t n_arguments = op.schema().arguments().size();
  const c10::ArrayRef<const c10::IValue> inputs(stack->data() + stack->size() - n_arguments,
                                                n_arguments);
  c10::intrusive_ptr<Session> session;
  if (g_enabled.load(std::memory_order_relaxed) && !thread_trash().locked) {
    session = session_here();
  }
  if (!session || session->device().is_cpu()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const OpInfo* info = is_of_device(inputs, session->device()) ? op_info(op) : nullptr;
  if (info == nullptr || !may_run_again(*info, keys, inputs)) {
    run_once(op, info, below, stack);
    return;
  }
  Given given(*info, *stack, n_arguments, *session);
  for (int attempt = 0;; ++attempt) {
    t_gave_up = false;
    try {
      op.redispatchBoxed(below, stack);
      return;
    } catch (c10::OutOfMemoryError& error) {
      if (!given.may_fit(*info)) {
        give_up(error, *info, ": it asks for more than the whole budget.");
        throw;
      }
      if (!given.can_be_given_again()) {
        give_up(error, *info, ". It is not run again: there is no copy of its running statistics.");
        throw;
      }
      if (t_gave_up || !made_room(*session, given.most_bytes(), attempt) ||
          !given.give_again(*stack)) {
        give_up(error, *info, ", and again when all that may leave the device had left.");
        throw;
      }
    }
  }
}

// Whether the fallback is there; not where somebody else has one for this key.
bool is_registered() {
  static const bool registered = [] {
    try {
      auto* library = new torch::Library(torch::Library::IMPL, "_", kRescuesOps, __FILE__,
                                         __LINE__);  // for good
      library->fallback(torch::CppFunction::makeFromBoxedFunction<&run>());
      return true;
    } catch (const c10::Error&) {
      return false;
    }
  }();
  return registered;
}

}  // namespace

void rescue_ops(bool on) {
  if (!on || is_registered()) {
    c10::impl::tls_set_dispatch_key_included(kRescuesOps, on);
  }
}

void set_op_rescue_enabled(bool enabled) { g_enabled.store(enabled); }

}  // namespace delta

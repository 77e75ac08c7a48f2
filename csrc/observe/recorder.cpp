// The observer of atomic ops: which of them are announced, and to whom.
#include <ATen/Context.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <exception>

#include "observe/observer.h"
#include "observe/operands.h"
#include "observe/pack_hooks.h"
#include "state/entered.h"
#include "state/session.h"

namespace delta {
namespace {

struct Observed : at::ObserverContext, Pooled<Observed> {
  explicit Observed(bool s) : stranger(s) {}
  bool stranger;  // a draw of a thread that is not followed
};

// Compiled code announces itself by these names; what it saves can be swapped, not made again.
bool opaque_region(const char* name) {
  if (name[0] != 'T' && name[0] != 'C') {
    return false;  // most are autograd's own ranges
  }
  return std::strncmp(name, "Torch-Compiled Region", 21) == 0 ||
         std::strcmp(name, "CompiledFunction") == 0;
}

// Note: ops that Python handles
// Under a dispatch mode, and on tensors of a class with __torch_dispatch__, the op that is
// announced is not the one that computes: Python decides what to call instead, and calls it below.
// So such an op is transparent, and what it calls is recorded. A mode of torch's own that computes
// nothing (FakeTensor) is left alone: there is nothing to record below it.
bool python_handles(c10::ArrayRef<const c10::IValue> inputs) {
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) {
    return false;
  }
  if (c10::impl::TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/true) &&
      sabotage() != Sabotage::ModesUnseen) {
    return true;
  }
  bool found = false;
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      found |= t.defined() && t.key_set().has(c10::DispatchKey::Python);
    });
  }
  return found && !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         sabotage() != Sabotage::SubclassesUnseen;
}

// Whether the op is one of a trace whose sizes are symbols (torch.compile with dynamic shapes,
// torch.export). It computes nothing, and to ask for a size would make the symbol a number for
// good.
bool has_symbolic_sizes(c10::ArrayRef<const c10::IValue> inputs) {
  bool found = false;
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      found |=
          t.defined() && (t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
                          (t.has_storage() &&
                           t.storage().unsafeGetStorageImpl()->sym_nbytes().is_heap_allocated()));
    });
  }
  return found;
}

// Whether this is a thread of a backward that was called where a session is entered. Others have
// that thread's state too (those of a process group, of torch.jit.fork) and compute something else.
bool is_of_our_backward() {
  return torch::autograd::get_current_graph_task_id() != -1 && has_our_pack_hook();
}

// Tells of what an op writes that these sessions do not tape: all that watch, but for one.
void tell_of_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                    const Session* but) {
  if (!info.any_write || info.moves_storage) {
    return;
  }
  try {
    for (const auto& session : watching_sessions()) {
      if (session.get() != but) {
        session->ops.note_foreign_writes(info, inputs);
      }
    }
  } catch (const std::exception&) {  // a callback must not throw; no room for a copy is said later
  }
}

std::unique_ptr<at::ObserverContext> note_stranger(const at::RecordFunction& fn) {
  if (sabotage() == Sabotage::OtherThreadsUnseen) {
    return nullptr;
  }
  OpInfo* info = op_info(fn);
  if (info == nullptr) {
    return nullptr;
  }
  const auto inputs = fn.inputs();
  tell_of_writes(*info, inputs, nullptr);
  if (!info->random) {
    return nullptr;
  }
  bool from_default = true;
  for (const auto& x : inputs) {
    if (x.isGenerator()) {
      const auto generator = x.toGenerator();
      from_default = generator == at::globalContext().defaultGenerator(generator.device());
    }
  }
  stranger_draws().begin(from_default);
  return std::make_unique<Observed>(/*s=*/true);
}

// Nothing that compiled code makes is followed. What it writes to may be a source of what was made
// outside of it.
void note_write_in_region(const at::RecordFunction& fn) {
  if (const OpInfo* info = op_info(fn)) {
    tell_of_writes(*info, fn.inputs(), nullptr);
  }
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& fn) {
  auto& ts = thread_state();
  if (ts.depth > 0 || ts.replaying) {
    if (ts.open.region && !ts.replaying) {
      note_write_in_region(fn);
    }
    return nullptr;
  }
  c10::intrusive_ptr<Session> visited;
  Session* session = ts.session;
  if (session == nullptr) {
    if (!is_of_our_backward()) {
      return note_stranger(fn);
    }
    visited = entered_session();
    session = visited.get();
    if (session == nullptr) {
      return nullptr;
    }
  }
  OpInfo* info = op_info(fn);
  if (info == nullptr) {
    if (!opaque_region(fn.name())) {
      return nullptr;
    }
    ts.open.clear();
    ts.open.region = true;
  } else {
    auto inputs = fn.inputs();
    if (info->view_only || is_transparent(*info, inputs, session->device().is_cpu()) ||
        python_handles(inputs) || has_symbolic_sizes(inputs)) {
      return nullptr;
    }
    ts.depth = 1;  // ops of the Python that may be asked below are not observed
    if (several_watch()) {
      tell_of_writes(*info, inputs, session);
    }
    if (session->idle.first_ops.looking() && visited == nullptr &&
        !session->idle.observes(*info, inputs)) {
      return std::make_unique<Observed>(/*s=*/false);
    }
    try {
      session->ops.begin(ts, info, inputs);
    } catch (const std::exception&) {
      // A callback must not throw. What the op writes is found by its version counters later.
      ts.open.clear();
      ts.depth = 0;
      return nullptr;
    }
  }
  ts.depth = 1;
  ts.visited = std::move(visited);
  return std::make_unique<Observed>(/*s=*/false);
}

void on_end(const at::RecordFunction& fn, at::ObserverContext* context) {
  if (context == nullptr) {
    return;
  }
  if (static_cast<const Observed*>(context)->stranger) {
    stranger_draws().end();
    return;
  }
  auto& ts = thread_state();
  ts.depth = 0;
  auto visited = std::move(ts.visited);
  Session* session = ts.session != nullptr ? ts.session : static_cast<Session*>(visited.get());
  if (session == nullptr || !ts.open.active) {
    ts.open.clear();
    return;
  }
  try {
    const auto& outputs = fn.outputs();
    session->ops.end(ts, c10::ArrayRef<const c10::IValue>(outputs.data(), outputs.size()));
  } catch (const std::exception&) {
    ts.open.clear();
  }
}

at::CallbackHandle g_bare = 0;
std::unique_ptr<at::ObserverContext> bare_start(const at::RecordFunction&) { return nullptr; }
void bare_end(const at::RecordFunction&, at::ObserverContext*) {}

at::RecordFunctionCallback with_tensors(at::RecordFunctionCallback callback) {
  return std::move(
      callback.needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
}

}  // namespace

at::RecordFunctionCallback observer_callback() {
  return with_tensors(at::RecordFunctionCallback(on_start, on_end));
}

void enter_bare_observer() {
  TORCH_CHECK(g_bare == 0, "the bare observer is entered already");
  g_bare =
      at::addThreadLocalCallback(with_tensors(at::RecordFunctionCallback(bare_start, bare_end)));
}

void leave_bare_observer() {
  if (g_bare != 0) {
    at::removeCallback(g_bare);
    g_bare = 0;
  }
}

}  // namespace delta

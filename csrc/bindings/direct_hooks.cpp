#include "bindings/direct_hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <atomic>
#include <utility>

#include "bindings/ticket.h"

namespace delta {
namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

// The pointer that an engine takes a graph's root by. Its class depends on the release of PyTorch.
template <class Method>
struct RootOf;
template <class Future, class Task, class Root, class Inputs>
struct RootOf<Future (Engine::*)(Task, Root, Inputs)> {
  using type = Root;
};
using RootPointer = RootOf<decltype(&Engine::execute_with_graph_task)>::type;

std::atomic<bool> g_wanted{true};
Engine* g_torchs = nullptr;  // PyTorch's own, which lives as long as the process

// The session whose pair is on top of this thread's hooks; null if another's is, or none.
Session* session_on_top() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state();
  if (hooks.stack.empty() || hooks.is_tracing || !g_wanted.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  const auto& top = hooks.stack.top();
  return session_of_hooks(top.first.ptr(getPyInterpreter()), top.second.ptr(getPyInterpreter()));
}

// Calls `work`, and throws what it throws as autograd knows it from Python's hooks.
template <class Work>
auto with_python_errors(const Work& work) {
  try {
    return work();
  } catch (...) {
    py::gil_scoped_acquire gil;
    set_python_error();
    python_error error;
    error.persist();
    throw error;
  }
}

class DirectHooks final : public SavedVariableHooks {
 public:
  explicit DirectHooks(Session& session) : packed_(c10::make_intrusive<Packed>(session)) {}

  ~DirectHooks() override {
    if (Py_IsInitialized() == 0) {
      packed_.release();  // what is saved may have a Python side, which nothing can free any more
    }
  }

  void call_pack_hook(const at::Tensor& t) override {
    with_python_errors([&] { packed_->pack(t); });
  }

  at::Tensor call_unpack_hook() override {
    return with_python_errors([&] { return packed_->unpack(); });
  }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override {
    py::gil_scoped_acquire gil;
    return std::pair(c10::SafePyObject(unpack_hook().release().ptr(), getPyInterpreter()),
                     c10::SafePyObject(ticket_of(packed_).release().ptr(), getPyInterpreter()));
  }

 private:
  c10::intrusive_ptr<Packed> packed_;
};

class HooksEngine final : public Engine {
 public:
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    Session* session = session_on_top();
    if (session == nullptr) {
      return g_torchs->get_default_saved_variable_hooks();
    }
    return std::make_unique<DirectHooks>(*session);
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return g_torchs->execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& graph_task, RootPointer root,
      torch::autograd::InputBuffer&& inputs) override {
    return g_torchs->execute_with_graph_task(graph_task, std::move(root), std::move(inputs));
  }

  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return g_torchs->make_anomaly_metadata();
  }
};

Engine& engine_of_thread() {
  if (session_on_top() == nullptr) {
    return *g_torchs;
  }
  static auto* with_hooks = new HooksEngine();  // never freed: tensors are saved until the end
  return *with_hooks;
}

}  // namespace

void offer_direct_hooks() {
  if (g_torchs == nullptr) {
    g_torchs = &Engine::get_default_engine();
    torch::autograd::set_default_engine_stub(&engine_of_thread);
  }
}

void use_direct_hooks(bool wanted) { g_wanted = wanted; }

}  // namespace delta

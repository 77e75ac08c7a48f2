#include "observe/idle_step.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <utility>

#include "observe/open_op.h"
#include "pool/cpu_pool.h"
#include "state/entered.h"
#include "state/session.h"

namespace delta {
namespace {

// The callback at each op; one at a time in a process.
struct MemoryWatch {
  std::mutex mutex;
  at::CallbackHandle handle = 0;
  const IdleStep* step = nullptr;
};
MemoryWatch& memory_watch() {
  static auto* watch = new MemoryWatch();
  return *watch;
}

struct Woke : at::ObserverContext {};

bool may_wake_here() {
  return c10::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() == -1 &&
         at::SavedTensorDefaultHooks::is_enabled() &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
}

std::unique_ptr<at::ObserverContext> look(const at::RecordFunction&) {
  auto& ts = thread_state();
  if (ts.idle == nullptr || ts.depth > 0 || !ts.idle->wakes_here()) {
    return nullptr;
  }
  ts.depth = 1;  // the observer did not see this op begin: its parts would seem ops of their own
  return std::make_unique<Woke>();
}

void looked(const at::RecordFunction&, at::ObserverContext* woke) {
  if (woke != nullptr) {
    thread_state().depth = 0;
  }
}

// The pool asks for bytes above the most that was live: from the next op on it is looked at.
int64_t alarm(int64_t) {
  if (IdleStep* idle = thread_state().idle) {
    idle->look_at_memory();
  }
  return 0;
}

}  // namespace

void IdleStep::begin(Session& session, int64_t most_bytes) {
  session_ = &session;
  most_bytes_ = most_bytes;
  peak_bytes_ = 0;
  suspended_ = 0;
  first_ops.begin_comparing();
  auto& ts = thread_state();
  ts.session = &session;
  ts.idle = this;
  ts.depth = 0;
  ts.open.clear();
  if (session.device().is_cpu()) {
    cpu_pool::set_rescue(&alarm);
    cpu_pool::set_soft_limit(std::max<int64_t>(1, most_bytes - account_.uncounted_bytes()));
  } else {
    look_at_memory();
  }
}

void IdleStep::look_at_memory() {
  auto& watch = memory_watch();
  std::lock_guard<std::mutex> guard(watch.mutex);
  if (watch.step == nullptr) {
    watch.step = this;
    watch.handle = at::addGlobalCallback(
        std::move(at::RecordFunctionCallback(look, looked).scopes({at::RecordScope::FUNCTION})));
  }
}

void IdleStep::end() {
  if (session_ != nullptr) {
    look_no_more();
  }
}

void IdleStep::end_first_ops() {
  first_ops.end();
  auto& ts = thread_state();
  if (ts.idle == this) {
    ts.session = nullptr;
  }
  end_watch(*session_);
}

void IdleStep::look_no_more() {
  end_first_ops();
  if (session_->device().is_cpu()) {
    cpu_pool::set_rescue(nullptr);
    cpu_pool::set_soft_limit(0);
  }
  session_ = nullptr;
  auto& ts = thread_state();
  if (ts.idle == this) {
    ts.idle = nullptr;
  }
  auto& watch = memory_watch();
  std::lock_guard<std::mutex> guard(watch.mutex);
  if (watch.step == this) {
    watch.step = nullptr;
    at::removeCallback(std::exchange(watch.handle, 0));
  }
}

// Whether the runtime was entered: it is observed from here on.
bool IdleStep::wake() {
  look_no_more();
  if (wake_) {
    wake_(0);
  }
  return thread_state().session != nullptr;
}

bool IdleStep::observes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  const bool idle = first_ops.comparing();
  if (idle && suspended_ > 0) {
    return false;
  }
  const auto found = first_ops.next(info, inputs);
  if (!idle) {
    return true;
  }
  if (found == FirstOps::Found::Unknown) {
    auto begun = first_ops.take_beginnings();
    const bool woke = wake();
    thread_state().depth = 1;
    if (woke) {
      first_ops.learn_behind(std::move(begun));
    }
    return woke;
  }
  if (found == FirstOps::Found::Enough) {
    end_first_ops();
  }
  return false;
}

bool IdleStep::wakes_here() {
  const int64_t live_bytes = account_.live_bytes();
  peak_bytes_ = std::max(peak_bytes_, live_bytes);
  if (live_bytes <= most_bytes_ || suspended_ > 0 || !may_wake_here() || !wake()) {
    return false;
  }
  first_ops.end();  // how it began is not known any more
  return true;
}

void forget_idle_step() {
  auto& watch = memory_watch();
  new (&watch.mutex) std::mutex();
  watch.handle = 0;  // PyTorch's list of callbacks has a lock, too: it stays, and finds nobody idle
  watch.step = nullptr;
}

}  // namespace delta

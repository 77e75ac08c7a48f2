#include <Python.h>

#include "util/gil.h"

namespace delta {
namespace {

constexpr std::chrono::microseconds kPatience{200};
constexpr std::chrono::microseconds kPatienceInside{50'000};
thread_local bool t_inside_allocation = false;

}  // namespace

bool holds_gil() { return Py_IsInitialized() != 0 && PyGILState_Check() != 0; }

std::chrono::microseconds gil_patience() {
  return t_inside_allocation ? kPatienceInside : kPatience;
}

InsideAllocation::InsideAllocation() : before_(t_inside_allocation) { t_inside_allocation = true; }
InsideAllocation::~InsideAllocation() { t_inside_allocation = before_; }
bool inside_allocation() { return t_inside_allocation; }

c10::intrusive_ptr<c10::StorageImpl> lock(const c10::weak_intrusive_ptr<c10::StorageImpl>& weak) {
  // Its Python object counts as one owner.
  if (t_inside_allocation && weak.use_count() == 1 &&
      weak._unsafe_get_target()->pyobj_slot()->load_pyobj() != nullptr) {
    return {};
  }
  return weak.lock();
}

WithoutGil::WithoutGil() {
  if (holds_gil()) {
    state_ = PyEval_SaveThread();
  }
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(state_);
  }
}

}  // namespace delta

#include <Python.h>

#include "util/gil.h"

namespace delta {
namespace {

constexpr std::chrono::microseconds kPatience{200};
constexpr std::chrono::microseconds kPatienceInside{50'000};
thread_local bool inside_allocation = false;

// PyTorch knows how many own a storage, and since 2.12 whether its Python object is one of them.
template <class Slot>
auto has_python_object(const Slot& slot, int) -> decltype(slot.load_pyobj() != nullptr) {
  return slot.load_pyobj() != nullptr;
}
template <class Slot>
bool has_python_object(const Slot&, long) {
  return false;  // locking a weak pointer does not take the GIL
}

}  // namespace

bool holds_gil() { return Py_IsInitialized() != 0 && PyGILState_Check() != 0; }

std::chrono::microseconds gil_patience() { return inside_allocation ? kPatienceInside : kPatience; }

InsideAllocation::InsideAllocation() : before_(inside_allocation) { inside_allocation = true; }
InsideAllocation::~InsideAllocation() { inside_allocation = before_; }

c10::intrusive_ptr<c10::StorageImpl> lock(const c10::weak_intrusive_ptr<c10::StorageImpl>& weak) {
  if (inside_allocation && weak.use_count() == 1 &&
      has_python_object(*weak._unsafe_get_target()->pyobj_slot(), 0)) {
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

#include <Python.h>

#include "util/gil.h"

namespace delta {

WithoutGil::WithoutGil() {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    state_ = PyEval_SaveThread();
  }
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) {
    PyEval_RestoreThread(state_);
  }
}

}  // namespace delta

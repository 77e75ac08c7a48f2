#include "bindings/callbacks.h"

#include "util/plain_frames.h"
#include "util/signals.h"

namespace delta {

std::shared_ptr<py::object> shared(py::object object) {
  return std::shared_ptr<py::object>(new py::object(std::move(object)), [](py::object* held) {
    py::gil_scoped_acquire gil;
    delete held;
  });
}

std::function<void(int64_t)> callback_of(py::object callable) {
  if (callable.is_none()) {
    return nullptr;
  }
  auto holder = shared(std::move(callable));
  return [holder](int64_t argument) {
    py::gil_scoped_acquire gil;
    py::error_scope pending;  // an error may be pending when an op runs inside a destructor
    Shield shield;
    PlainFrames plain;
    try {
      (*holder)(argument);
    } catch (py::error_already_set& e) {
      if (e.matches(PyExc_Exception) && !e.matches(PyExc_Warning)) {
        e.discard_as_unraisable(
            "delta_runtime: the policy failed; evicting by the last known weights");
      } else {  // an interrupt; a warning, where those are errors
        e.restore();
        raise_later();
      }
    }
  };
}

std::function<bool(void*, int64_t)> pinning_of(py::object callable) {
  auto holder = shared(std::move(callable));
  return [holder](void* begin, int64_t bytes) {
    py::gil_scoped_acquire gil;
    py::error_scope pending;
    Shield shield;
    PlainFrames plain;
    try {
      return (*holder)(reinterpret_cast<uintptr_t>(begin), bytes).cast<bool>();
    } catch (py::error_already_set& e) {
      if (e.matches(PyExc_Exception)) {
        e.discard_as_unraisable("delta_runtime: pinning host memory failed");
      } else {
        e.restore();
        raise_later();
      }
      return false;
    }
  };
}

}  // namespace delta

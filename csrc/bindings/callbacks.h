// Python callables that C++ calls, from threads with or without the GIL.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>

namespace delta {

// An object that may be let go of without the GIL.
std::shared_ptr<py::object> shared(py::object object);

// Called at an op boundary. None: an empty function.
std::function<void(int64_t)> callback_of(py::object callable);

// (address, bytes) -> whether it worked. An error is a no.
std::function<bool(void*, int64_t)> pinning_of(py::object callable);

}  // namespace delta

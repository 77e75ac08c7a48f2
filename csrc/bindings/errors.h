// Which Python exception each of ours becomes.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>

namespace delta {

// Sets Python's error indicator if it is one of ours; false: it is not, and nothing was done.
bool set_own_error(const std::exception_ptr& error);
void bind_errors(py::module_& m);

}  // namespace delta

// The session, its counters and its plans, as Python sees them.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace delta {

void bind_session(py::module_& m);
void bind_plan(py::module_& m);

}  // namespace delta

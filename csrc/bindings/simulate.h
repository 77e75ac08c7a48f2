// The simulated step, as Python sees it.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace delta {

void bind_simulate(py::module_& m);

}  // namespace delta

// The inner loops of the planners, as Python sees them.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace delta {

void bind_planners(py::module_& m);

}  // namespace delta

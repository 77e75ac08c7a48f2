// Dry runs, as Python sees them.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace delta {

void bind_dry_run(py::module_& m);

}  // namespace delta

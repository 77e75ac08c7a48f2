// The Python type of tickets, and the two hooks that autograd gets.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "state/session.h"

namespace delta {

py::object pack_hook(const c10::intrusive_ptr<Session>& session);
py::object unpack_hook(const c10::intrusive_ptr<Session>& session);
void bind_ticket(py::module_& m);

}  // namespace delta

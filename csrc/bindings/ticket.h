// What a session's hooks give autograd in place of a tensor, its Python type, and the two hooks as
// Python has them.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include "observe/ticket.h"
#include "state/session.h"

namespace delta {

// A ticket and the session that it was packed by. It is released with the last owner.
struct Packed : c10::intrusive_ptr_target {
  explicit Packed(Session& by);
  ~Packed() override;

  void pack(const at::Tensor& t);
  at::Tensor unpack();  // on any thread, with or without the GIL

  c10::intrusive_ptr<Session> session;
  Ticket ticket;
};

// Turns the C++ exception in flight into a Python one. With the GIL.
void set_python_error();

py::object ticket_of(c10::intrusive_ptr<Packed> packed);

// The session that a pair of hooks was made for; null for any other pair. Needs no GIL while
// somebody holds the pair.
Session* session_of_hooks(PyObject* pack, PyObject* unpack);

py::object pack_hook(const c10::intrusive_ptr<Session>& session);
py::object unpack_hook();
void bind_ticket(py::module_& m);

}  // namespace delta

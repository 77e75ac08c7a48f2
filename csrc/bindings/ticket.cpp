#include "bindings/ticket.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>

#include "bindings/errors.h"
#include "observe/observer.h"
#include "observe/pack_hooks.h"
#include "state/entered.h"
#include "util/gil.h"
#include "util/signals.h"

namespace delta {
namespace {

PyTypeObject* g_ticket_type = nullptr;

struct PyTicket {
  PyObject_HEAD c10::intrusive_ptr<Packed> packed;
};

// An exception must not go through CPython's frames: it ends the process here.
void ticket_dealloc(PyObject* self) noexcept {
  reinterpret_cast<PyTicket*>(self)->packed.~intrusive_ptr();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

Session* session_in(PyObject* capsule) {
  return reinterpret_cast<Session*>(PyCapsule_GetPointer(capsule, "delta_runtime.session"));
}

// pack(tensor) -> ticket. `self` is the session that the hook was made for.
PyObject* py_pack(PyObject* self, PyObject* argument) {
  try {
    auto packed = c10::make_intrusive<Packed>(*session_in(self));
    packed->pack(THPVariable_Unpack(argument));
    return ticket_of(std::move(packed)).release().ptr();
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

// unpack(ticket) -> tensor. Works on any thread, any number of times, also after the session was
// left.
PyObject* py_unpack(PyObject* /*self*/, PyObject* argument) {
  if (Py_TYPE(argument) != g_ticket_type) {
    PyErr_SetString(PyExc_TypeError, "delta_runtime: unpack takes a ticket that pack returned");
    return nullptr;
  }
  try {
    return THPVariable_Wrap(reinterpret_cast<PyTicket*>(argument)->packed->unpack());
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyMethodDef g_pack_method = {"pack", py_pack, METH_O,
                             "Give autograd a ticket for a tensor that it saves."};
PyMethodDef g_unpack_method = {"unpack", py_unpack, METH_O,
                               "Give the saved tensor for a ticket back."};

bool calls(PyObject* hook, PyCFunction function) {
  return hook != nullptr && PyCFunction_Check(hook) && PyCFunction_GET_FUNCTION(hook) == function;
}

bool is_pack_hook(PyObject* hook) { return calls(hook, py_pack); }

void release_capsule(PyObject* capsule) {
  c10::intrusive_ptr<Session>::reclaim(session_in(capsule)).reset();
}

// Where the value lies that a ticket stands for.
const char* place_of(const Packed& packed) {
  const Ticket& ticket = packed.ticket;
  if (ticket.state != Ticket::State::Managed) {
    return "kept";
  }
  Session& session = *packed.session;
  Guard guard(session.state.lock);
  const Page& page = *ticket.page;
  switch (page.residency()) {
    case Residency::Resident:
      return page.below.copy && !page.below.copy->transfer->ended() ? "copying" : "resident";
    case Residency::Dropped:
      return "dropped";
    case Residency::Swapped:
      return session.tiers.all()[page.tier].kind == Tier::Host ? "host" : "disk";
    case Residency::SwappingIn:
      return "copying";
    case Residency::Lost:
      return "lost";
  }
  return "lost";
}

}  // namespace

Packed::Packed(Session& by) : session(c10::intrusive_ptr<Session>::reclaim_copy(&by)) {}

Packed::~Packed() {
  if (session->saved.release(ticket)) {
    const py::gil_scoped_acquire gil;
    session->end_watch_if_over();
  }
}

void Packed::pack(const at::Tensor& t) { session->saved.pack(t, ticket); }

at::Tensor Packed::unpack() {
  at::Tensor t = session->saved.unpack_resident(ticket);
  if (!t.defined()) {
    // Ops will run; or somebody else brings it back right now, and needs the GIL for that.
    const WithoutGil no_gil;
    let_signals_in();
    t = session->saved.unpack(ticket);
  }
  return t;
}

void set_python_error() {
  const auto error = std::current_exception();
  if (!set_own_error(error)) {
    torch::translate_exception_to_python(error);
  }
  prefer_signals();
}

py::object ticket_of(c10::intrusive_ptr<Packed> packed) {
  auto* object = PyObject_New(PyTicket, g_ticket_type);
  if (object == nullptr) {
    throw py::error_already_set();
  }
  new (&object->packed) c10::intrusive_ptr<Packed>(std::move(packed));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(object));
}

Session* session_of_hooks(PyObject* pack, PyObject* unpack) {
  const bool ours = is_pack_hook(pack) && calls(unpack, py_unpack);
  return ours ? session_in(PyCFunction_GET_SELF(pack)) : nullptr;
}

py::object pack_hook(const c10::intrusive_ptr<Session>& session) {
  auto copy = session;
  auto capsule = py::reinterpret_steal<py::object>(
      PyCapsule_New(copy.release(), "delta_runtime.session", release_capsule));
  return py::reinterpret_steal<py::object>(PyCFunction_New(&g_pack_method, capsule.ptr()));
}

py::object unpack_hook() {
  static PyObject* const hook = PyCFunction_New(&g_unpack_method, nullptr);  // never freed
  return py::reinterpret_borrow<py::object>(hook);
}

void bind_ticket(py::module_& m) {
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(ticket_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"delta_runtime._C.Ticket", sizeof(PyTicket), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  g_ticket_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  set_is_pack_hook(&is_pack_hook);
  m.add_object("Ticket",
               py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(g_ticket_type)));
  m.def(
      "place_of",
      [](const py::object& ticket) {
        TORCH_CHECK(Py_TYPE(ticket.ptr()) == g_ticket_type, "place_of takes a ticket");
        return place_of(*reinterpret_cast<PyTicket*>(ticket.ptr())->packed);
      },
      "Where the value of a ticket lies now: kept, resident, copying, dropped, host, disk or lost. "
      "For stress runs, which want to know what they have tried.");
}

}  // namespace delta

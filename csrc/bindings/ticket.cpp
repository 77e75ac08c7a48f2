#include "bindings/ticket.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <new>

#include "bindings/errors.h"
#include "observe/observer.h"
#include "observe/pack_hooks.h"
#include "state/entered.h"
#include "util/signals.h"

namespace delta {
namespace {

PyTypeObject* g_ticket_type = nullptr;

struct PyTicket {
  PyObject_HEAD c10::intrusive_ptr<Session> session;  // that it was packed by
  Ticket ticket;
};

// An exception must not go through CPython's frames: it ends the process here.
void ticket_dealloc(PyObject* self) noexcept {
  auto* object = reinterpret_cast<PyTicket*>(self);
  if (object->session->saved.release(object->ticket)) {
    end_watch(*object->session);
  }
  object->ticket.~Ticket();
  object->session.~intrusive_ptr();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// Turns the C++ exception in flight into a Python one.
void set_python_error() {
  const auto error = std::current_exception();
  if (!set_own_error(error)) {
    torch::translate_exception_to_python(error);
  }
  prefer_signals();
}

// pack(tensor) -> ticket. `self` is the session that the hook was made for.
PyObject* py_pack(PyObject* self, PyObject* argument) {
  auto* object = PyObject_New(PyTicket, g_ticket_type);
  if (object == nullptr) {
    return nullptr;
  }
  auto* session = reinterpret_cast<Session*>(PyCapsule_GetPointer(self, "delta_runtime.session"));
  new (&object->session)
      c10::intrusive_ptr<Session>(c10::intrusive_ptr<Session>::reclaim_copy(session));
  new (&object->ticket) Ticket();
  try {
    session->saved.pack(THPVariable_Unpack(argument), object->ticket);
  } catch (...) {
    set_python_error();
    Py_DECREF(reinterpret_cast<PyObject*>(object));
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(object);
}

// unpack(ticket) -> tensor. Works on any thread, any number of times, also after the session was
// left.
PyObject* py_unpack(PyObject* /*self*/, PyObject* argument) {
  if (Py_TYPE(argument) != g_ticket_type) {
    PyErr_SetString(PyExc_TypeError, "delta_runtime: unpack takes a ticket that pack returned");
    return nullptr;
  }
  Ticket& ticket = reinterpret_cast<PyTicket*>(argument)->ticket;
  SavedTensors& saved = reinterpret_cast<PyTicket*>(argument)->session->saved;
  try {
    at::Tensor t = saved.unpack_resident(ticket);
    if (!t.defined()) {
      // Ops will run; or somebody else brings it back right now, and needs the GIL for that.
      py::gil_scoped_release no_gil;
      let_signals_in();
      t = saved.unpack(ticket);
    }
    return THPVariable_Wrap(std::move(t));
  } catch (...) {
    set_python_error();
    return nullptr;
  }
}

PyMethodDef g_pack_method = {"pack", py_pack, METH_O,
                             "Give autograd a ticket for a tensor that it saves."};
PyMethodDef g_unpack_method = {"unpack", py_unpack, METH_O,
                               "Give the saved tensor for a ticket back."};

bool is_pack_hook(PyObject* hook) {
  return hook != nullptr && PyCFunction_Check(hook) && PyCFunction_GET_FUNCTION(hook) == py_pack;
}

void release_capsule(PyObject* capsule) {
  auto* session =
      reinterpret_cast<Session*>(PyCapsule_GetPointer(capsule, "delta_runtime.session"));
  c10::intrusive_ptr<Session>::reclaim(session).reset();
}

py::object hook(const c10::intrusive_ptr<Session>& session, PyMethodDef* method) {
  auto copy = session;
  auto capsule = py::reinterpret_steal<py::object>(
      PyCapsule_New(copy.release(), "delta_runtime.session", release_capsule));
  return py::reinterpret_steal<py::object>(PyCFunction_New(method, capsule.ptr()));
}

// Where the value lies that a ticket stands for.
const char* place_of(const PyTicket& object) {
  const Ticket& ticket = object.ticket;
  if (ticket.state != Ticket::State::Managed) {
    return "kept";
  }
  Session& session = *object.session;
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

py::object pack_hook(const c10::intrusive_ptr<Session>& session) {
  return hook(session, &g_pack_method);
}

py::object unpack_hook(const c10::intrusive_ptr<Session>& session) {
  return hook(session, &g_unpack_method);
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
        return place_of(*reinterpret_cast<PyTicket*>(ticket.ptr()));
      },
      "Where the value of a ticket lies now: kept, resident, copying, dropped, host, disk or lost. "
      "For stress runs, which want to know what they have tried.");
}

}  // namespace delta

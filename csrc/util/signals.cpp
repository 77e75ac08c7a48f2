#include "util/signals.h"

#include <signal.h>
#include <torch/csrc/Exceptions.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <deque>
#include <optional>

#include "util/plain_frames.h"

namespace delta {
namespace {

constexpr int kSignals = NSIG;
constexpr std::chrono::milliseconds kLookEvery{50};

std::atomic<unsigned long> g_main_thread{0};

// Written by the handler, on whatever thread the signal comes to.
std::atomic<bool> g_holding{false};
std::atomic<bool> g_came[kSignals];
std::atomic<int64_t> g_held{0};  // signals that were held back, ever

// Of the main thread, under the GIL.
int g_depth = 0;
struct sigaction g_former[kSignals];
std::deque<int> g_taken;          // signals whose handler is ours now
std::deque<PyObject*> g_kept;     // what is to be raised
PyObject* g_getsignal = nullptr;  // as it is in C: that of the module "signal" runs bytecodes

bool is_main_thread() { return PyThread_get_thread_ident() == g_main_thread.load(); }

// Has Python run the handler of a signal, as soon as it may.
void hand(int signum) {
  if (g_came[signum].exchange(false)) {
    PyErr_SetInterruptEx(signum);
  }
}

extern "C" void hold(int signum) {
  const int error = errno;
  g_came[signum].store(true);
  if (g_holding.load()) {
    g_held.fetch_add(1);
  } else {  // the Shield has just ended
    hand(signum);
  }
  errno = error;
}

bool is_ours(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == hold;
}

bool has_python_handler(int signum) {
  PyObject* number = PyLong_FromLong(signum);
  PyObject* handler = number != nullptr ? PyObject_CallOneArg(g_getsignal, number) : nullptr;
  const bool has = handler != nullptr && PyCallable_Check(handler) != 0;
  Py_XDECREF(handler);
  Py_XDECREF(number);
  PyErr_Clear();  // not every number is a signal
  return has;
}

void take_handlers() {
  for (int signum = 1; signum < kSignals; ++signum) {
    if (!has_python_handler(signum)) {
      continue;
    }
    struct sigaction action;
    if (sigaction(signum, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0 ||
        action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN || is_ours(action)) {
      continue;  // somebody's in C
    }
    g_former[signum] = action;
    action.sa_handler = hold;
    if (sigaction(signum, &action, nullptr) == 0) {
      g_taken.push_back(signum);
    }
  }
}

void give_handlers_back() {
  for (const int signum : g_taken) {
    struct sigaction action;
    if (sigaction(signum, nullptr, &action) == 0 && is_ours(action)) {
      sigaction(signum, &g_former[signum], nullptr);
    }
  }
  g_taken.clear();
}

// After this, whoever is in `hold` on another thread hands the signal on itself.
void stop_holding() {
  g_holding.store(false);
  for (int signum = 1; signum < kSignals; ++signum) {
    hand(signum);
  }
}

int raise_kept(void* /*unused*/) {
  if (g_depth > 0 || g_kept.empty()) {
    return 0;  // it is asked for again when the Shield ends
  }
  PyObject* error = g_kept.front();
  g_kept.pop_front();
  if (!g_kept.empty()) {
    Py_AddPendingCall(raise_kept, nullptr);
  }
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_DECREF(error);
  return -1;
}

// The error that is set, as one object with its traceback. A new reference.
PyObject* take_error() {
  PyObject* type = nullptr;
  PyObject* error = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (error != nullptr && trace != nullptr) {
    PyException_SetTraceback(error, trace);
  }
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return error;
}

// Runs the handlers of signals that have come, and keeps what they raise.
void run_handlers() {
  while (PyErr_CheckSignals() != 0) {
    g_kept.push_back(take_error());
  }
}

// The GIL, with no error pending.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) { PyErr_Fetch(&type_, &error_, &trace_); }
  ~Gil() {
    PyErr_Restore(type_, error_, trace_);
    PyGILState_Release(state_);
  }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
  PyObject* type_ = nullptr;  // an error that was pending before
  PyObject* error_ = nullptr;
  PyObject* trace_ = nullptr;
};

}  // namespace

Shield::Shield() : held_(g_getsignal != nullptr && is_main_thread()) {
  if (!held_) {
    return;
  }
  if (g_depth++ > 0) {
    return;
  }
  Gil gil;
  // A SIGINT that came just before waits like one that comes now. Other signals cannot be taken
  // back: their handlers run here, before and not between our bytecodes.
  const bool interrupted = PyOS_InterruptOccurred() != 0;
  run_handlers();
  g_holding.store(true);
  take_handlers();
  if (interrupted) {
    g_came[SIGINT].store(true);
    g_held.fetch_add(1);
  }
  run_handlers();  // of what came while they were taken
}

Shield::~Shield() {
  if (!held_ || --g_depth > 0) {
    return;
  }
  give_handlers_back();
  stop_holding();
  if (!g_kept.empty()) {
    Py_AddPendingCall(raise_kept, nullptr);
  }
}

void raise_later() {
  PyObject* error = take_error();
  if (error == nullptr) {
    return;
  }
  if (!is_main_thread()) {  // nothing of the kind for other threads: the same type, without words
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(),
                              reinterpret_cast<PyObject*>(Py_TYPE(error)));
    Py_DECREF(error);
    return;
  }
  g_kept.push_back(error);
  if (g_depth == 0) {
    Py_AddPendingCall(raise_kept, nullptr);
  }
}

void let_signals_in() {
  static std::chrono::steady_clock::time_point last_look;  // of the main thread
  if (!is_main_thread() || g_depth > 0) {
    return;
  }
  const auto now = std::chrono::steady_clock::now();
  if (now - last_look < kLookEvery) {
    return;
  }
  last_look = now;
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals() != 0;
  std::optional<python_error> error;
  if (raised) {
    error.emplace();
    error->persist();
  }
  PyGILState_Release(state);
  if (raised) {
    throw std::move(*error);
  }
}

namespace {

int end_shield(void* shield) {
  delete static_cast<Shield*>(shield);
  return 0;
}

}  // namespace

void prefer_signals() {
  if (!is_main_thread() || g_depth > 0) {
    return;
  }
  PyObject* type = nullptr;
  PyObject* error = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);
  if (PyErr_CheckSignals() == 0) {
    PyErr_Restore(type, error, trace);
  } else {
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
  }
  auto* held = new Shield();
  if (Py_AddPendingCall(end_shield, held) != 0) {
    delete held;
  }
}

// ---------------------------------------------------------------- for Python

namespace {

struct Shielded {
  PyObject_HEAD PyObject* function;
};

PyObject* shielded_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject* function = nullptr;
  static const char* names[] = {"function", nullptr};
  if (PyArg_ParseTupleAndKeywords(args, kwargs, "O", const_cast<char**>(names), &function) == 0) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    Py_INCREF(function);
    reinterpret_cast<Shielded*>(self)->function = function;
  }
  return self;
}

void shielded_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<Shielded*>(self)->function);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* shielded_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  Shield shield;
  PlainFrames plain;
  return PyObject_Call(reinterpret_cast<Shielded*>(self)->function, args, kwargs);
}

PyObject* shielded_get(PyObject* self, PyObject* object, PyObject* /*type*/) {
  if (object == nullptr || object == Py_None) {
    Py_INCREF(self);
    return self;
  }
  return PyMethod_New(self, object);
}

// It passes for the function: its name, its words, its signature.
PyObject* shielded_getattro(PyObject* self, PyObject* name) {
  PyObject* function = reinterpret_cast<Shielded*>(self)->function;
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) {
    Py_INCREF(function);
    return function;
  }
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) {
    return PyObject_GenericGetAttr(self, name);
  }
  return PyObject_GetAttr(function, name);
}

PyObject* set_main_thread(PyObject* /*module*/, PyObject* ident) {
  const unsigned long value = PyLong_AsUnsignedLong(ident);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  g_main_thread.store(value);
  Py_RETURN_NONE;
}

PyObject* signals_held(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyLong_FromLongLong(g_held.load());
}

PyObject* asked_to_stop(PyObject* /*module*/, PyObject* /*unused*/) {
  return PyBool_FromLong(g_holding.load() && (g_came[SIGINT].load() || g_came[SIGTERM].load()));
}

PyMethodDef g_methods[] = {
    {"set_main_thread", set_main_thread, METH_O, "The thread on which Python handles signals."},
    {"signals_held", signals_held, METH_NOARGS, "Signals that were held back so far."},
    {"asked_to_stop", asked_to_stop, METH_NOARGS,
     "Whether a SIGINT or a SIGTERM is being held back now."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool bind_signals(PyObject* module) {
  bind_plain_frames();
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(shielded_new)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(shielded_dealloc)},
                                {Py_tp_call, reinterpret_cast<void*>(shielded_call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(shielded_get)},
                                {Py_tp_getattro, reinterpret_cast<void*>(shielded_getattro)},
                                {0, nullptr}};
  static PyType_Spec spec = {"delta_runtime._C.Shielded", sizeof(Shielded), 0, Py_TPFLAGS_DEFAULT,
                             slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(module, "Shielded", type) != 0 ||
      PyModule_AddFunctions(module, g_methods) != 0) {
    return false;
  }
  PyObject* signals = PyImport_ImportModule("_signal");
  if (signals == nullptr) {
    return false;
  }
  g_getsignal = PyObject_GetAttrString(signals, "getsignal");
  Py_DECREF(signals);
  return g_getsignal != nullptr;
}

}  // namespace delta

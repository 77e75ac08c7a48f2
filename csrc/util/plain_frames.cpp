#include "util/plain_frames.h"

namespace delta {
namespace {

PyObject* g_set_eval_frame = nullptr;  // takes a callback, returns the one before

}  // namespace

PlainFrames::PlainFrames() : before_(nullptr) {
  if (g_set_eval_frame == nullptr) {
    return;
  }
  before_ = PyObject_CallFunctionObjArgs(g_set_eval_frame, Py_None, nullptr);
  if (before_ == nullptr) {
    PyErr_Clear();
  } else if (before_ == Py_None) {
    Py_CLEAR(before_);
  }
}

PlainFrames::~PlainFrames() {
  if (before_ == nullptr) {
    return;
  }
  PyObject* type = nullptr;
  PyObject* error = nullptr;
  PyObject* trace = nullptr;
  PyErr_Fetch(&type, &error, &trace);  // that the code in between has raised
  Py_XDECREF(PyObject_CallFunctionObjArgs(g_set_eval_frame, before_, nullptr));
  PyErr_Restore(type, error, trace);
  Py_DECREF(before_);
}

void bind_plain_frames() {
  PyObject* module = PyImport_ImportModule("torch._C._dynamo.eval_frame");
  if (module != nullptr) {
    g_set_eval_frame = PyObject_GetAttrString(module, "set_eval_frame");
    Py_DECREF(module);
  }
  PyErr_Clear();
}

}  // namespace delta

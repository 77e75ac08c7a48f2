// Note: how the assignment is seen
//   `tensor.data = other` runs no op and moves no version. It is the setter of a property of
//   torch._C.TensorBase, whose table of functions is PyTorch's own; its entry is exchanged for one
//   that calls PyTorch's. Reading `tensor.data` is not touched, nor is any class in Python.
#include "observe/data_setter.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace delta {
namespace {

setter g_setter = nullptr;
size_t g_sweep_at = 64;

using Tensors = std::unordered_map<at::TensorImpl*, at::Tensor>;

// With the GIL. Never freed: tensors must not die with static objects.
Tensors& repointed() {
  static auto* tensors = new Tensors();
  return *tensors;
}

// All strong references together count as one weak one; tickets hold the others.
bool is_known_by_a_ticket(const at::Tensor& t) { return t.weak_use_count() > 1; }

int set_data(PyObject* self, PyObject* value, void* closure) {
  const int result = g_setter(self, value, closure);
  if (result != 0 || !THPVariable_Check(self)) {
    return result;
  }
  const at::Tensor& t = THPVariable_Unpack(self);
  if (!t.defined() || !is_known_by_a_ticket(t)) {
    return result;
  }
  auto& held = repointed();
  if (held.size() >= g_sweep_at) {
    release_repointed();
    g_sweep_at = std::max<size_t>(64, 2 * held.size());
  }
  held.emplace(t.unsafeGetTensorImpl(), t);
  return result;
}

}  // namespace

void watch_data_setter() {
  if (g_setter != nullptr) {
    return;
  }
  PyObject* descriptor = PyObject_GetAttrString(THPVariableClass, "data");
  if (descriptor == nullptr) {
    PyErr_Clear();
    return;
  }
  if (Py_IS_TYPE(descriptor, &PyGetSetDescr_Type)) {
    PyGetSetDef* entry = reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset;
    if (entry->set != nullptr) {
      g_setter = entry->set;
      entry->set = set_data;
    }
  }
  Py_DECREF(descriptor);
}

void release_repointed() {
  auto& held = repointed();
  std::vector<at::Tensor> gone;  // they die behind the loop: Python code may run then
  for (auto it = held.begin(); it != held.end();) {
    if (is_known_by_a_ticket(it->second)) {
      ++it;
    } else {
      gone.push_back(std::move(it->second));
      it = held.erase(it);
    }
  }
}

}  // namespace delta

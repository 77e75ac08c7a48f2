#include "bindings/errors.h"

#include <torch/csrc/Exceptions.h>

#include "util/errors.h"

namespace delta {
namespace {

PyObject* g_inplace_error = nullptr;
PyObject* g_mismatch_error = nullptr;
PyObject* g_swap_error = nullptr;

PyObject* or_runtime_error(PyObject* type) { return type != nullptr ? type : PyExc_RuntimeError; }

}  // namespace

bool set_own_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const InplaceModificationError& e) {
    PyErr_SetString(or_runtime_error(g_inplace_error), e.what());
  } catch (const RecomputeMismatchError& e) {
    PyErr_SetString(or_runtime_error(g_mismatch_error), e.what());
  } catch (const SwapFailedError& e) {
    PyErr_SetString(or_runtime_error(g_swap_error), e.what());
  } catch (torch::PyTorchError& e) {
    if (dynamic_cast<BudgetPassed*>(&e) == nullptr) {
      return false;
    }
    PyErr_SetString(e.python_type(), e.what());
  } catch (...) {
    return false;
  }
  return true;
}

void bind_errors(py::module_& m) {
  py::register_exception_translator([](std::exception_ptr error) {
    if (!set_own_error(error)) {
      std::rethrow_exception(error);  // another translator's
    }
  });
  m.def(
      "set_budget_error", [](py::object type) { set_budget_error(type.release().ptr()); },
      "The exception of an allocation that would pass the budget, strictly; it takes a message.");
  m.def("set_error_types", [](py::object inplace, py::object mismatch, py::object swap) {
    g_inplace_error = inplace.release().ptr();
    g_mismatch_error = mismatch.release().ptr();
    g_swap_error = swap.release().ptr();
  });
}

}  // namespace delta

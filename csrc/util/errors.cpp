#include "util/errors.h"

#include <torch/csrc/Exceptions.h>

namespace delta {
namespace {

PyObject* g_budget_error = nullptr;

struct BudgetPassedError : torch::PyTorchError, BudgetPassed {
  using torch::PyTorchError::PyTorchError;
  PyObject* python_type() override {
    return g_budget_error != nullptr ? g_budget_error : PyExc_RuntimeError;
  }
};

}  // namespace

void set_budget_error(PyObject* type) { g_budget_error = type; }

void throw_budget_passed(const std::string& message) { throw BudgetPassedError(message); }

}  // namespace delta

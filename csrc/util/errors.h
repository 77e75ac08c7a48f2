// Errors that bindings/errors.cpp turns into the Python classes of delta_runtime.core.errors.
#pragma once

#include <c10/util/python_stub.h>

#include <stdexcept>
#include <string>

namespace delta {

// A tensor was changed in place although a saved tensor, or the recipe of one, still needs it.
struct InplaceModificationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A rebuilt value differs from the one that was dropped.
struct RecomputeMismatchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A saved tensor's copy cannot be read, and it cannot be recomputed.
struct SwapFailedError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Strict: an allocation would pass the budget. What is thrown becomes an exception that is a
// BudgetInfeasible and a torch.OutOfMemoryError; it is no c10::Error, for torch turns those into
// types of its own.
struct BudgetPassed {
  virtual ~BudgetPassed() = default;
};
void set_budget_error(PyObject* type);  // Python's, which takes a message; held from then on
[[noreturn]] void throw_budget_passed(const std::string& message);

}  // namespace delta

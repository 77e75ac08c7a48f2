// Errors that replay raises; bindings.cpp turns them into the Python classes of
// delta_runtime.core.errors.
#pragma once

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

}  // namespace delta

// What replay shares: its errors, which bindings.cpp turns into the Python classes of
// delta_runtime.core.errors, and how storages are made.
#pragma once

#include <c10/core/Storage.h>

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

// Memory of the device that nothing has written to, or zeros.
c10::Storage fresh_storage(int64_t bytes, c10::Device device, bool zeros);

}  // namespace delta

// Assignments to `tensor.data` of what autograd saved.
#pragma once

#include <ATen/core/Tensor.h>

namespace delta {

// From here on a tensor that some ticket knows lives at least as long as the tickets do, once it is
// pointed to other memory by `tensor.data = other`: without hooks autograd itself would hold it,
// and find it as it is then. Idempotent; the GIL is held.
void watch_data_setter();

// Lets go of those that no ticket knows any more. The GIL is held, and no lock of a session.
void release_repointed();

}  // namespace delta

// The bytes of a storage, as ops take them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace delta {

// All bytes of a storage as a uint8 tensor.
at::Tensor bytes_of(const c10::Storage& storage);

}  // namespace delta

#include "util/bytes_of.h"

#include <c10/core/DispatchKeySet.h>

namespace delta {

at::Tensor bytes_of(const c10::Storage& storage) {
  auto key = c10::computeDispatchKey(at::kByte, c10::kStrided, storage.device());
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                   caffe2::TypeMeta::Make<uint8_t>());
  impl->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return at::Tensor(std::move(impl));
}

}  // namespace delta

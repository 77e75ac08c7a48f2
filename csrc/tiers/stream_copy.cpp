#include "tiers/stream_copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "util/bytes_of.h"

namespace delta {

void queue_copy(const c10::Stream& stream, void* there, void* here, int64_t bytes, bool out) {
  const c10::StreamGuard on(stream);
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::autocast_dispatch_keyset | c10::python_ks);
  const at::RecordFunctionGuard unobserved(false);
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto lent = [bytes](void* memory, c10::Device device) {
    return bytes_of(c10::Storage(c10::Storage::use_byte_size_t(), bytes,
                                 c10::DataPtr(memory, device), /*allocator=*/nullptr,
                                 /*resizable=*/false));
  };
  at::Tensor on_device = lent(there, stream.device());
  at::Tensor on_host = lent(here, c10::kCPU);
  (out ? on_host : on_device).copy_(out ? on_device : on_host, /*non_blocking=*/true);
}

}  // namespace delta

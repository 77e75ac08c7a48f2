#include "tiers/stream_copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "util/bytes_of.h"

namespace delta {

void queue_copy(const c10::Stream& stream, const c10::Storage& storage, int64_t at, int64_t bytes,
                void* memory, bool out) {
  const c10::StreamGuard on(stream);
  const c10::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_modes(c10::autocast_dispatch_keyset | c10::python_ks);
  const at::RecordFunctionGuard unobserved(false);
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor there = bytes_of(storage).narrow(0, at, bytes);
  at::Tensor here = at::from_blob(memory, {bytes}, at::kByte);
  (out ? here : there).copy_(out ? there : here, /*non_blocking=*/true);
}

}  // namespace delta

#include "rebuild/quiet.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>

#include "state/session.h"

namespace delta {

Quiet::Quiet() : was_replaying_(thread_state().replaying) { thread_state().replaying = true; }
Quiet::~Quiet() { thread_state().replaying = was_replaying_; }

c10::Storage fresh_storage(int64_t bytes, c10::Device device, bool zeros) {
  Quiet quiet;
  at::AutoDispatchBelowADInplaceOrView below;
  if (zeros) {
    return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device)).storage();
  }
  // No at::empty: under deterministic algorithms it fills what it makes, by an op on this thread.
  const c10::OptionalDeviceGuard guard(device);
  auto* allocator = c10::GetAllocator(device.type());
  return c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), bytes,
                                allocator->allocate(static_cast<size_t>(bytes)), allocator,
                                /*resizable=*/true, device);
}

}  // namespace delta

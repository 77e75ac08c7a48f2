// How ops are run that nobody is to see, and how storages are made for them.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace delta {

// What a backward that is called under torch.func or with batched gradients has on its thread: what
// is made again there was made outside of it.
constexpr c10::DispatchKeySet kTransforms{c10::DispatchKey::VmapMode,
                                          c10::DispatchKey::FuncTorchVmapMode,
                                          c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                          c10::DispatchKey::FuncTorchDynamicLayerBackMode};

// No autograd, autocast, Python dispatch, transforms, observer or profiler below this.
class Quiet {
 public:
  Quiet();
  ~Quiet();
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  bool was_replaying_;
  at::NoGradGuard no_grad_;
  c10::impl::ExcludeDispatchKeyGuard no_autocast_{c10::autocast_dispatch_keyset | c10::python_ks |
                                                  kTransforms};
  at::RecordFunctionGuard no_callbacks_{/*is_enabled=*/false};
};

// What a thread has whose ops are run again when they run out of memory (see op_rescue.h).
constexpr auto kRescuesOps = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Below this they fail at once, and so do allocations: making room for them would wait for what
// runs them.
class WithoutRescue {
  c10::impl::ExcludeDispatchKeyGuard none_{c10::DispatchKeySet(kRescuesOps)};
};
inline bool without_rescue() { return c10::impl::tls_is_dispatch_key_excluded(kRescuesOps); }

// Memory of the device that nothing has written to, or zeros.
c10::Storage fresh_storage(int64_t bytes, c10::Device device, bool zeros);

}  // namespace delta

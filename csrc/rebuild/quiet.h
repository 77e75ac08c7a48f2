// How ops are run that nobody is to see, and how storages are made for them.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "util/per_thread.h"

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

// How many of the two guards below a thread has.
struct RescueGuards {
  int without_rescue = 0;
  int fails_at_limit = 0;
};
inline RescueGuards& rescue_guards() { return per_thread<RescueGuards>(); }

// Below this ops fail at once, and allocations pass an accelerator's limit: making room for them
// would wait for what runs them. (A flag, and not the key alone: PyTorch excludes the key too, for
// what a __torch_dispatch__ calls.)
class WithoutRescue {
 public:
  WithoutRescue() { ++rescue_guards().without_rescue; }
  ~WithoutRescue() { --rescue_guards().without_rescue; }
  WithoutRescue(const WithoutRescue&) = delete;
  WithoutRescue& operator=(const WithoutRescue&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard none_{c10::DispatchKeySet(kRescuesOps)};
};

// Below this allocations fail at an accelerator's limit: nobody waits for them.
class FailsAtLimit {
 public:
  FailsAtLimit() { ++rescue_guards().fails_at_limit; }
  ~FailsAtLimit() { --rescue_guards().fails_at_limit; }
  FailsAtLimit(const FailsAtLimit&) = delete;
  FailsAtLimit& operator=(const FailsAtLimit&) = delete;
};

// Memory of the device that nothing has written to, or zeros.
c10::Storage fresh_storage(int64_t bytes, c10::Device device, bool zeros);

}  // namespace delta

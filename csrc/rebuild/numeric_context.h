// What is set outside of an op and changes its numbers: flags of PyTorch, the processor's handling
// of denormal numbers, the thread count, the default dtype.
//
// Note: thread counts
//  1. `at::get_num_threads()` sets the count of a thread that has not asked for it before, and
//  oneDNN
//     reads the count without asking. Whoever calls it on a fresh thread changes what comes after.
//     So the count is read from OpenMP itself, which changes nothing.
//  2. An op is run again on the thread that it first ran on, or on a thread of our own (see
//     replay_thread.h): never does another thread of the program run its first op here.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace delta {

// What an op can depend on beside the flags, whose reading costs next to nothing.
enum Needs : uint8_t {
  kNeedsPrecisions = 1,    // it may multiply matrices, convolve or run a recurrent layer
  kNeedsDefaultDtype = 2,  // none of its inputs says which floating dtype the result has
  kNeedsAll = 3,
};

struct NumericContext {
  uint8_t needs = kNeedsAll;   // what of the following was read, is compared and put back
  uint32_t flags = 0;          // a bit for each flag of the table in numeric_context.cpp
  uint32_t precisions = 0;     // how float32 is computed: four bits for each place it is set for
  uint32_t float_control = 0;  // the processor's register that flushes denormals to zero, or not
  int32_t threads = 0;         // of OpenMP, for the thread that asks; 0: there is no OpenMP
  at::ScalarType default_dtype = at::kFloat;

  static NumericContext now(c10::DeviceType device, uint8_t needs = kNeedsAll);
  static NumericContext without_threads(c10::DeviceType device, uint8_t needs);

  // The same with fewer needs.
  NumericContext only(uint8_t fewer) const {
    NumericContext n = *this;
    n.needs = fewer;
    if ((fewer & kNeedsPrecisions) == 0) {
      n.precisions = NumericContext().precisions;
    }
    if ((fewer & kNeedsDefaultDtype) == 0) {
      n.default_dtype = NumericContext().default_dtype;
    }
    return n;
  }

  // Of two that were read for the same needs.
  bool operator==(const NumericContext& other) const {
    return flags == other.flags && precisions == other.precisions &&
           float_control == other.float_control && threads == other.threads &&
           default_dtype == other.default_dtype;
  }
};

int32_t omp_threads();  // of the calling thread

// Sets what differs from now, and puts it back.
class NumericContextGuard {
 public:
  NumericContextGuard(const NumericContext& wanted, c10::DeviceType device);
  ~NumericContextGuard();
  NumericContextGuard(const NumericContextGuard&) = delete;
  NumericContextGuard& operator=(const NumericContextGuard&) = delete;

 private:
  NumericContext wanted_;
  NumericContext before_;
  c10::DeviceType device_;
};

}  // namespace delta

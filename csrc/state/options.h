// What a session is told when it is made.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "tiers/host_memory.h"

namespace delta {

enum class Stress : int32_t { None = 0, DropAll = 1, Random = 2, SwapAll = 3, RandomMix = 4 };
enum class Verify : int32_t { Off = 0, First = 1, Always = 2 };

struct SessionOptions {
  c10::Device device{c10::kCPU};
  int64_t budget_bytes = 0;  // 0: none
  int64_t min_bytes = 4096;
  Verify verify = Verify::First;
  Stress stress = Stress::None;
  uint64_t seed = 0;
  bool drop = true;             // pages may be dropped
  bool swap = false;            // pages may be swapped
  int64_t host_bytes = 0;       // most host memory to swap to; 0: no such tier
  double link_bytes_per_s = 0;  // throttle of each direction below a CPU device; 0: none
  double crossings_out = 1;     // how often each byte crosses an accelerator's link to host memory,
  double crossings_in = 1;      // which makes it so many times slower
  int spill_file = -1;          // descriptor of the file to swap to, behind host memory; -1: none.
                                // It stays the caller's: the session makes one of its own
  int64_t spill_bytes = 0;      // most of it
  bool spill_direct = false;    // it is opened with O_DIRECT
  int64_t reserved_bytes = 0;   // most that an accelerator is to reserve, if its allocator can
                                // keep to a limit; 0: no limit, and no rescue inside allocations
  HostMemory::Pinning pinning;  // of host memory, below an accelerator

  bool evicts() const { return drop || swap; }
};

}  // namespace delta

// The CPU allocator of this process, with a capacity, a soft limit, an exact peak and a watermark
// per op.
//
// It stands in for a device that runs out of memory for real. It counts what was allocated after
// install(); a block that was allocated before is freed by its own deleter and never seen here.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

#include "util/rounding.h"

namespace delta {
namespace cpu_pool {

// Called inside an allocation that would pass the soft limit, with no lock of the pool held: frees
// device memory if it can and returns how many bytes it freed. Must not take the GIL and must not
// throw.
using RescueFn = int64_t (*)(int64_t bytes);

struct Limits {
  int64_t soft_limit_bytes = 0;  // 0: none. Above it the rescue is asked for room.
  int64_t capacity_bytes = 0;    // 0: none. Above it the allocation raises OutOfMemoryError.
};

void install();  // idempotent
bool installed();

void set_capacity(int64_t bytes);    // 0 lifts it
void set_soft_limit(int64_t bytes);  // 0 lifts it
Limits limits();
void set_rescue(RescueFn fn);  // nullptr: none
void set_rescue_enabled(bool enabled);
void set_soft_limit_is_hard(bool hard);  // above the soft limit: OutOfMemoryError too
bool owns(const c10::DataPtr& data);
// Whether the memory is neither the pool's nor that of the allocator it took the place of: an
// array's of numpy, a file's, another process's.
bool is_foreign(const c10::DataPtr& data);

int64_t live_bytes();
int64_t idle_bytes();      // of them, free
int64_t resident_bytes();  // of large blocks: what the system gave for them, in use and free
int64_t peak_bytes();
void reset_peak();
int64_t allocation_count();
int64_t full_count();  // allocations that did not fit below the capacity before room was made

// A second peak, of the runtime's current step, so that a user's reset_peak() and ours do not
// disturb each other.
void reset_step_peak();
int64_t step_peak_bytes();

// The nested watermark: most bytes since open_window() that were live, or would have been without
// the rescues and the capacity. One window at a time, of the observing thread.
void open_window();
int64_t window_peak_bytes();
int64_t window_refused_bytes();  // what the last one that was refused would have made live

int64_t rescue_count();
int64_t rescued_bytes();
int64_t
take_refused_bytes();  // what the last refused allocation would have made live; 0 after it was read
// What was live where the soft limit had to be passed, since the last reset; 0: it never was. It is
// not asked for room below that again, unless the limit is hard.
int64_t passed_bytes();
void reset_passed();
int64_t over_limit_peak_bytes();  // how far live bytes went above the soft limit at the worst
void reset_counters();

}  // namespace cpu_pool
}  // namespace delta

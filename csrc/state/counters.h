// What a session has counted, and what is so at this moment. Python sees both under these names.
#pragma once

#include <cstdint>

namespace delta {

// Why a saved tensor is not managed.
enum class KeptReason : int32_t {
  Managed = 0,
  Source,   // no recorded op of this step made it: parameters, inputs, buffers
  Small,    // below min_bytes
  Device,   // on another device
  Layout,   // sparse, quantized, subclass ...: cannot be made again exactly
  Opaque,   // made inside a compiled region or by an op that must not run twice
  Unknown,  // never seen by the recorder
  Count,
};

struct Counters {
  int64_t ops = 0;
  int64_t packs = 0;
  int64_t unpacks = 0;
  int64_t managed_unpacks = 0;
  int64_t packed_bytes = 0;  // of managed pages
  int64_t drops = 0;
  int64_t dropped_bytes = 0;
  int64_t rebuilds = 0;  // pages brought back
  int64_t rebuilt_bytes = 0;
  int64_t replayed_ops = 0;
  int64_t shortcuts = 0;          // of these: by a shortcut
  int64_t shortcut_failures = 0;  // shortcuts that made other bits when they were tried
  double rebuild_s = 0;
  int64_t swap_outs = 0;  // pages whose device copy went
  int64_t swapped_out_bytes = 0;
  int64_t clean_evictions = 0;  // of these, at once: the copy was there already
  int64_t swap_ins = 0;
  int64_t swapped_in_bytes = 0;
  int64_t written_back_bytes = 0;  // copied to a tier below, used or not
  int64_t prefetches = 0;
  int64_t prefetch_hits = 0;    // there when asked for
  int64_t prefetch_late = 0;    // on the way when asked for
  int64_t prefetch_misses = 0;  // not asked for yet
  int64_t prefetch_vain = 0;    // evicted again before they were used
  int64_t swap_refusals = 0;    // pages that no tier had room for
  int64_t failed_writes = 0;    // copies to the disk that failed
  int64_t failed_reads = 0;     // copies from the disk that failed
  int64_t lost_pages = 0;       // of these, without a recipe either
  int write_error = 0;          // errno of the first failed write
  int read_error = 0;           // and of the first failed read
  double out_stall_s = 0;
  double in_stall_s = 0;
  int64_t boundary_evictions = 0;
  int64_t rescues = 0;
  int64_t rescued_bytes = 0;
  int64_t over_limit = 0;  // allocations for which more than the budget was reserved
  int64_t shortfalls = 0;
  int64_t shortfall_bytes = 0;  // the worst
  int64_t comparisons = 0;      // of what came back with what went
  int64_t mismatches = 0;       // that came out different
  int64_t unhashed = 0;         // to be compared, but there was no room for a hash on the device
  int64_t audits = 0;
  int64_t audit_failures = 0;
  int64_t clones_on_write = 0;
  int64_t pumps = 0;
  int64_t plan_hits = 0;
  int64_t plan_misses = 0;
  int64_t plan_actions = 0;  // of a plan as written: what left, was copied back or rebuilt early
  int64_t plan_overdue = 0;  // what was to leave, and was there when it was wanted again
  int64_t kept_bytes[static_cast<int>(KeptReason::Count)] = {};
  int64_t exposed_bytes = 0;  // the most that was asked for and could not be freed, in one request
  int64_t begin_bytes = 0;    // live at the first op of this step
  int64_t stuck_bytes = 0;    // the most of this step that nothing could be evicted from
  const char* stuck_op = "";
};

// Not counted: how much there is now.
struct Levels {
  int64_t live_tickets = 0;
  int64_t pages = 0;
  int64_t managed_pages = 0;
  int64_t managed_resident_bytes = 0;
  int64_t dropped_now_bytes = 0;
  int64_t swapped_now_bytes = 0;  // whose only copy is in a tier below
  int64_t swapping_in_bytes = 0;
  int64_t uncounted_bytes = 0;
  int64_t step_peak_bytes = 0;
};

}  // namespace delta

// The rows that Python reads as numpy dtypes: core/events.py, record/step_log.py, report/trace.py.
#pragma once

#include <cstdint>

namespace delta {

enum class EventKind : int32_t {
  Packed = 0,
  Used = 1,
  Dropped = 2,
  Rebuilt = 3,
  Released = 4,
  Edge = 5,
  Inadmissible = 6,
  SwappedOut = 7,
  SwappedIn = 8,
  Step = 9,
  Rescue = 10,
  Shortfall = 11,
  Replayed = 12,
  Alone = 13,
};

struct Event {
  int32_t kind;
  int32_t reason;
  int64_t page;
  int64_t tick;
  int64_t bytes;
  int64_t key;
  double seconds;
};
static_assert(sizeof(Event) == 48, "the Python side reads events as 48-byte rows");

// One op of the step graph that is being logged.
struct LoggedOp {
  uint64_t fingerprint;  // of the forward up to and with this op; 0 in backward
  uint64_t name_hash;
  int64_t tick;
  int64_t live_bytes;  // at its begin, after evictions
  int64_t away_bytes;  // managed bytes that were dropped or swapped out then
  int64_t watermark_bytes;
  int64_t input_bytes;  // of its managed inputs
  double seconds;
  double flops;
  int64_t moved_bytes;
  int32_t dtype;  // as c10::ScalarType counts them; -1: it has no tensors
  int32_t phase;
  int32_t first_input;
  int32_t n_inputs;
  int32_t first_output;
  int32_t n_outputs;
};
static_assert(sizeof(LoggedOp) == 104, "the Python side reads logged ops as 104-byte rows");

struct LoggedValue {
  int64_t key;
  int64_t bytes;
  int64_t repeats;  // 0: a workspace, say; it cannot be made again
};
static_assert(sizeof(LoggedValue) == 24, "the Python side reads logged values as 24-byte rows");

enum class TraceKind : int64_t { Op = 0, Rebuild = 1, CopyOut = 2, CopyIn = 3 };

// What took time, for the trace.
struct TraceRow {
  int64_t kind;
  int64_t name;           // of an op: hash of its name; else key of the value
  int64_t bytes;          // of a copy; of an op: live at its end
  int64_t dropped_bytes;  // at the end of an op
  int64_t swapped_bytes;  // of pages whose only copy is in a tier below, then
  double begin_s;         // by the steady clock
  double end_s;
};
static_assert(sizeof(TraceRow) == 56, "the Python side reads the trace as 56-byte rows");

// The highest live bytes during an op, or during a few from it on.
struct ProfilePoint {
  int64_t op;  // counted from the step's first one
  int64_t peak_bytes;
};
static_assert(sizeof(ProfilePoint) == 16, "the Python side reads the profile as 16-byte rows");

}  // namespace delta

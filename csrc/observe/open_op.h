// The op that runs now on a thread, and what else is known of the thread.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <chrono>
#include <vector>

#include "observe/random_draws.h"
#include "observe/ticket.h"
#include "state/values.h"
#include "util/per_thread.h"

namespace delta {

// The atomic op that runs now on this thread.
struct OpenOp {
  struct Written {
    Page* page;
    c10::VariableVersion counter;
    bool has_counter;
    bool requires_grad;
    int16_t argument;
    int32_t index;
  };
  OpInfo* info = nullptr;
  c10::intrusive_ptr<OpRecord> record;                   // null while only observing
  c10::SmallVector<c10::intrusive_ptr<Page>, 6> inputs;  // parallel to record->inputs
  c10::SmallVector<Written, 2> written;
  std::vector<Ticket*> pending;
  int64_t live_bytes = 0;
  int64_t peak_bytes = 0;           // of an accelerator's allocator, ever
  int64_t managed_bytes = 0;        // of all pages that are resident at its begin
  int64_t managed_input_bytes = 0;  // of those that it reads; 0 while nothing is logged
  int64_t log_index = -1;
  c10::SmallVector<const c10::StorageImpl*, 8> logged_inputs;  // of the row
  int32_t depth = 0;                                           // of what it makes
  StrangerDraws::Mark strangers;
  size_t facts = 0;         // index into what OpObserver knows of ops
  uint64_t op = 0;          // hash of its name and of the phase
  uint64_t place = 0;       // and of all ops before it
  int64_t input_bytes = 0;  // of all tensors that it reads
  bool timed = false;       // its seconds count
  bool traced = false;      // they are shown
  std::chrono::steady_clock::time_point begin;
  int exceptions = 0;  // in flight at its begin, of one that returns nothing
  bool active = false;
  bool region = false;

  bool reads(const Page& page);  // or writes: whether the page is among its inputs
  void clear();

 private:
  ska::flat_hash_set<const Page*> input_set_;  // of long lists, filled when it is asked for
};

class IdleStep;
struct Session;

struct ThreadState {
  Session* session = nullptr;  // entered on this thread
  IdleStep* idle = nullptr;    // that goes on here
  // A session that is entered on another one; held while an op runs here.
  c10::intrusive_ptr<c10::intrusive_ptr_target> visited;
  int depth = 0;
  bool replaying = false;
  OpenOp open;
};
inline ThreadState& thread_state() { return per_thread<ThreadState>(); }

}  // namespace delta

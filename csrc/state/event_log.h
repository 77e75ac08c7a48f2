// What a session tells Python: events, which the ledger takes, and rows of the trace.
#pragma once

#include <utility>
#include <vector>

#include "state/progress.h"
#include "util/rows.h"

namespace delta {

constexpr size_t kFewEvents = 1 << 12;

// Leaves out, of the events since the last drain, those of pages that were packed and released
// among them, and those of no page. Whoever ranks what is there sees nothing of them, unless the
// filter learns from the past; a record of the step needs them. Returns whether the rest can wait
// for the next drain. It cannot where it is much, nor where a request for room was not met: nothing
// is left out then.
bool leave_out_gone(std::vector<Event>& events);

class EventLog {
 public:
  explicit EventLog(const Progress& now) : now_(now) {}

  // Under the session's lock, as all that follows.
  void emit(EventKind kind, const Page* page, int64_t bytes, double seconds, int64_t key = -1,
            int reason = 0) {
    events_.push_back({static_cast<int32_t>(kind), reason, page != nullptr ? page->id : -1,
                       now_.tick, bytes, key, seconds});
  }
  bool is_full() const { return events_.size() >= kMostEvents; }  // somebody should drain it
  std::vector<Event> drain() { return std::exchange(events_, {}); }
  // In front of what came since they were drained.
  void put_back(std::vector<Event> events) {
    events.insert(events.end(), events_.begin(), events_.end());
    events_ = std::move(events);
  }

  bool tracing() const { return tracing_; }
  void set_tracing(bool on) { tracing_ = on; }
  void trace(const TraceRow& row) {
    if (trace_.size() < kMostTraceRows) {
      trace_.push_back(row);
    }
  }
  std::vector<TraceRow> drain_trace() { return std::exchange(trace_, {}); }

 private:
  static constexpr size_t kMostEvents = 1 << 16;
  static constexpr size_t kMostTraceRows = 1 << 20;  // of one step

  const Progress& now_;
  std::vector<Event> events_;
  bool tracing_ = false;
  std::vector<TraceRow> trace_;
};

}  // namespace delta

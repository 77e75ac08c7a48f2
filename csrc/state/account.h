// The bytes that the budget is about: what the device holds, and what may be held.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <vector>

#include "state/options.h"
#include "state/progress.h"

namespace delta {

// What an accelerator's allocator counts.
struct DeviceBytes {
  int64_t live = 0;
  int64_t peak = 0;      // ever, or since somebody reset it
  int64_t reserved = 0;  // taken from the device
  int64_t retries = 0;   // times that it gave back what it kept for later, to find room
};
DeviceBytes device_bytes(c10::Device device);
void await_device(c10::Device device);  // so that the clock shows what an accelerator took
void await_all_streams(c10::Device device);

class Account {
 public:
  Account(SessionOptions& options, const Progress& now, const std::atomic<bool>& entered)
      : options_(options), now_(now), entered_(entered) {}

  int64_t live_bytes() const;
  int64_t limit_bytes() const;      // what is kept to: the budget, or what had to be passed already
  int64_t step_peak_bytes() const;  // the most that was live in this step
  // Of sources that the pool does not own: older, or foreign memory.
  int64_t uncounted_bytes() const { return uncounted_bytes_; }

  // For what comes back before anybody asks for it. Once the device has refused memory, no more is
  // to live by that in the rest of the step than lived then, or half of the budget: what came back
  // would fill a device that its allocator has cut up, and the next op would find no room either.
  int64_t room_for_returns() const;
  bool withholds_room() const { return withheld_bytes() > 0; }
  void note_refused();

  void set_budget(int64_t bytes);
  void hold(int64_t bytes) { uncounted_bytes_ = bytes; }  // for the runtime itself, from the start
  void begin_step();
  void note_device_bytes(int64_t bytes) {
    boundary_peak_bytes_ = std::max(boundary_peak_bytes_, bytes);
  }

  // The budget is about all that the device holds; what the pool cannot see is charged to it here.
  void charge(Page& page, int64_t bytes);
  // Of a source that no op has used before, or that lies elsewhere now.
  void charge_first_read(Page& page, const c10::Storage& storage);
  // What was charged in this step and is gone again; the rest waits for a sweep. With many of them
  // not at every op.
  void uncharge_gone();

 private:
  int64_t withheld_bytes() const { return withheld_bytes_.load(std::memory_order_relaxed); }

  SessionOptions& options_;
  const Progress& now_;
  const std::atomic<bool>& entered_;
  int64_t uncounted_bytes_ = 0;
  int64_t uncounted_peak_bytes_ = 0;  // of the step, until something was no longer charged
  std::atomic<int64_t> withheld_bytes_{0};
  int64_t boundary_peak_bytes_ = 0;  // of an accelerator: the highest at a boundary of this step
  std::vector<c10::intrusive_ptr<Page>> charged_lately_;
  int64_t uncharge_tick_ = 0;  // when they are looked through next
};

}  // namespace delta

// Copy lanes of the CPU device: one worker thread for each tier and direction, in order, throttled
// on request. With a throttle they stand in for the copy engines of an accelerator.
//
// Note: a transfer's life
//  1. Whoever submits it keeps both ends of it alive until it has ended: `device` holds the
//  storage,
//     which is read or written at `memory`, and `block` the other end. The worker never lets go of
//     either: a storage may have a Python side, and whoever waits for the worker may hold the GIL.
//  2. The worker takes no lock but the lane's own, and never the GIL. Waiting for it is safe inside
//     an allocation, with the GIL held, and under no lock of the session.
//  3. A transfer that has not begun can be cancelled; one that runs is waited for.
//  4. A forked child has no workers: there, waiting does the copy itself. So does submitting where
//     the lane was stopped, or where the system gives no thread.
//  5. A copy to or from a disk may fail; `error` says why. What it would have written is undefined.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "store.h"

namespace delta {

class Lane;

struct Transfer : c10::intrusive_ptr_target {
  enum class State : uint8_t { Queued, Running, Done, Cancelled, Failed };

  bool out = false;        // from the device
  void* memory = nullptr;  // of the device
  int64_t bytes = 0;
  int64_t key = -1;   // of the value, for the trace
  int64_t page = -1;  // id
  c10::Storage device;
  std::shared_ptr<Block> block;
  Lane* lane = nullptr;  // that it was submitted to
  int error = 0;         // an errno, once it has failed
  std::atomic<State> state{State::Queued};
  double begin_s = 0;  // of its run, by the steady clock
  double end_s = 0;

  bool ended() const {
    const State now = state.load(std::memory_order_acquire);
    return now == State::Done || now == State::Cancelled || now == State::Failed;
  }
  bool failed() const { return state.load(std::memory_order_acquire) == State::Failed; }
  bool done() const { return state.load(std::memory_order_acquire) == State::Done; }
};
using TransferPtr = c10::intrusive_ptr<Transfer>;

struct LaneTotals {
  int64_t transfers = 0;
  int64_t bytes = 0;
  double busy_s = 0;
};

// One direction of the link of a virtual accelerator: whatever goes over it shares its time.
class Throttle {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Throttle(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}
  std::pair<Time, Time> claim(int64_t bytes, Time now);  // begin and end of its time on the link
  double seconds_for(int64_t bytes) const { return static_cast<double>(bytes) / bytes_per_s_; }

 private:
  const double bytes_per_s_;
  std::mutex mutex_;
  Time free_at_{};
};

class Lane {
 public:
  // By the throttle's clock, if there is one; `only_link`: there is nothing slower behind it.
  Lane(std::shared_ptr<Throttle> throttle, bool only_link)
      : throttle_(std::move(throttle)), only_link_(only_link), process_(getpid()) {}
  ~Lane() { stop(); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  void submit(const TransferPtr& transfer);  // starts the worker with the first one
  void wait(Transfer& transfer);
  bool cancel(Transfer& transfer);  // false: it has begun
  void stop();  // after what is queued, unthrottled; submitting later copies at once

  int64_t queued_bytes() const { return queued_bytes_.load(std::memory_order_relaxed); }
  bool idle() const { return queued_bytes() == 0; }
  double seconds_for(int64_t bytes) const;  // by the throttle, or as measured; 0: not known yet
  LaneTotals totals() const;

 private:
  void leave_behind_in_fork();
  static void copy(Transfer& transfer, Bounce& bounce);
  static void copy_now(Transfer& transfer);  // by whoever asks for it
  void work();
  void run(Transfer& transfer);

  const std::shared_ptr<Throttle> throttle_;
  const bool only_link_;
  Bounce bounce_;  // the worker's
  mutable std::mutex mutex_;
  std::condition_variable submitted_;
  std::condition_variable ended_;
  std::deque<TransferPtr> queue_;
  std::thread worker_;
  bool stopping_ = false;
  bool stopped_ = false;  // nobody takes anything out of the queue any more
  pid_t process_;         // that the worker belongs to
  std::atomic<int64_t> queued_bytes_{0};
  LaneTotals totals_;
};

inline double seconds_of(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration<double>(t.time_since_epoch()).count();
}

}  // namespace delta

// Copy lanes: one for each tier and direction, in order. On the CPU worker threads (thread_lane.h),
// on an accelerator side streams (stream_lane.h), and to its disk both (staged_lane.h); the same
// contract.
//
// Note: a transfer's life
//  1. Whoever submits it keeps both ends of it alive until it has ended: `device` holds the storage
//     that is read or written at `memory`, and `block` is the other end. Lanes never let go of
//     either: a storage may have a Python side, and whoever waits for a lane may hold the GIL.
//  2. A lane takes no lock but its own, and never the GIL. Waiting for it is safe while holding the
//     GIL, inside an allocation of the CPU pool, and under no lock of the session.
//  3. `wait` promises order: what the caller does next with either end comes after the copy. On a
//     stream the copy need not have ended by then, and the ends have to live on until it has.
//  4. A copy to or from a disk may fail; `error` says why. What it would have written is undefined.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "tiers/store.h"
#include "util/streams.h"

namespace delta {

class Lane;

// The error of a copy that the device failed to make. All others are the errno of a disk, which is
// smaller.
constexpr int kDeviceFailed = 1 << 16;

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

  // On streams only.
  c10::StreamId stream = kNoStream;                // that the device memory belongs to
  c10::intrusive_ptr<Transfer> follows;            // in: the copy out that it reads
  std::array<std::optional<c10::Event>, 2> ready;  // on a staged lane: what it has to come after
  std::optional<c10::Event> began;                 // on the lane's stream
  std::optional<c10::Event> after;                 // on the lane's stream
  std::atomic<c10::StreamId> ordered_before{
      kNoStream};  // what this stream does next comes after it

  bool ended() const {
    const State now = state.load(std::memory_order_acquire);
    return now == State::Done || now == State::Cancelled || now == State::Failed;
  }
  bool failed() const { return state.load(std::memory_order_acquire) == State::Failed; }
  bool done() const { return state.load(std::memory_order_acquire) == State::Done; }
  bool ordered() const { return ordered_before.load(std::memory_order_acquire) != kNoStream; }
};
using TransferPtr = c10::intrusive_ptr<Transfer>;

struct LaneTotals {
  int64_t transfers = 0;
  int64_t bytes = 0;
  double busy_s = 0;
};

class Lane {
 public:
  Lane() = default;
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  virtual void submit(const TransferPtr& transfer) = 0;
  virtual void wait(Transfer& transfer) = 0;  // see Note, rule 3
  virtual bool wait_a_while(Transfer& transfer) { return wait(transfer), true; }  // false: not yet
  virtual bool cancel(Transfer& transfer) = 0;                 // false: it has begun
  virtual void poll() noexcept {}                              // takes note of what has ended
  virtual void finish(Transfer& transfer) { wait(transfer); }  // until it has ended
  virtual void stop() = 0;                                     // after what is queued
  // Whether whoever waits stands still until the copy has ended; else the device's clock tells how
  // long a stream did.
  virtual bool host_waits() const { return true; }
  virtual c10::StreamId stream_id() const { return kNoStream; }
  virtual double seconds_for(int64_t bytes) const;  // as measured; 0: not known yet

  int64_t queued_bytes() const { return queued_bytes_.load(std::memory_order_relaxed); }
  bool idle() const { return queued_bytes() == 0; }
  LaneTotals totals() const;

 protected:
  void count(const Transfer& transfer);  // under the mutex; it has ended

  mutable std::mutex mutex_;
  std::atomic<int64_t> queued_bytes_{0};
  LaneTotals totals_;
};

inline double seconds_of(std::chrono::steady_clock::time_point t) {
  return std::chrono::duration<double>(t.time_since_epoch()).count();
}

}  // namespace delta

// An accelerator's allocator, as it keeps what it takes from one device inside of a limit.
//
// Note: the limit
//  1. It is about reserved bytes: what the allocator has taken, whether tensors live there or not.
//  2. An allocation that would pass it, or for which the device has no more, asks for room from
//     inside, and is tried again. No op is run again for it, so that it does not matter what the op
//     has done by then; and no library that allocates for itself, and does with less where it gets
//     nothing, ever sees that.
//  3. Where no room is to be had the limit is passed, if the device has the memory. Until the next
//     step what was reserved then is kept to: room below that costs time and saves nothing.
//  4. It includes nothing of the extension's but this file, so that allocators of other binaries
//     can be such ones.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace delta {

// What came of asking for room.
enum class Room {
  Made,
  NoneLeft,
  Refused,  // this thread may not wait for room: its allocation fails
};

class LimitedAllocator {
 public:
  // Makes room for an allocation of this thread, more with each attempt. Called with no lock held
  // and no exception in flight; must not take the GIL and must not throw.
  using MakeRoom = Room (*)(int64_t bytes, int attempt);

  virtual ~LimitedAllocator() = default;

  // The most bytes that are to be reserved; 0 lifts it.
  void keep_to(int64_t bytes, MakeRoom make_room) {
    make_room_.store(make_room, std::memory_order_relaxed);
    limit_bytes_.store(bytes, std::memory_order_release);
    passed_bytes_.store(0, std::memory_order_relaxed);
    set_cap();
  }

  // What had to be passed before counts no more. Whether what is kept for later is to be given back
  // now, because more is reserved than the limit: less and less often, the oftener the step behind
  // that passed it again. By one thread at a time.
  bool begin_step() {
    const bool passed = passed_.exchange(false);
    if (passed_bytes_.exchange(0, std::memory_order_relaxed) > 0) {
      set_cap();
    }
    if (gave_back_) {
      in_vain_ = passed ? std::min(in_vain_ + 1, 6) : 0;
      steps_to_rest_ = passed ? 1 << in_vain_ : 0;
      gave_back_ = false;
    }
    if (steps_to_rest_ > 0) {
      --steps_to_rest_;
      return false;
    }
    gave_back_ = limit_bytes() > 0 && reserved_bytes() > limit_bytes();
    return gave_back_;
  }

  int64_t limit_bytes() const { return limit_bytes_.load(std::memory_order_relaxed); }
  int64_t take_passes() { return passes_.exchange(0); }  // allocations that passed it since asked

 protected:
  // Calls `allocate`, which takes `bytes` or throws OutOfMemoryError, with room made for it.
  template <class Allocate>
  auto inside_limit(int64_t bytes, const Allocate& allocate) {
    for (int attempt = 0;; ++attempt) {
      try {
        return allocate();
      } catch (const c10::OutOfMemoryError&) {
        if (limit_bytes() == 0) {
          throw;
        }
      }
      const Room room = ask(bytes, attempt);
      if (room == Room::Refused) {
        return allocate();
      }
      if (room == Room::NoneLeft) {
        const Passing passing(*this);
        return allocate();
      }
    }
  }

 private:
  // Has the allocator throw OutOfMemoryError before more than these bytes are reserved, and after
  // it has given back what it keeps for later; 0 lifts that. Without effect on the sizes that the
  // device tells. Must not throw.
  virtual void cap_reserved_bytes(int64_t bytes) = 0;
  virtual int64_t reserved_bytes() = 0;
  // Whether this thread may wait for the device now.
  virtual bool may_wait() { return true; }

  // While it lives there is no cap.
  class Passing {
   public:
    explicit Passing(LimitedAllocator& allocator) : allocator_(allocator) {
      if (allocator_.passing_.fetch_add(1) == 0) {
        allocator_.set_cap();
      }
    }
    ~Passing() {
      const int64_t reserved = allocator_.reserved_bytes();
      if (reserved > allocator_.limit_bytes()) {
        allocator_.passes_.fetch_add(1, std::memory_order_relaxed);
        allocator_.passed_.store(true);
        int64_t seen = allocator_.passed_bytes_.load(std::memory_order_relaxed);
        while (reserved > seen && !allocator_.passed_bytes_.compare_exchange_weak(
                                      seen, reserved, std::memory_order_relaxed)) {
        }
      }
      allocator_.passing_.fetch_sub(1);
      allocator_.set_cap();
    }
    Passing(const Passing&) = delete;
    Passing& operator=(const Passing&) = delete;

   private:
    LimitedAllocator& allocator_;
  };

  Room ask(int64_t bytes, int attempt) {
    const MakeRoom make_room = make_room_.load(std::memory_order_relaxed);
    return make_room != nullptr && may_wait() ? make_room(bytes, attempt) : Room::NoneLeft;
  }

  void set_cap() {
    const std::lock_guard<std::mutex> guard(mutex_);
    const int64_t limit = limit_bytes();
    const bool capped = limit > 0 && passing_.load() == 0;
    cap_reserved_bytes(capped ? std::max(limit, passed_bytes_.load(std::memory_order_relaxed)) : 0);
  }

  std::mutex mutex_;  // of the cap: held while it is set, and for nothing else
  std::atomic<int64_t> limit_bytes_{0};
  std::atomic<int64_t> passed_bytes_{0};  // reserved where the limit was passed; 0: it was not
  std::atomic<int64_t> passes_{0};
  std::atomic<int> passing_{0};  // allocations that pass it right now
  std::atomic<MakeRoom> make_room_{nullptr};
  std::atomic<bool> passed_{false};  // in the step that goes on
  bool gave_back_ = false;           // before it
  int in_vain_ = 0;
  int steps_to_rest_ = 0;
};

// That of a device; null where its allocator is none. Whoever sets one keeps it for good.
LimitedAllocator* limited_allocator(c10::Device device);
void set_limited_allocator(c10::Device device, LimitedAllocator* allocator);

}  // namespace delta

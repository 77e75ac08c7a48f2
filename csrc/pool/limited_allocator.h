// An accelerator's allocator, as it keeps what it takes from one device inside of a limit.
//
// Note: the limit
//  1. It is about reserved bytes: what the allocator has taken, whether tensors live there or not.
//  2. An allocation that would pass it, or for which the device has no more, asks for room from
//     inside, and is tried again. No op is run again for it, so that it does not matter what the op
//     has done by then; and a library that allocates for itself, and does with less where it gets
//     nothing, does not see that.
//  3. Where no room is to be had the limit is passed, if the device has the memory. Until the next
//     step a little more than what was reserved then is kept to: room below that costs time and
//     saves nothing.
//  4. It includes nothing of the extension's but this file, so that allocators of other binaries
//     can be such ones.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace delta {

// The name of a capsule with a LimitedAllocator: other numbers have another layout.
constexpr const char* kLimitedAllocatorName = "delta_runtime.LimitedAllocator.1";

// What came of asking for room.
enum class Room {
  Made,
  NoneLeft,
  Refused,  // nobody waits for what this thread allocates: it fails
};

class LimitedAllocator {
 public:
  // Makes room for an allocation of this thread, more with each attempt. Called with no lock held
  // and no exception in flight; must not wait for the GIL and must not throw.
  using MakeRoom = Room (*)(int64_t bytes, int attempt);

  virtual ~LimitedAllocator() = default;

  // The most bytes that are to be reserved; 0 lifts it.
  void keep_to(int64_t bytes, MakeRoom make_room) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (limit_bytes() == 0) {
      excesses_ = 0;
    }
    make_room_ = make_room;
    limit_bytes_ = bytes;
    kept_to_bytes_ = bytes;
    apply_cap();
  }

  // What had to be passed before counts no more. Whether what is kept for later is to be given back
  // now, because more is reserved than the limit: less and less often, the oftener the step behind
  // that passed it again. By one thread at a time.
  bool begin_step() {
    const bool exceeded = exceeded_.exchange(false);
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      kept_to_bytes_ = limit_bytes();
      apply_cap();
    }
    if (gave_back_) {
      times_in_vain_ = exceeded ? std::min(times_in_vain_ + 1, 6) : 0;
      steps_until_next_ = exceeded ? 1 << times_in_vain_ : 0;
      gave_back_ = false;
    }
    if (steps_until_next_ > 0) {
      --steps_until_next_;
      return false;
    }
    gave_back_ = limit_bytes() > 0 && reserved_bytes() > limit_bytes();
    return gave_back_;
  }

  // A new session begins anew.
  void forget_past() {
    exceeded_ = gave_back_ = false;
    times_in_vain_ = steps_until_next_ = 0;
  }

  int64_t limit_bytes() const { return limit_bytes_.load(std::memory_order_relaxed); }
  // Allocations for which more was reserved than the limit, since it was set or this was asked.
  int64_t take_excesses() { return excesses_.exchange(0); }

 protected:
  // Calls `allocate`, which takes `bytes` or throws OutOfMemoryError, with room made for it.
  template <class Allocate>
  auto inside_limit(int64_t bytes, const Allocate& allocate) {
    for (int attempt = 0;; ++attempt) {
      std::exception_ptr out_of_memory;
      try {
        return allocate();
      } catch (const c10::OutOfMemoryError&) {
        if (limit_bytes() == 0) {
          throw;
        }
        out_of_memory = std::current_exception();
      }
      const Room room = ask(bytes, attempt);
      if (room == Room::Refused) {
        std::rethrow_exception(out_of_memory);
      }
      if (room == Room::NoneLeft) {
        const Uncapped uncapped(*this);
        auto memory = allocate();
        note_excess();
        return memory;
      }
    }
  }

 private:
  // Has the allocator throw OutOfMemoryError before more than these bytes are reserved, and after
  // it has given back what it keeps for later; 0 lifts that. Without effect on the sizes that the
  // device tells. Under the mutex.
  virtual void cap_reserved_bytes(int64_t bytes) noexcept = 0;
  virtual int64_t reserved_bytes() noexcept = 0;
  // Whether this thread may wait for the device now.
  virtual bool may_wait() noexcept { return true; }

  // While it lives there is no cap.
  class Uncapped {
   public:
    explicit Uncapped(LimitedAllocator& allocator) : allocator_(allocator) { count(1); }
    ~Uncapped() { count(-1); }
    Uncapped(const Uncapped&) = delete;
    Uncapped& operator=(const Uncapped&) = delete;

   private:
    void count(int more) {
      const std::lock_guard<std::mutex> guard(allocator_.mutex_);
      allocator_.uncapped_ += more;
      allocator_.apply_cap();
    }

    LimitedAllocator& allocator_;
  };

  Room ask(int64_t bytes, int attempt) {
    const MakeRoom make_room = make_room_.load();
    return make_room != nullptr && may_wait() ? make_room(bytes, attempt) : Room::NoneLeft;
  }

  void note_excess() noexcept {
    const int64_t limit = limit_bytes();
    const int64_t reserved = reserved_bytes();
    if (limit > 0 && reserved > limit) {
      excesses_.fetch_add(1);
      exceeded_.store(true);
      const std::lock_guard<std::mutex> guard(mutex_);
      kept_to_bytes_ = std::max(kept_to_bytes_, reserved + limit / kShareMore);
    }
  }

  void apply_cap() {
    const bool capped = limit_bytes() > 0 && uncapped_ == 0;
    cap_reserved_bytes(capped ? std::max(limit_bytes(), kept_to_bytes_) : 0);
  }

  static constexpr int64_t kShareMore = 64;

  std::mutex mutex_;           // of the cap: held while it is set, and for nothing else
  int64_t kept_to_bytes_ = 0;  // the limit, or where it had to be passed
  int uncapped_ = 0;           // allocations that pass it right now
  std::atomic<int64_t> limit_bytes_{0};
  std::atomic<MakeRoom> make_room_{nullptr};
  std::atomic<int64_t> excesses_{0};
  std::atomic<bool> exceeded_{false};  // in the step that goes on
  bool gave_back_ = false;             // before it
  int times_in_vain_ = 0;
  int steps_until_next_ = 0;
};

// That of a device; null where its allocator is none. Whoever sets one keeps it for good.
LimitedAllocator* limited_allocator(c10::Device device);
void set_limited_allocator(c10::Device device, LimitedAllocator* allocator);

}  // namespace delta

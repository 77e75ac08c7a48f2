// A lock for what is short.
#pragma once

#include <atomic>
#include <chrono>

namespace delta {

// For what is held over a handful of instructions, many times per op. Nobody waits for it while
// holding the GIL (gil.h).
class SpinLock {
 public:
  void lock() {
    if (held_.exchange(true, std::memory_order_acquire)) {
      wait_to_lock();
    }
  }
  bool try_lock_for(std::chrono::microseconds patience);
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  void wait_to_lock();

  std::atomic<bool> held_{false};
};

}  // namespace delta

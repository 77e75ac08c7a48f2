#include "util/spin_lock.h"

#include <thread>

#include "util/gil.h"

namespace delta {

bool SpinLock::try_lock_for(std::chrono::microseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (held_.exchange(true, std::memory_order_acquire)) {
    while (held_.load(std::memory_order_relaxed)) {
      if (std::chrono::steady_clock::now() >= until) {
        return false;
      }
      std::this_thread::yield();
    }
  }
  return true;
}

void SpinLock::wait_to_lock() {
  while (!try_lock_for(gil_patience())) {
    const WithoutGil no_gil;
    while (held_.load(std::memory_order_relaxed)) {
      std::this_thread::yield();  // an eviction may take a while
    }
  }
}

}  // namespace delta

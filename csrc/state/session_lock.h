// The lock of a session, and how a thread holds it.
//
// Note: locks
//  1. The lock guards pages, values and records. It is held for microseconds; nothing that
//     allocates from the pool, runs an op, takes the GIL or frees foreign objects happens under it.
//  2. The rescue runs inside an allocation and takes the lock. A thread that holds it already
//     (Guard marks the thread's trash) gets no rescue.
//  3. Foreign objects (storages, kept arguments: their death may take the GIL) that lose their last
//     owner under the lock wait in the thread's Trash and die after the unlock.
#pragma once

#include <chrono>
#include <mutex>

#include "util/spin_lock.h"

namespace delta {

class SessionLock {
 public:
  // Around a fork (fork_guard.h); everybody else takes a Guard.
  bool try_lock() { return mutex_.try_lock_for(std::chrono::microseconds(0)); }
  void unlock() { mutex_.unlock(); }

 private:
  friend class Guard;
  SpinLock mutex_;
};

// Holds the lock of a session while it lives.
class Guard {
 public:
  explicit Guard(SessionLock& lock) : mutex_(lock.mutex_) { this->lock(); }
  Guard(SessionLock& lock, std::defer_lock_t) : mutex_(lock.mutex_) {}
  ~Guard() {
    if (held_) {
      unlock();
    }
  }
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  void lock();
  bool lock_with_gil();  // never lets the GIL go; false: somebody has had the lock for long
  void unlock();         // and lets the trash die

 private:
  SpinLock& mutex_;
  bool held_ = false;
};

}  // namespace delta

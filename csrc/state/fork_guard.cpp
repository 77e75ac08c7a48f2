#include "state/fork_guard.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "state/entered.h"
#include "util/gil.h"

namespace delta {
namespace {

constexpr std::chrono::seconds kPatienceAtForks{1};

struct Locks {
  std::mutex mutex;  // of the list
  std::vector<SessionLock*> all;
};
Locks& locks() {
  static auto* found = new Locks();  // outlives all that saved tensors
  return *found;
}

// What this thread holds while it forks.
struct Taken {
  bool list = false;
  bool entered = false;
  std::vector<SessionLock*> sessions;
};
Taken& taken() {
  static thread_local Taken by_thread;
  return by_thread;
}

template <class TryLock>
bool lock_until(std::chrono::steady_clock::time_point end, const TryLock& try_lock) {
  if (try_lock()) {
    return true;
  }
  const WithoutGil no_gil;  // whoever has it may need the GIL to go on
  while (!try_lock()) {
    if (std::chrono::steady_clock::now() >= end) {
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

void before_fork() {
  const auto end = std::chrono::steady_clock::now() + kPatienceAtForks;
  Taken& mine = taken();
  mine.list = lock_until(end, [] { return locks().mutex.try_lock(); });
  if (!mine.list) {
    return;
  }
  mine.entered = lock_until(end, [] { return try_lock_entered(); });
  for (SessionLock* lock : locks().all) {
    if (lock_until(end, [&] { return lock->try_lock(); })) {
      mine.sessions.push_back(lock);
    }
  }
}

void after_fork_in_parent() {
  Taken& mine = taken();
  for (SessionLock* lock : mine.sessions) {
    lock->unlock();
  }
  if (mine.entered) {
    unlock_entered();
  }
  if (mine.list) {
    locks().mutex.unlock();
  }
  mine = Taken();
}

void after_fork_in_child() {
  Taken& mine = taken();
  for (SessionLock* lock : locks().all) {
    lock->unlock();
  }
  forget_entered_locks();
  if (mine.list) {
    locks().mutex.unlock();
  } else {
    new (&locks().mutex) std::mutex();
  }
  mine = Taken();
}

}  // namespace

void take_at_forks(SessionLock& lock) {
  static const int failed = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  TORCH_CHECK(failed == 0, "delta_runtime: pthread_atfork failed: ", failed);
  std::lock_guard<std::mutex> guard(locks().mutex);
  locks().all.push_back(&lock);
}

void take_no_more(SessionLock& lock) {
  std::lock_guard<std::mutex> guard(locks().mutex);
  auto& all = locks().all;
  all.erase(std::remove(all.begin(), all.end(), &lock), all.end());
}

}  // namespace delta

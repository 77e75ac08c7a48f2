#include "rebuild/replay_thread.h"

#include <ATen/Parallel.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "rebuild/numeric_context.h"
#include "util/gil.h"

namespace delta {
namespace {

// One job at a time.
class ReplayThread {
 public:
  explicit ReplayThread(int32_t asked) : pid_(getpid()), asked_(asked) {
    thread_ = std::thread([this] { serve(); });
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return threads_ >= 0; });
  }

  pid_t pid() const { return pid_; }
  // Whether a new one might compute with a count that this one does not.
  bool suits(int32_t threads) const {
    return threads <= 0 || threads_ == threads || asked_ == threads;
  }

  void run(const std::function<void()>& work) {
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = &work;
    changed_.notify_all();
    changed_.wait(lock, [this] { return work_ == nullptr; });
    if (auto error = std::exchange(error_, nullptr)) {
      std::rethrow_exception(error);
    }
  }

  ~ReplayThread() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

 private:
  void serve() {
    (void)at::get_num_threads();  // as any thread does at its first op; here it disturbs nobody
    std::unique_lock<std::mutex> lock(mutex_);
    threads_ = omp_threads();
    changed_.notify_all();
    for (;;) {
      changed_.wait(lock, [this] { return work_ != nullptr || ended_; });
      if (work_ == nullptr) {
        break;
      }
      const auto* work = work_;
      lock.unlock();
      std::exception_ptr error;
      try {
        (*work)();
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      error_ = error;
      work_ = nullptr;
      changed_.notify_all();
    }
  }

  const pid_t pid_;
  const int32_t asked_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* work_ = nullptr;
  std::exception_ptr error_;
  int32_t threads_ = -1;
  bool ended_ = false;
};

std::mutex& replay_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

}  // namespace

void forget_replay_lock() { new (&replay_mutex()) std::mutex(); }

uint32_t thread_serial() {
  static std::atomic<uint32_t> next{1};
  static thread_local uint32_t mine __attribute__((tls_model("initial-exec"))) = 0;
  if (mine == 0) {
    mine = next.fetch_add(1);
  }
  return mine;
}

void run_on_replay_thread(int32_t threads, const std::function<void()>& work) {
  static ReplayThread* thread = nullptr;  // lives as long as the process
  const WithoutGil no_gil;                // the work may need it
  std::lock_guard<std::mutex> lock(replay_mutex());
  if (thread != nullptr && thread->pid() != getpid()) {
    thread = nullptr;  // it stayed in the parent
  }
  if (thread != nullptr && !thread->suits(threads)) {
    delete thread;  // a new one begins with the count that the program has set since
    thread = nullptr;
  }
  if (thread == nullptr) {
    thread = new ReplayThread(threads);
  }
  thread->run(work);
}

}  // namespace delta

#include "lanes.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <system_error>

namespace delta {

using Clock = std::chrono::steady_clock;

namespace {

void copy_now(Transfer& transfer) {
  std::memcpy(transfer.to, transfer.from, static_cast<size_t>(transfer.bytes));
  transfer.state.store(Transfer::State::Done, std::memory_order_release);
}

}  // namespace

Lane::Lane(double bytes_per_s) : bytes_per_s_(bytes_per_s), process_(getpid()) {}

// Whoever held the mutex or waited at the conditions does not exist in a forked child, and neither
// does the worker: new ones are put over them.
void Lane::leave_behind_in_fork() {
  if (process_ == getpid()) {
    return;
  }
  process_ = getpid();
  new (&mutex_) std::mutex();
  new (&submitted_) std::condition_variable();
  new (&ended_) std::condition_variable();
  new (&worker_) std::thread();
  new (&queue_) std::deque<TransferPtr>();
  stopped_ = true;
}

void Lane::submit(const TransferPtr& transfer) {
  leave_behind_in_fork();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!stopped_ && !worker_.joinable()) {
      try {
        worker_ = std::thread([this] { work(); });
        pthread_setname_np(worker_.native_handle(), "delta-lane");
      } catch (const std::system_error&) {
        stopped_ = true;  // no thread to be had: every copy is made by whoever asks for it
      }
    }
    if (!stopped_) {
      queue_.push_back(transfer);
      queued_bytes_.fetch_add(transfer->bytes, std::memory_order_relaxed);
      submitted_.notify_one();
      return;
    }
  }
  copy_now(*transfer);
}

void Lane::wait(Transfer& transfer) {
  if (transfer.ended()) {
    return;
  }
  if (process_ != getpid()) {
    leave_behind_in_fork();
    copy_now(transfer);  // once more, where the parent's worker had begun
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [&] { return transfer.ended() || stopped_; });
  if (!transfer.ended()) {
    copy_now(transfer);
  }
}

bool Lane::cancel(Transfer& transfer) {
  leave_behind_in_fork();
  std::lock_guard<std::mutex> guard(mutex_);
  auto queued = Transfer::State::Queued;
  if (!transfer.state.compare_exchange_strong(queued, Transfer::State::Cancelled)) {
    return false;
  }
  queued_bytes_.fetch_sub(transfer.bytes, std::memory_order_relaxed);
  ended_.notify_all();
  return true;
}

void Lane::stop() {
  leave_behind_in_fork();
  {
    std::lock_guard<std::mutex> guard(mutex_);
    stopping_ = true;
    stopped_ |= !worker_.joinable();
    submitted_.notify_all();
  }
  if (worker_.joinable()) {
    worker_.join();
  }
}

double Lane::seconds_for(int64_t bytes) const {
  if (bytes_per_s_ > 0) {
    return static_cast<double>(bytes) / bytes_per_s_;
  }
  const LaneTotals sum = totals();
  return sum.bytes > 0 ? sum.busy_s * static_cast<double>(bytes) / static_cast<double>(sum.bytes)
                       : 0;
}

LaneTotals Lane::totals() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return totals_;
}

void Lane::work() {
  for (;;) {
    TransferPtr transfer;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      submitted_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
      if (queue_.empty()) {
        stopped_ = true;
        ended_.notify_all();
        return;
      }
      transfer = std::move(queue_.front());
      queue_.pop_front();
    }
    auto queued = Transfer::State::Queued;
    if (transfer->state.compare_exchange_strong(queued, Transfer::State::Running)) {
      run(*transfer);
    }
  }
}

// A throttled copy takes its time from when the lane was free, not from when the processor came to
// it, so that many small ones are as fast together as one large one.
void Lane::run(Transfer& transfer) {
  const auto now = Clock::now();
  std::memcpy(transfer.to, transfer.from, static_cast<size_t>(transfer.bytes));
  const auto began = std::max(now - std::chrono::microseconds(200), std::min(free_at_, now));
  if (bytes_per_s_ > 0) {
    const std::chrono::duration<double> takes(static_cast<double>(transfer.bytes) / bytes_per_s_);
    free_at_ = began + std::chrono::duration_cast<Clock::duration>(takes);
    std::unique_lock<std::mutex> lock(mutex_);
    submitted_.wait_until(lock, free_at_, [&] { return stopping_; });
  } else {
    free_at_ = Clock::now();
  }
  transfer.begin_s = seconds_of(bytes_per_s_ > 0 ? began : now);
  transfer.end_s = seconds_of(bytes_per_s_ > 0 ? free_at_ : Clock::now());
  std::lock_guard<std::mutex> guard(mutex_);
  ++totals_.transfers;
  totals_.bytes += transfer.bytes;
  totals_.busy_s += transfer.end_s - transfer.begin_s;
  queued_bytes_.fetch_sub(transfer.bytes, std::memory_order_relaxed);
  transfer.state.store(Transfer::State::Done, std::memory_order_release);
  ended_.notify_all();
}

}  // namespace delta

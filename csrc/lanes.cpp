#include "lanes.h"

#include <pthread.h>

#include <cstring>
#include <new>

namespace delta {

using Clock = std::chrono::steady_clock;

void Lane::submit(const TransferPtr& transfer) {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!stopped_ && !abandoned_) {
      queue_.push_back(transfer);
      queued_bytes_.fetch_add(transfer->bytes, std::memory_order_relaxed);
      if (!worker_.joinable()) {
        worker_ = std::thread([this] { work(); });
        pthread_setname_np(worker_.native_handle(), "delta-lane");
      }
      submitted_.notify_one();
      return;
    }
  }
  std::memcpy(transfer->to, transfer->from, static_cast<size_t>(transfer->bytes));
  transfer->state.store(Transfer::State::Done, std::memory_order_release);
}

void Lane::wait(Transfer& transfer) {
  if (transfer.ended()) {
    return;
  }
  if (abandoned_) {
    std::memcpy(transfer.to, transfer.from, static_cast<size_t>(transfer.bytes));
    transfer.state.store(Transfer::State::Done, std::memory_order_release);
    return;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  ended_.wait(lock, [&] { return transfer.ended(); });
}

bool Lane::cancel(Transfer& transfer) {
  auto queued = Transfer::State::Queued;
  if (!transfer.state.compare_exchange_strong(queued, Transfer::State::Cancelled)) {
    return false;
  }
  queued_bytes_.fetch_sub(transfer.bytes, std::memory_order_relaxed);
  return true;
}

void Lane::stop() {
  {
    std::lock_guard<std::mutex> guard(mutex_);
    if (abandoned_ || stopped_) {
      return;
    }
    stopping_ = true;
    submitted_.notify_all();
  }
  if (worker_.joinable()) {
    worker_.join();
  }
  std::lock_guard<std::mutex> guard(mutex_);
  stopped_ = true;
}

void Lane::abandon() {
  // Whoever held the mutex or waited at the conditions does not exist here: make new ones.
  new (&mutex_) std::mutex();
  new (&submitted_) std::condition_variable();
  new (&ended_) std::condition_variable();
  abandoned_ = true;
  new (&worker_) std::thread();
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

#include "tiers/thread_lane.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <tuple>

namespace delta {

using Clock = std::chrono::steady_clock;

namespace {

constexpr std::chrono::milliseconds kPatience{50};

void end(Transfer& transfer) {
  transfer.state.store(transfer.error == 0 ? Transfer::State::Done : Transfer::State::Failed,
                       std::memory_order_release);
}

}  // namespace

// Time counts from when the link was free, not from when the processor came to it, so that many
// small copies are as fast together as one large one.
std::pair<Throttle::Time, Throttle::Time> Throttle::claim(int64_t bytes, Time now) {
  std::lock_guard<std::mutex> guard(mutex_);
  const Time begin = std::max(now - std::chrono::microseconds(200), free_at_);
  free_at_ = begin + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double>(seconds_for(bytes)));
  return {begin, free_at_};
}

int ThreadLane::write(Transfer& transfer, Bounce& bounce) {
  const char* from = static_cast<const char*>(transfer.memory);
  return transfer.block->each_chunk([&](int64_t at, int64_t bytes) {
    return transfer.block->write(at, from + at, bytes, bounce);
  });
}

int ThreadLane::read(Transfer& transfer, Bounce& bounce) {
  char* to = static_cast<char*>(transfer.memory);
  return transfer.block->each_chunk(
      [&](int64_t at, int64_t bytes) { return transfer.block->read(at, to + at, bytes, bounce); });
}

void ThreadLane::copy(Transfer& transfer, Bounce& bounce) {
  if (transfer.out) {
    transfer.error = write(transfer, bounce);
  } else if ((transfer.error = read(transfer, bounce)) != 0) {
    transfer.error = read(transfer, bounce);  // all the rest depends on it: once more
  }
}

void ThreadLane::copy_now(Transfer& transfer) {
  Bounce bounce;
  await_turn(transfer);
  copy(transfer, bounce);
  end(transfer);
}

// Whoever held the mutex or waited at the conditions does not exist in a forked child, and neither
// does the worker: new ones are put over them.
void ThreadLane::leave_behind_in_fork() {
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

void ThreadLane::submit(const TransferPtr& transfer) {
  leave_behind_in_fork();
  transfer->lane = this;
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

void ThreadLane::wait(Transfer& transfer) {
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

bool ThreadLane::wait_a_while(Transfer& transfer) {
  if (process_ == getpid() && !transfer.ended()) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!ended_.wait_for(lock, kPatience, [&] { return transfer.ended() || stopped_; })) {
      return false;
    }
  }
  wait(transfer);
  return true;
}

bool ThreadLane::cancel(Transfer& transfer) {
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

void ThreadLane::stop() {
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

double ThreadLane::seconds_for(int64_t bytes) const {
  return throttle_ && only_link_ ? throttle_->seconds_for(bytes) : Lane::seconds_for(bytes);
}

void ThreadLane::work() {
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

void ThreadLane::run(Transfer& transfer) {
  await_turn(transfer);
  auto begin = Clock::now();
  auto end_at = begin;
  if (throttle_) {
    std::tie(begin, end_at) = throttle_->claim(transfer.bytes, begin);
  }
  copy(transfer, bounce());
  if (throttle_) {
    std::unique_lock<std::mutex> lock(mutex_);
    submitted_.wait_until(lock, end_at, [&] { return stopping_; });
  }
  end_at = throttle_ && only_link_ ? end_at : std::max(end_at, Clock::now());
  transfer.begin_s = seconds_of(begin);
  transfer.end_s = seconds_of(end_at);
  std::lock_guard<std::mutex> guard(mutex_);
  count(transfer);
  end(transfer);
  ended_.notify_all();
}

}  // namespace delta

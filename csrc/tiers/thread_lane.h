// Lanes of the CPU device: a worker thread each, throttled on request. With a throttle they stand
// in for the copy engines of an accelerator.
//
// Note: without a worker
//  A forked child has no workers: there, waiting does the copy itself. So does submitting where the
//  lane was stopped, or where the system gives no thread.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <thread>
#include <utility>

#include "tiers/lanes.h"

namespace delta {

// One direction of the link of a virtual accelerator: whatever goes over it shares its time.
class Throttle {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit Throttle(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}
  std::pair<Time, Time> claim(int64_t bytes, Time now);  // begin and end of its time on the link
  double seconds_for(int64_t bytes) const { return static_cast<double>(bytes) / bytes_per_s_; }

 private:
  const double bytes_per_s_;
  std::mutex mutex_;
  Time free_at_{};
};

class ThreadLane : public Lane {
 public:
  // By the throttle's clock, if there is one; `only_link`: there is nothing slower behind it.
  ThreadLane(std::shared_ptr<Throttle> throttle, bool only_link)
      : throttle_(std::move(throttle)), only_link_(only_link), process_(getpid()) {}
  ~ThreadLane() override { ThreadLane::stop(); }

  void submit(const TransferPtr& transfer) override;  // starts the worker with the first one
  void wait(Transfer& transfer) override;
  bool wait_a_while(Transfer& transfer) override;
  bool cancel(Transfer& transfer) override;
  void stop() override;                              // unthrottled; submitting later copies at once
  double seconds_for(int64_t bytes) const override;  // by the throttle, or as measured

 protected:
  // All of it, by the thread that calls. 0 or an errno.
  virtual int write(Transfer& transfer, Bounce& bounce);
  virtual int read(Transfer& transfer, Bounce& bounce);
  virtual Bounce& bounce() { return bounce_; }        // the worker's
  virtual void await_turn(Transfer& /*transfer*/) {}  // before the copy begins

 private:
  void leave_behind_in_fork();
  void copy(Transfer& transfer, Bounce& bounce);
  void copy_now(Transfer& transfer);  // by whoever asks for it
  void work();
  void run(Transfer& transfer);

  const std::shared_ptr<Throttle> throttle_;
  const bool only_link_;
  Bounce bounce_;
  std::condition_variable submitted_;
  std::condition_variable ended_;
  std::deque<TransferPtr> queue_;
  std::thread worker_;
  bool stopping_ = false;
  bool stopped_ = false;  // nobody takes anything out of the queue any more
  pid_t process_;         // that the worker belongs to
};

}  // namespace delta

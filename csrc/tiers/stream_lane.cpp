#include "tiers/stream_lane.h"

#include <ATen/Functions.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "tiers/stream_copy.h"
#include "util/sabotage.h"

namespace delta {

StreamLane::StreamLane(c10::Device device, StreamSpans& spans, double crossings,
                       std::shared_ptr<Block> unused)
    : device_(device),
      spans_(spans),
      crossings_(crossings),
      unused_here_(std::move(unused)),
      stream_(c10::impl::VirtualGuardImpl(device.type())
                  .getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      process_(getpid()) {
  if (unused_here_) {
    unused_there_ = at::empty({kUnusedBytes}, at::TensorOptions(device).dtype(at::kByte));
  }
}

void StreamLane::copy(Transfer& transfer) {
  const c10::OptionalDeviceGuard device(device_);
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  const c10::StreamId own = transfer.stream == kNoStream ? current.id() : transfer.stream;
  if (sabotage() != Sabotage::NoOrderSide) {
    c10::Event queued(device_.type());
    queued.record(current);
    queued.block(stream_);
    if (own != current.id()) {
      c10::Event also(device_.type());
      also.record(c10::Stream(c10::Stream::UNSAFE, device_, own));
      also.block(stream_);
    }
  }
  if (transfer.follows && transfer.follows->after) {
    transfer.follows->after->block(stream_);
  }
  transfer.began.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  transfer.after.emplace(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  transfer.began->record(stream_);
  queue_copy(stream_, transfer.memory, transfer.block->memory(), transfer.bytes, transfer.out);
  if (unused_here_) {
    queue_more(transfer);
  }
  transfer.after->record(stream_);
}

// So much that the link is busy as long as a slower one would be.
void StreamLane::queue_more(const Transfer& transfer) {
  void* there = transfer.memory;
  void* here = transfer.block->memory();
  int64_t most_bytes = transfer.bytes;
  if (most_bytes < kUnusedBytes) {
    there = unused_there_.mutable_data_ptr();
    here = unused_here_->memory();
    most_bytes = kUnusedBytes;
  }
  auto rest_bytes = static_cast<int64_t>((crossings_ - 1) * static_cast<double>(transfer.bytes));
  for (; rest_bytes > 0; rest_bytes -= most_bytes) {
    queue_copy(stream_, there, here, std::min(rest_bytes, most_bytes), transfer.out);
  }
}

void StreamLane::submit(const TransferPtr& transfer) {
  transfer->lane = this;
  std::lock_guard<std::mutex> guard(mutex_);
  try {
    copy(*transfer);
  } catch (const std::exception&) {
    await_stream();  // the first of several copies may be under way
    transfer->error = kDeviceFailed;
    transfer->state.store(Transfer::State::Failed, std::memory_order_release);
    return;
  }
  queued_bytes_.fetch_add(transfer->bytes, std::memory_order_relaxed);
  transfer->state.store(Transfer::State::Running, std::memory_order_release);
  queue_.push_back(transfer);
}

// Out: before the memory's own stream, which is what will hand it to somebody else. In: before the
// stream that is about to use it.
void StreamLane::wait(Transfer& transfer) {
  if (transfer.ended()) {
    return;
  }
  const c10::OptionalDeviceGuard device(device_);
  c10::Stream next = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  if (transfer.out && transfer.stream != kNoStream) {
    next = c10::Stream(c10::Stream::UNSAFE, device_, transfer.stream);
  }
  if (sabotage() != (transfer.out ? Sabotage::NoOrderOut : Sabotage::NoOrderIn)) {
    const StreamSpans::Span span(spans_, transfer.out ? SpanKind::OutWait : SpanKind::InWait,
                                 next.id());
    transfer.after->block(next);
  }
  transfer.ordered_before.store(next.id(), std::memory_order_release);
}

void StreamLane::await_stream() noexcept {
  if (process_ == getpid()) {
    try {
      stream_.synchronize();
    } catch (const std::exception&) {
      // The device is gone, or failed: then nothing runs on it any more.
    }
  }
}

void StreamLane::fail_all() noexcept {
  await_stream();
  for (auto& transfer : queue_) {
    transfer->error = kDeviceFailed;
    queued_bytes_.fetch_sub(transfer->bytes, std::memory_order_relaxed);
    transfer->follows.reset();
    transfer->state.store(Transfer::State::Failed, std::memory_order_release);
  }
  queue_.clear();
}

void StreamLane::poll() noexcept {
  std::lock_guard<std::mutex> guard(mutex_);
  if (queue_.empty()) {
    return;
  }
  if (process_ != getpid()) {
    fail_all();
    return;
  }
  try {
    while (!queue_.empty() && queue_.front()->after->query()) {
      Transfer& transfer = *queue_.front();
      transfer.begin_s = transfer.end_s = seconds_of(std::chrono::steady_clock::now());
      try {
        transfer.begin_s -= transfer.began->elapsedTime(*transfer.after) / 1e3;
      } catch (const std::exception&) {
        // A device whose events have no clock.
      }
      count(transfer);
      transfer.follows.reset();
      transfer.state.store(Transfer::State::Done, std::memory_order_release);
      queue_.pop_front();
    }
  } catch (const std::exception&) {
    fail_all();
  }
}

void StreamLane::finish(Transfer& transfer) {
  if (!transfer.ended() && process_ == getpid()) {
    try {
      transfer.after->synchronize();
    } catch (const std::exception&) {
      // poll() meets it too
    }
  }
  poll();
}

void StreamLane::stop() {
  await_stream();
  poll();  // sees what became of the copies
}

}  // namespace delta

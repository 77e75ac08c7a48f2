#include "tiers/staged_lane.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <thread>

#include "tiers/stream_copy.h"
#include "util/sabotage.h"

namespace delta {
namespace {

constexpr int kQuickLooks = 64;
constexpr std::chrono::microseconds kBetweenLooks{50};

// As a host does that has other things to do: drivers burn a core while they wait for an event.
void await(const c10::Event& event) {
  for (int looks = 0; !event.query(); ++looks) {
    if (looks < kQuickLooks) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kBetweenLooks);
    }
  }
}

}  // namespace

StagedLane::StagedLane(c10::Device device, std::shared_ptr<Block> staging)
    : ThreadLane(nullptr, /*only_link=*/false),
      device_(device),
      stream_(c10::impl::VirtualGuardImpl(device.type())
                  .getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      process_(getpid()),
      staging_(std::move(staging)),
      bounce_(static_cast<char*>(staging_->memory())) {}

void StagedLane::note_what_comes_before(Transfer& transfer) const {
  const c10::OptionalDeviceGuard device(device_);
  const c10::Stream current = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  transfer.ready[0].emplace(device_.type());
  transfer.ready[0]->record(current);
  if (transfer.stream != kNoStream && transfer.stream != current.id()) {
    transfer.ready[1].emplace(device_.type());
    transfer.ready[1]->record(c10::Stream(c10::Stream::UNSAFE, device_, transfer.stream));
  }
}

void StagedLane::submit(const TransferPtr& transfer) {
  try {
    TORCH_CHECK(process_ == getpid(), "a forked child has no device");
    note_what_comes_before(*transfer);
  } catch (const std::exception&) {
    transfer->lane = this;
    transfer->error = kDeviceFailed;
    transfer->state.store(Transfer::State::Failed, std::memory_order_release);
    return;
  }
  ThreadLane::submit(transfer);
}

void StagedLane::await_turn(Transfer& transfer) {
  if (process_ != getpid() || sabotage() == Sabotage::NoOrderSide) {
    return;
  }
  try {
    const c10::OptionalDeviceGuard device(device_);
    for (auto& event : transfer.ready) {
      if (event) {
        await(*event);
      }
    }
  } catch (const std::exception&) {
    transfer.error = kDeviceFailed;
  }
}

int StagedLane::move_chunk(Transfer& transfer, int64_t at, int64_t bytes, Bounce& bounce) {
  char* here = bounce.data();
  if (!transfer.out) {
    const int error = transfer.block->read(at, here, bytes, bounce);
    if (error != 0) {
      return error;
    }
  }
  queue_copy(stream_, static_cast<char*>(transfer.memory) + at, here, bytes, transfer.out);
  c10::Event copied(device_.type());
  copied.record(stream_);
  await(copied);
  return transfer.out ? transfer.block->write(at, here, bytes, bounce) : 0;
}

int StagedLane::move(Transfer& transfer, Bounce& bounce) {
  if (process_ != getpid() || transfer.error == kDeviceFailed) {
    return kDeviceFailed;
  }
  if (bounce.data() == nullptr) {
    return ENOMEM;
  }
  try {
    const c10::OptionalDeviceGuard device(device_);
    return transfer.block->each_chunk(
        [&](int64_t at, int64_t bytes) { return move_chunk(transfer, at, bytes, bounce); });
  } catch (const std::exception&) {
    try {
      stream_.synchronize();
    } catch (const std::exception&) {
      // Then nothing runs on it any more.
    }
    return kDeviceFailed;
  }
}

void StagedLane::stop() {
  ThreadLane::stop();
  staging_.reset();
}

}  // namespace delta

// Host memory below the device: blocks of exact sizes, cut out of one reservation.
//
// torch's own pinned allocator rounds each block up to a power of two, and one pinned allocation
// for each tensor costs milliseconds. Here address space for the whole cap is taken once; the
// system gives memory for what is written to. Below an accelerator the reservation is pinned from
// its beginning on, in steps, as it fills: pinning takes memory at once, and milliseconds.
#pragma once

#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "tiers/best_fit.h"
#include "tiers/store.h"

namespace delta {

class HostMemory : public Store, public std::enable_shared_from_this<HostMemory> {
 public:
  static constexpr int64_t kAlignment = 256;

  // Pins a part of the reservation, or lets go of it. May take the GIL.
  struct Pinning {
    std::function<bool(void*, int64_t)> pin;
    std::function<void(void*, int64_t)> unpin;
  };

  // Less where the system has no address space for it.
  explicit HostMemory(int64_t cap_bytes, Pinning pinning = {});
  ~HostMemory() override;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  std::shared_ptr<Block> allocate(int64_t bytes) override;
  StoreUsage usage() const override;
  void fail() override;  // copying memory does not, but a device may
  bool is_open() const override;
  void retire() override;
  void grow() override;
  bool grows_to(int64_t bytes) const override;

 private:
  friend class HostBlock;
  struct Reservation {
    char* begin = nullptr;
    int64_t bytes = 0;
    static Reservation of(int64_t cap_bytes);
  };

  void give_back(int64_t offset, int64_t bytes);
  void return_if_empty();  // under the mutex
  bool can_grow_to(int64_t bytes) const;
  void unpin(const std::vector<std::pair<void*, int64_t>>& pinned) const;

  static constexpr int64_t kStepBytes = 64 << 20;

  mutable std::mutex mutex_;
  Reservation reserved_;
  const Pinning pinning_;
  BestFit places_;
  bool failed_ = false;
  int64_t open_bytes_ = 0;   // of the reservation, that blocks may lie in
  int64_t asked_bytes_ = 0;  // by the largest request that there was no room for, since it grew
  std::vector<std::pair<void*, int64_t>> pinned_;
  StoreUsage usage_;
  bool retired_ = false;
};

}  // namespace delta

// Host memory below the device: blocks of exact sizes, cut out of one reservation.
//
// torch's own pinned allocator rounds each block up to a power of two, and one pinned allocation
// for each tensor costs milliseconds. Here address space for the whole cap is taken once; the
// system gives memory for what is written to.
#pragma once

#include <mutex>

#include "best_fit.h"
#include "store.h"

namespace delta {

class HostMemory : public Store, public std::enable_shared_from_this<HostMemory> {
 public:
  static constexpr int64_t kAlignment = 256;

  explicit HostMemory(int64_t cap_bytes);  // less where the system has no address space for it
  ~HostMemory() override;
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  std::shared_ptr<Block> allocate(int64_t bytes) override;
  StoreUsage usage() const override;
  void fail() override {}  // copying memory does not
  void retire() override;

 private:
  friend class HostBlock;
  struct Reservation {
    char* begin = nullptr;
    int64_t bytes = 0;
    static Reservation of(int64_t cap_bytes);
  };

  void give_back(int64_t offset, int64_t bytes);
  void return_if_empty();  // under the mutex

  mutable std::mutex mutex_;
  Reservation reserved_;
  BestFit places_;
  StoreUsage usage_;
  bool retired_ = false;
};

}  // namespace delta

#include "host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace delta {

class HostBlock : public Block {
 public:
  HostBlock(std::shared_ptr<HostMemory> owner, int64_t offset, int64_t bytes)
      : Block(bytes), owner_(std::move(owner)), offset_(offset) {}
  ~HostBlock() override { owner_->give_back(offset_, bytes()); }

  int write(const void* from, Bounce&) override {
    std::memcpy(data(), from, static_cast<size_t>(bytes()));
    return 0;
  }
  int read(void* to, Bounce&) override {
    std::memcpy(to, data(), static_cast<size_t>(bytes()));
    return 0;
  }

 private:
  char* data() const { return owner_->reserved_.begin + offset_; }

  std::shared_ptr<HostMemory> owner_;
  int64_t offset_;
};

HostMemory::Reservation HostMemory::Reservation::of(int64_t cap_bytes) {
  constexpr int64_t page = 4096;
  for (int64_t bytes = cap_bytes / page * page; bytes >= page; bytes = bytes / 2 / page * page) {
    void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) {
      return {static_cast<char*>(memory), bytes};
    }
  }
  return {};
}

HostMemory::HostMemory(int64_t cap_bytes)
    : reserved_(Reservation::of(cap_bytes)), places_(reserved_.bytes, kAlignment) {
  usage_.cap_bytes = cap_bytes;
}

HostMemory::~HostMemory() {
  if (reserved_.begin != nullptr) {
    munmap(reserved_.begin, static_cast<size_t>(reserved_.bytes));
  }
}

std::shared_ptr<Block> HostMemory::allocate(int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  const int64_t offset = retired_ ? -1 : places_.take(bytes);
  if (offset < 0) {
    ++usage_.refusals;
    return nullptr;
  }
  usage_.used_bytes += bytes;
  usage_.peak_used_bytes = std::max(usage_.peak_used_bytes, usage_.used_bytes);
  usage_.taken_bytes = places_.highest_end();
  return std::make_shared<HostBlock>(shared_from_this(), offset, bytes);
}

void HostMemory::give_back(int64_t offset, int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  usage_.used_bytes -= bytes;
  places_.give_back(offset, bytes);
  returns_.fetch_add(1);
  return_if_empty();
}

void HostMemory::retire() {
  std::lock_guard<std::mutex> guard(mutex_);
  retired_ = true;
  return_if_empty();
}

void HostMemory::return_if_empty() {
  if (retired_ && usage_.used_bytes == 0 && reserved_.begin != nullptr) {
    madvise(reserved_.begin, static_cast<size_t>(reserved_.bytes), MADV_DONTNEED);
  }
}

StoreUsage HostMemory::usage() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return usage_;
}

}  // namespace delta

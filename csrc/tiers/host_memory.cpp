#include "tiers/host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "util/sabotage.h"

namespace delta {

class HostBlock : public Block {
 public:
  HostBlock(std::shared_ptr<HostMemory> owner, int64_t offset, int64_t bytes)
      : Block(bytes), owner_(std::move(owner)), offset_(offset) {}
  ~HostBlock() override {
    if (poisons()) {
      std::memset(data(), 0xFF, static_cast<size_t>(bytes()));
    }
    owner_->give_back(offset_, bytes());
  }

  int write(int64_t at, const char* from, int64_t bytes, Bounce&) override {
    std::memcpy(data() + at, from, static_cast<size_t>(bytes));
    return 0;
  }
  int read(int64_t at, char* to, int64_t bytes, Bounce&) override {
    std::memcpy(to, data() + at, static_cast<size_t>(bytes));
    return 0;
  }
  void* memory() override { return data(); }

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

HostMemory::HostMemory(int64_t cap_bytes, Pinning pinning)
    : reserved_(Reservation::of(cap_bytes)),
      pinning_(std::move(pinning)),
      places_(pinning_.pin ? 0 : reserved_.bytes, kAlignment),
      open_bytes_(pinning_.pin ? 0 : reserved_.bytes) {
  usage_.cap_bytes = cap_bytes;
}

HostMemory::~HostMemory() {
  unpin(pinned_);
  if (reserved_.begin != nullptr) {
    munmap(reserved_.begin, static_cast<size_t>(reserved_.bytes));
  }
}

std::shared_ptr<Block> HostMemory::allocate(int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  const int64_t offset = retired_ || failed_ ? -1 : places_.take(bytes);
  if (offset < 0) {
    ++usage_.refusals;
    asked_bytes_ = std::max(asked_bytes_, can_grow_to(bytes) ? places_.rounded(bytes) : 0);
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

// Opens the next part, if the last one is in use or a request did not fit. Where it cannot be
// pinned it is used as it is: copies are slower then, and not less right.
void HostMemory::grow() {
  if (!pinning_.pin) {
    return;  // all of it is open; every op comes by here
  }
  int64_t more = 0;
  char* begin = nullptr;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    const bool filling = places_.highest_end() > open_bytes_ - kStepBytes / 2;
    if (retired_ || !(filling || asked_bytes_ > 0)) {
      return;
    }
    more = std::min(std::max(kStepBytes, (asked_bytes_ + 4095) / 4096 * 4096),
                    reserved_.bytes - open_bytes_);
    asked_bytes_ = 0;
    if (more <= 0) {
      return;
    }
    begin = reserved_.begin + open_bytes_;
    open_bytes_ += more;
  }
  const bool pinned = pinning_.pin(begin, more);
  std::lock_guard<std::mutex> guard(mutex_);
  if (pinned) {
    pinned_.emplace_back(begin, more);
    usage_.pinned_bytes += more;
  }
  places_.extend(more);
  returns_.fetch_add(1);
}

bool HostMemory::grows_to(int64_t bytes) const {
  std::lock_guard<std::mutex> guard(mutex_);
  return can_grow_to(bytes);
}

// Under the mutex.
bool HostMemory::can_grow_to(int64_t bytes) const {
  return !retired_ && !failed_ && open_bytes_ < reserved_.bytes &&
         places_.rounded(bytes) <= reserved_.bytes - places_.highest_end();
}

void HostMemory::unpin(const std::vector<std::pair<void*, int64_t>>& pinned) const {
  for (const auto& [begin, bytes] : pinned) {
    pinning_.unpin(begin, bytes);
  }
}

void HostMemory::fail() {
  std::lock_guard<std::mutex> guard(mutex_);
  failed_ = true;
}

bool HostMemory::is_open() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return !failed_ && !retired_;
}

void HostMemory::retire() {
  std::vector<std::pair<void*, int64_t>> pinned;
  {
    std::lock_guard<std::mutex> guard(mutex_);
    retired_ = true;
    if (usage_.used_bytes == 0) {
      pinned.swap(pinned_);  // else it stays until the session is gone
    }
    return_if_empty();
  }
  unpin(pinned);
  std::lock_guard<std::mutex> guard(mutex_);
  return_if_empty();
}

void HostMemory::return_if_empty() {
  if (retired_ && pinned_.empty() && usage_.used_bytes == 0 && reserved_.begin != nullptr) {
    madvise(reserved_.begin, static_cast<size_t>(reserved_.bytes), MADV_DONTNEED);
  }
}

StoreUsage HostMemory::usage() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return usage_;
}

}  // namespace delta

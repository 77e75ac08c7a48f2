#include "host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

namespace delta {

HostBlock::~HostBlock() { owner_->give_back(data_, bytes_, taken_bytes_); }

HostMemory::HostMemory(int64_t cap_bytes) {
  usage_.cap_bytes = cap_bytes;
  constexpr int64_t page = 4096;
  for (int64_t bytes = cap_bytes / page * page; bytes >= page; bytes = bytes / 2 / page * page) {
    void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) {
      begin_ = static_cast<char*>(memory);
      reserved_bytes_ = bytes;
      add_hole(begin_, bytes);
      break;
    }
  }
}

HostMemory::~HostMemory() {
  if (begin_ != nullptr) {
    munmap(begin_, static_cast<size_t>(reserved_bytes_));
  }
}

void HostMemory::add_hole(char* begin, int64_t bytes) {
  holes_.emplace(begin, bytes);
  by_size_.emplace(bytes, begin);
}

std::unique_ptr<HostBlock> HostMemory::allocate(int64_t bytes) {
  const int64_t taken = (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard<std::mutex> guard(mutex_);
  const auto best = by_size_.lower_bound({taken, nullptr});
  if (best == by_size_.end()) {
    ++usage_.refusals;
    return nullptr;
  }
  const auto [size, begin] = *best;
  by_size_.erase(best);
  holes_.erase(begin);
  if (size > taken) {
    add_hole(begin + taken, size - taken);
  }
  usage_.used_bytes += bytes;
  usage_.peak_used_bytes = std::max(usage_.peak_used_bytes, usage_.used_bytes);
  usage_.taken_bytes = std::max<int64_t>(usage_.taken_bytes, begin + taken - begin_);
  return std::make_unique<HostBlock>(shared_from_this(), begin, bytes, taken);
}

void HostMemory::give_back(char* data, int64_t bytes, int64_t taken_bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  usage_.used_bytes -= bytes;
  char* begin = data;
  char* end = data + taken_bytes;
  auto after = holes_.lower_bound(data);
  if (after != holes_.end() && after->first == end) {
    end += after->second;
    by_size_.erase({after->second, after->first});
    after = holes_.erase(after);
  }
  if (after != holes_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      begin = before->first;
      by_size_.erase({before->second, before->first});
      holes_.erase(before);
    }
  }
  add_hole(begin, end - begin);
  returns_.fetch_add(1);
}

HostUsage HostMemory::usage() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return usage_;
}

}  // namespace delta

#include "host_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

namespace delta {

HostBlock::~HostBlock() { owner_->give_back(data_, bytes_, taken_bytes_); }

HostMemory::~HostMemory() {
  for (const auto& [begin, bytes] : slabs_) {
    munmap(begin, static_cast<size_t>(bytes));
  }
}

bool HostMemory::add_slab(int64_t bytes) {
  constexpr int64_t page = 4096;
  const int64_t least = (bytes + page - 1) / page * page;
  const int64_t allowed = (usage_.cap_bytes - usage_.slab_bytes) / page * page;
  if (least > allowed) {
    return false;
  }
  const int64_t size = std::min(std::max(least, kSlabBytes), allowed);
  void* memory = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return false;
  }
  auto* begin = static_cast<char*>(memory);
  slabs_.emplace(begin, size);
  usage_.slab_bytes += size;
  usage_.peak_slab_bytes = std::max(usage_.peak_slab_bytes, usage_.slab_bytes);
  add_hole(begin, size);
  return true;
}

void HostMemory::add_hole(char* begin, int64_t bytes) {
  holes_.emplace(begin, bytes);
  by_size_.emplace(bytes, begin);
}

std::unique_ptr<HostBlock> HostMemory::allocate(int64_t bytes) {
  const int64_t taken = (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard<std::mutex> guard(mutex_);
  auto best = by_size_.lower_bound({taken, nullptr});
  if (best == by_size_.end()) {
    if (!add_slab(taken)) {
      ++usage_.refusals;
      return nullptr;
    }
    best = by_size_.lower_bound({taken, nullptr});
  }
  const auto [size, begin] = *best;
  by_size_.erase(best);
  holes_.erase(begin);
  if (size > taken) {
    add_hole(begin + taken, size - taken);
  }
  usage_.used_bytes += bytes;
  usage_.peak_used_bytes = std::max(usage_.peak_used_bytes, usage_.used_bytes);
  return std::make_unique<HostBlock>(shared_from_this(), begin, bytes, taken);
}

void HostMemory::give_back(char* data, int64_t bytes, int64_t taken_bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  usage_.used_bytes -= bytes;
  auto slab = std::prev(slabs_.upper_bound(data));
  char* const slab_end = slab->first + slab->second;
  char* begin = data;
  char* end = data + taken_bytes;
  auto after = holes_.lower_bound(data);
  if (after != holes_.end() && after->first == end && end != slab_end) {
    end += after->second;
    by_size_.erase({after->second, after->first});
    after = holes_.erase(after);
  }
  if (after != holes_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == begin && before->first >= slab->first) {
      begin = before->first;
      by_size_.erase({before->second, before->first});
      holes_.erase(before);
    }
  }
  const bool all_free = begin == slab->first && end == slab_end;
  const bool another = by_size_.lower_bound({kSlabBytes, nullptr}) != by_size_.end();
  if (all_free && another) {
    munmap(slab->first, static_cast<size_t>(slab->second));
    usage_.slab_bytes -= slab->second;
    slabs_.erase(slab);
    return;
  }
  add_hole(begin, end - begin);
}

HostUsage HostMemory::usage() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return usage_;
}

}  // namespace delta

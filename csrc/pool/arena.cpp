#include "pool/arena.h"

#include <c10/util/flat_hash_map.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <mutex>
#include <set>

namespace delta {
namespace arena {
namespace {

constexpr std::size_t kHuge = 2 * 1024 * 1024;
const std::size_t g_page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));

std::size_t machine_bytes() {
  struct sysinfo info;
  return sysinfo(&info) == 0 ? (info.totalram + info.totalswap) * info.mem_unit : 0;
}

// Where address space is counted, a large reservation would take it from everybody else.
bool address_space_is_scarce() {
  for (auto which : {RLIMIT_AS, RLIMIT_DATA}) {
    struct rlimit limit;
    if (getrlimit(which, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
      return true;
    }
  }
  std::ifstream file("/proc/sys/vm/overcommit_memory");
  int mode = 0;
  return (file >> mode) && mode == 2;
}

// Free ranges by address and by size; neighbours are one range.
class Ranges {
 public:
  void insert(uintptr_t begin, std::size_t size) {
    auto next = by_address_.lower_bound(begin);
    total_ += size;
    if (next != by_address_.end() && begin + size == next->first) {
      size += next->second;
      by_size_.erase({next->second, next->first});
      next = by_address_.erase(next);
    }
    if (next != by_address_.begin()) {
      auto before = std::prev(next);
      if (before->first + before->second == begin) {
        by_size_.erase({before->second, before->first});
        before->second += size;
        by_size_.insert({before->second, before->first});
        return;
      }
    }
    by_address_.emplace_hint(next, begin, size);
    by_size_.insert({size, begin});
  }

  // The begin of the smallest range of at least `size`, of which so much is taken; 0: there is
  // none.
  uintptr_t take(std::size_t size) {
    auto best = by_size_.lower_bound({size, 0});
    if (best == by_size_.end()) {
      return 0;
    }
    const auto [found, begin] = *best;
    by_size_.erase(best);
    by_address_.erase(begin);
    total_ -= found;
    if (found > size) {
      insert(begin + size, found - size);
    }
    return begin;
  }

  // Takes up to `size` out of the largest range, in whole huge pages: a part of one would leave its
  // neighbours on small pages. Size 0: there are none, and `parts` are not wanted.
  std::pair<uintptr_t, std::size_t> take_from_largest(std::size_t size, bool parts) {
    const auto [found, begin] = *std::prev(by_size_.end());
    const uintptr_t end = begin + found;
    uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge;
    uintptr_t last = end / kHuge * kHuge;
    if (first >= last) {
      if (!parts) {
        return {begin, 0};
      }
      first = begin;
      last = end;
    }
    first = std::max(first, last - std::min(last, size));
    by_size_.erase({found, begin});
    by_address_.erase(begin);
    total_ -= found;
    if (begin < first) {
      insert(begin, first - begin);
    }
    if (last < end) {
      insert(last, end - last);
    }
    return {first, last - first};
  }

  bool empty() const { return by_size_.empty(); }
  std::size_t total() const { return total_; }

 private:
  std::map<uintptr_t, std::size_t> by_address_;
  std::set<std::pair<std::size_t, uintptr_t>> by_size_;
  std::size_t total_ = 0;
};

class Arena {
 public:
  Arena() {
    if (address_space_is_scarce()) {
      return;
    }
    for (std::size_t size = 4 * machine_ / kHuge * kHuge; size >= (std::size_t{1} << 30);
         size /= 2) {
      void* space = mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (space != MAP_FAILED) {
        begin_ = (reinterpret_cast<uintptr_t>(space) + kHuge - 1) / kHuge * kHuge;
        end_ = begin_ + size;
        madvise(reinterpret_cast<void*>(begin_), size, MADV_HUGEPAGE);
        bare_.insert(begin_, size);
        return;
      }
    }
  }

  void* allocate(std::size_t bytes) {
    const std::size_t size = rounded(bytes);
    std::lock_guard<std::mutex> guard(mutex);
    if (size < bytes || size > machine_ - std::min(machine_, used_)) {
      return nullptr;  // malloc will say so; here it would be found out by the OOM killer
    }
    uintptr_t block = backed_.take(size);
    if (block == 0) {
      block = bare_.take(size);
    }
    if (block == 0) {
      return nullptr;
    }
    used_ += size;
    most_used_ = std::max(most_used_, used_);
    blocks_.emplace(block, size);
    trim();
    return reinterpret_cast<void*>(block);
  }

  std::size_t release(void* block) {
    const auto begin = reinterpret_cast<uintptr_t>(block);
    std::lock_guard<std::mutex> guard(mutex);
    const auto it = blocks_.find(begin);
    const std::size_t size = it->second;
    blocks_.erase(it);
    used_ -= size;
    backed_.insert(begin, size);
    trim();
    return size;
  }

  bool owns(const void* block) const {
    const auto address = reinterpret_cast<uintptr_t>(block);
    return address >= begin_ && address < end_;
  }

  void set_limit(int64_t bytes) {
    std::lock_guard<std::mutex> guard(mutex);
    limit_ = static_cast<std::size_t>(bytes);
    if (limit_ > 0) {  // once it is lifted, what is resident then may stay
      most_used_ = std::max(used_, std::min(most_used_, limit_));
    }
    trim();
  }

  int64_t idle_bytes() {
    std::lock_guard<std::mutex> guard(mutex);
    return static_cast<int64_t>(backed_.total());
  }

  int64_t resident_bytes() {
    std::lock_guard<std::mutex> guard(mutex);
    return static_cast<int64_t>(used_ + backed_.total());
  }

  std::mutex mutex;

 private:
  // Gives free memory back to the system until what is resident is no more than a quarter above the
  // limit. Free ranges between blocks are of use only to what fits into them: with an eighth, a
  // ResNet at its budget took a hundred huge page faults of some milliseconds in each step. Up to a
  // half may be left to parts of huge pages.
  void trim() {
    const std::size_t base = limit_ > 0 ? limit_ : most_used_;
    const std::size_t limit = base + base / 4;
    const std::size_t most = base + base / 2;
    while (used_ + backed_.total() > limit && !backed_.empty()) {
      const std::size_t resident = used_ + backed_.total();
      const std::size_t excess = (resident - limit + kHuge - 1) / kHuge * kHuge;
      const auto [begin, size] = backed_.take_from_largest(excess, /*parts=*/resident > most);
      if (size == 0) {
        return;
      }
      if (madvise(reinterpret_cast<void*>(begin), size, MADV_DONTNEED) != 0) {
        backed_.insert(begin, size);  // locked memory stays
        return;
      }
      bare_.insert(begin, size);
    }
  }

  const std::size_t machine_ = machine_bytes();
  uintptr_t begin_ = 0;
  uintptr_t end_ = 0;
  Ranges backed_;  // free and resident
  Ranges bare_;    // free and not
  ska::flat_hash_map<uintptr_t, std::size_t> blocks_;
  std::size_t used_ = 0;
  std::size_t most_used_ = 0;
  std::size_t limit_ = 0;
};

// Never destroyed: tensors of static storage outlive it.
Arena& instance() {
  static Arena* arena = [] {
    auto* made = new Arena();
    // A forked child must not find the lock held by a thread that it does not have.
    pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                   [] { instance().mutex.unlock(); });
    return made;
  }();
  return *arena;
}

}  // namespace

void prepare() { instance(); }
void* allocate(std::size_t bytes) { return instance().allocate(bytes); }
std::size_t release(void* block) { return instance().release(block); }
bool owns(const void* block) { return instance().owns(block); }
std::size_t rounded(std::size_t bytes) { return (bytes + g_page - 1) / g_page * g_page; }
void set_limit(int64_t bytes) { instance().set_limit(bytes); }
int64_t idle_bytes() { return instance().idle_bytes(); }
int64_t resident_bytes() { return instance().resident_bytes(); }

}  // namespace arena
}  // namespace delta

#include "pool/cpu_pool.h"
#include "util/errors.h"

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "pool/arena.h"

namespace delta {
namespace cpu_pool {
namespace {

std::atomic<int64_t> g_live{0};
std::atomic<int64_t> g_peak{0};
std::atomic<int64_t> g_step_peak{0};
std::atomic<int64_t> g_window_peak{0};
std::atomic<int64_t> g_window_rescued{0};
std::atomic<int64_t> g_window_refused{0};
std::atomic<int64_t> g_soft_limit{0};
std::atomic<int64_t> g_capacity{0};
std::atomic<int64_t> g_allocations{0};
std::atomic<int64_t> g_full{0};
std::atomic<int64_t> g_rescues{0};
std::atomic<int64_t> g_rescued_bytes{0};
std::atomic<int64_t> g_over_limit_peak{0};
std::atomic<int64_t> g_passed{0};
std::atomic<int64_t> g_refused{0};
std::atomic<RescueFn> g_rescue{nullptr};
std::atomic<bool> g_rescue_enabled{true};
std::atomic<bool> g_soft_limit_is_hard{false};
std::atomic<bool> g_installed{false};
thread_local bool t_rescuing = false;

void raise_to(std::atomic<int64_t>& high, int64_t value) {
  int64_t seen = high.load(std::memory_order_relaxed);
  while (value > seen && !high.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

void release(void* block) {
  if (block == nullptr) {
    return;
  }
  if (arena::owns(block)) {
    const auto bytes = static_cast<int64_t>(arena::release(block));
    g_live.fetch_sub(bytes, std::memory_order_relaxed);
    return;
  }
  g_live.fetch_sub(static_cast<int64_t>(malloc_usable_size(block)), std::memory_order_relaxed);
  c10::free_cpu(block);
}

void raise_window(int64_t live) {
  raise_to(g_window_peak, live + g_window_rescued.load(std::memory_order_relaxed));
}

void raise_peaks(int64_t live) {
  raise_to(g_peak, live);
  raise_to(g_step_peak, live);
  raise_window(live);
}

void limit_arena() {
  const int64_t soft = g_soft_limit.load();
  const int64_t capacity = g_capacity.load();
  arena::set_limit(soft > 0 && capacity > 0 ? std::min(soft, capacity) : std::max(soft, capacity));
}

// Asks the rescue for `bytes`; returns true if it freed anything. Never recursive.
bool ask_for_room(int64_t bytes) {
  RescueFn rescue = g_rescue.load(std::memory_order_acquire);
  if (rescue == nullptr || t_rescuing || !g_rescue_enabled.load(std::memory_order_relaxed)) {
    return false;
  }
  struct Busy {
    Busy() { t_rescuing = true; }
    ~Busy() { t_rescuing = false; }
  } busy;
  int64_t freed = rescue(bytes);
  if (freed > 0) {
    g_rescues.fetch_add(1, std::memory_order_relaxed);
    g_rescued_bytes.fetch_add(freed, std::memory_order_relaxed);
    g_window_rescued.fetch_add(freed, std::memory_order_relaxed);
  }
  return freed > 0;
}

class PoolAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    c10::Device device(c10::DeviceType::CPU);
    if (n == 0) {
      return {nullptr, nullptr, &release, device};
    }
    g_allocations.fetch_add(1, std::memory_order_relaxed);
    void* block = n >= arena::kLeastBytes ? from_arena(n) : nullptr;
    if (block == nullptr) {
      block = from_malloc(n);
    }
    return {block, block, &release, device};
  }

  at::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override {
    default_copy_data(dest, src, count);
  }

 private:
  static void* from_arena(size_t n) {
    const auto bytes = static_cast<int64_t>(arena::rounded(n));
    const int64_t live = reserve(bytes);
    void* block = arena::allocate(n);
    if (block == nullptr) {
      g_live.fetch_sub(bytes, std::memory_order_relaxed);
      return nullptr;
    }
    raise_peaks(live);
    return block;
  }

  static void* from_malloc(size_t n) {
    // malloc rounds up; what is really taken is counted, so the most that it can be is reserved.
    const int64_t bytes = static_cast<int64_t>(n) + most_rounding_bytes(static_cast<int64_t>(n));
    reserve(bytes);
    void* block = nullptr;
    try {
      block = c10::alloc_cpu(n);
    } catch (...) {
      g_live.fetch_sub(bytes, std::memory_order_relaxed);
      throw;
    }
    const int64_t extra = static_cast<int64_t>(malloc_usable_size(block)) - bytes;
    raise_peaks(g_live.fetch_add(extra, std::memory_order_relaxed) + extra);
    return block;
  }

  // Note: reserve first, act, commit. `bytes` are counted before the memory is taken, so that two
  // threads cannot both fit into the same room, and given back on every way out that does not
  // allocate. Returns the bytes live with them.
  static int64_t reserve(int64_t bytes) {
    int64_t live = g_live.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    const int64_t soft = g_soft_limit.load(std::memory_order_relaxed);
    // Once it had to be passed, keeping below that again costs time and saves nothing.
    const int64_t kept = soft > 0 && !g_soft_limit_is_hard.load(std::memory_order_relaxed)
                             ? std::max(soft, g_passed.load(std::memory_order_relaxed))
                             : soft;
    if (soft > 0 && live > kept) {
      if (ask_for_room(live - kept)) {
        live = g_live.load(std::memory_order_relaxed);
      }
      if (live > soft) {
        raise_to(g_over_limit_peak, live - soft);
        raise_to(g_passed, live);
      }
    }
    int64_t capacity = g_capacity.load(std::memory_order_relaxed);
    if (soft > 0 && g_soft_limit_is_hard.load(std::memory_order_relaxed)) {
      capacity = capacity > 0 ? std::min(capacity, soft) : soft;
    }
    if (capacity > 0 && live > capacity) {
      g_full.fetch_add(1, std::memory_order_relaxed);
      if (ask_for_room(live - capacity)) {
        live = g_live.load(std::memory_order_relaxed);
      }
      if (live > capacity) {
        g_live.fetch_sub(bytes, std::memory_order_relaxed);
        g_refused.store(live);
        g_window_refused.store(live);
        raise_window(live);
        const bool strict = capacity == soft && g_soft_limit_is_hard.load();
        const std::string told = c10::str("tried to allocate ", bytes, " bytes with ", live - bytes,
                                          " bytes live and a ", strict ? "budget" : "capacity",
                                          " of ", capacity, " bytes (delta_runtime.cpu_pool).");
        if (strict) {
          throw_budget_passed(told);
        }
        TORCH_CHECK_WITH(OutOfMemoryError, false, "CPU pool out of memory: ", told);
      }
    }
    return live;
  }
};

PoolAllocator g_allocator;

}  // namespace

void install() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> guard(mutex);
  if (!g_installed.load()) {
    arena::prepare();
    c10::SetCPUAllocator(&g_allocator, /*priority=*/100);
    g_installed.store(true);
  }
}

bool installed() { return g_installed.load(); }
void set_capacity(int64_t bytes) {
  g_capacity.store(bytes);
  limit_arena();
}
void set_soft_limit(int64_t bytes) {
  g_soft_limit.store(bytes);
  limit_arena();
}
Limits limits() { return {g_soft_limit.load(), g_capacity.load()}; }
void set_rescue(RescueFn fn) { g_rescue.store(fn, std::memory_order_release); }
void set_rescue_enabled(bool enabled) { g_rescue_enabled.store(enabled); }
void set_soft_limit_is_hard(bool hard) { g_soft_limit_is_hard.store(hard); }
bool owns(const c10::DataPtr& data) { return data.get_deleter() == &release; }
bool is_foreign(const c10::DataPtr& data) {
  static const at::DeleterFnPtr before = c10::GetDefaultCPUAllocator()->raw_deleter();
  return data.get() != nullptr && data.get_deleter() != &release && data.get_deleter() != before;
}
void reset_step_peak() { g_step_peak.store(g_live.load()); }
int64_t step_peak_bytes() { return g_step_peak.load(); }
int64_t idle_bytes() { return arena::idle_bytes(); }
int64_t resident_bytes() { return arena::resident_bytes(); }
int64_t live_bytes() { return g_live.load(std::memory_order_relaxed); }
int64_t peak_bytes() { return g_peak.load(std::memory_order_relaxed); }
void reset_peak() { g_peak.store(g_live.load()); }
int64_t allocation_count() { return g_allocations.load(); }
int64_t full_count() { return g_full.load(); }

void open_window() {
  g_window_peak.store(g_live.load(std::memory_order_relaxed), std::memory_order_relaxed);
  g_window_rescued.store(0, std::memory_order_relaxed);
  g_window_refused.store(0, std::memory_order_relaxed);
}
int64_t window_refused_bytes() { return g_window_refused.load(std::memory_order_relaxed); }
int64_t window_peak_bytes() { return g_window_peak.load(std::memory_order_relaxed); }

int64_t rescue_count() { return g_rescues.load(); }
int64_t rescued_bytes() { return g_rescued_bytes.load(); }
int64_t take_refused_bytes() { return g_refused.exchange(0); }
int64_t over_limit_peak_bytes() { return g_over_limit_peak.load(); }
int64_t passed_bytes() { return g_passed.load(std::memory_order_relaxed); }
void reset_passed() { g_passed.store(0); }
void reset_counters() {
  g_rescues.store(0);
  g_rescued_bytes.store(0);
  g_over_limit_peak.store(0);
  reset_passed();  // of a step that died above its budget
}

}  // namespace cpu_pool
}  // namespace delta

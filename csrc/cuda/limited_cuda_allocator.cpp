// delta_runtime._cuda: PyTorch's allocator of CUDA memory, so that it keeps to a limit.
//
// An extension of its own, built where torch is a build for CUDA (see setup.py). It puts an
// allocator in front of PyTorch's own that hands everything on. Allocations pass the rule of
// pool/limited_allocator.h; the cap is the allocator's memory fraction.
//
// Note: what it hands on
//  1. Functions that throw or do nothing where an allocator does not have them have to be handed on
//     by name. So it is only built for versions of PyTorch whose functions are all here.
//  2. What is allocated belongs to PyTorch's allocator, which frees it. Storages remember this one
//     and ask it when they grow, so it lives for good.
//  3. `torch.cuda.set_per_process_memory_fraction` is the user's word: of the two the smaller one
//     counts.
//  4. While a graph is captured on the card nothing may wait, and the limit is passed.
//  5. PyTorch sets its fraction without its lock. An allocation on another thread that meets that
//     half-way fails before it has done anything, and is tried again.
//  6. Storages that are older than this allocator grow by PyTorch's own: at the limit that is an
//     OutOfMemoryError.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pool/limited_allocator.h"

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 11 || TORCH_VERSION_MINOR > 13
#error "Which functions this version's CUDAAllocator has is not known here."
#endif

namespace delta {
namespace {

namespace native = c10::cuda::CUDACachingAllocator;
using c10::DeviceIndex;
using c10::MempoolId_t;
using native::CUDAAllocator;

// The limit of one card.
class CardLimit final : public LimitedAllocator {
 public:
  CardLimit(CUDAAllocator& below, DeviceIndex card) : below_(below), card_(card) {}

  using LimitedAllocator::inside_limit;

  std::atomic<int> pools_in_use{0};  // that somebody allocates to: as a rule, captures a graph to

  double fraction_of_user() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return users_ ? *users_ : below_.getMemoryFraction(card_);
  }

  void set_fraction_of_user(double fraction) {
    const std::lock_guard<std::mutex> guard(mutex_);
    below_.setMemoryFraction(fraction, card_);  // refuses what makes no sense
    users_ = fraction;
    if (ours_ < fraction) {
      below_.setMemoryFraction(ours_, card_);
    }
  }

 private:
  void cap_reserved_bytes(int64_t bytes) noexcept override {
    const std::lock_guard<std::mutex> guard(mutex_);
    try {
      if (total_bytes_ == 0) {
        total_bytes_ = static_cast<double>(below_.getMemoryInfo(card_).second);
      }
      if (!users_) {
        users_ = below_.getMemoryFraction(card_);
      }
      ours_ = bytes > 0 ? std::min(1.0, static_cast<double>(bytes) / total_bytes_) : 1.0;
      below_.setMemoryFraction(std::min(ours_, *users_), card_);
    } catch (const std::exception&) {  // a card that is lost: whatever comes next says so
    }
  }

  int64_t reserved_bytes() noexcept override {
    try {
      return below_.getDeviceStats(card_).reserved_bytes[0].current;
    } catch (const std::exception&) {
      return 0;
    }
  }

  // Waiting for the card would end the capture of a graph.
  bool may_wait() noexcept override {
    try {
      return pools_in_use.load() == 0 &&
             c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
    } catch (const std::exception&) {
      return false;
    }
  }

  CUDAAllocator& below_;
  const DeviceIndex card_;
  std::mutex mutex_;
  std::optional<double> users_;  // as far as it is known: before the first cap it is not
  double ours_ = 1.0;
  double total_bytes_ = 0;
};

class LimitedCudaAllocator final : public CUDAAllocator {
  static constexpr DeviceIndex kMostCards = 64;  // of a process

  CardLimit* limit_or_null(DeviceIndex card) {
    return card >= 0 && card < kMostCards ? limits_[static_cast<size_t>(card)].get() : nullptr;
  }

  template <class Allocate>
  auto inside(size_t bytes, const Allocate& allocate) {
    const auto settled = [&] {
      while (true) {
        try {
          return allocate();
        } catch (const std::bad_optional_access&) {  // note 5
        }
      }
    };
    CardLimit* limit = limit_or_null(c10::cuda::current_device());
    if (limit == nullptr || limit->limit_bytes() == 0) {
      return settled();
    }
    return limit->inside_limit(static_cast<int64_t>(bytes), settled);
  }

 public:
  explicit LimitedCudaAllocator(CUDAAllocator& below) : below_(below) {
    for (DeviceIndex card = 0; card < kMostCards; ++card) {
      limits_.push_back(std::make_unique<CardLimit>(below, card));
    }
  }

  LimitedAllocator* limit_of(DeviceIndex card) {
    TORCH_CHECK(card >= 0 && card < kMostCards, "no card ", static_cast<int>(card));
    return limits_[static_cast<size_t>(card)].get();
  }

  // What takes memory.

  c10::DataPtr allocate(size_t bytes) override {
    return inside(bytes, [&] { return below_.allocate(bytes); });
  }
  void* raw_alloc(size_t bytes) override {
    return inside(bytes, [&] { return below_.raw_alloc(bytes); });
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return inside(bytes, [&] { return below_.raw_alloc_with_stream(bytes, stream); });
  }

  double getMemoryFraction(DeviceIndex card) override {
    CardLimit* limit = limit_or_null(card);
    return limit != nullptr ? limit->fraction_of_user() : below_.getMemoryFraction(card);
  }
  void setMemoryFraction(double fraction, DeviceIndex card) override {
    CardLimit* limit = limit_or_null(card);
    limit != nullptr ? limit->set_fraction_of_user(fraction)
                     : below_.setMemoryFraction(fraction, card);
  }

  // All others are handed on.

  c10::DeleterFnPtr raw_deleter() const override { return below_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    below_.copy_data(to, from, bytes);
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return below_.is_simple_data_ptr(data);
  }
  bool initialized() override { return below_.initialized(); }
  void emptyCache(MempoolId_t pool) override { below_.emptyCache(pool); }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    below_.recordStream(data, stream);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    below_.recordStream(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex card) override {
    return below_.getDeviceStats(card);
  }
  void resetAccumulatedStats(DeviceIndex card) override { below_.resetAccumulatedStats(card); }
  void resetPeakStats(DeviceIndex card) override { below_.resetPeakStats(card); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex card) override {
    return below_.getMemoryInfo(card);
  }
  void raw_delete(void* data) override { below_.raw_delete(data); }
  void init(int cards) override { below_.init(cards); }
  std::vector<native::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex card) override {
    return below_.getExpandableSegmentSizes(card);
  }
  void enable(bool on) override { below_.enable(on); }
  bool isEnabled() const override { return below_.isEnabled(); }
  void cacheInfo(DeviceIndex card, size_t* largest) override { below_.cacheInfo(card, largest); }
  void* getBaseAllocation(void* data, size_t* bytes) override {
    return below_.getBaseAllocation(data, bytes);
  }
  native::SnapshotInfo snapshot(MempoolId_t pool, bool traces) override {
    return below_.snapshot(pool, traces);
  }
  void beginAllocateToPool(DeviceIndex card, MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    below_.beginAllocateToPool(card, pool, std::move(filter));
    if (CardLimit* limit = limit_or_null(card)) {
      ++limit->pools_in_use;
    }
  }
  void endAllocateToPool(DeviceIndex card, MempoolId_t pool) override {
    below_.endAllocateToPool(card, pool);
    if (CardLimit* limit = limit_or_null(card)) {
      --limit->pools_in_use;
    }
  }
  void releasePool(DeviceIndex card, MempoolId_t pool) override { below_.releasePool(card, pool); }
  int getPoolUseCount(DeviceIndex card, MempoolId_t pool) override {
    return below_.getPoolUseCount(card, pool);
  }
  void createOrIncrefPool(DeviceIndex card, MempoolId_t pool,
                          std::shared_ptr<CUDAAllocator> allocator) override {
    below_.createOrIncrefPool(card, pool, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex card, MempoolId_t pool, bool on) override {
    below_.setUseOnOOM(card, pool, on);
  }
  void setNoSplit(DeviceIndex card, MempoolId_t pool) override { below_.setNoSplit(card, pool); }
  bool checkPoolLiveAllocations(DeviceIndex card, MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return below_.checkPoolLiveAllocations(card, pool, expected);
  }
  native::ShareableHandle shareIpcHandle(void* data) override {
    return below_.shareIpcHandle(data);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return below_.getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return below_.isHistoryEnabled(); }
  void recordHistory(bool on, native::CreateContextFn recorder, size_t most,
                     native::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    below_.recordHistory(on, recorder, most, when, clear, skipped);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& texts) override {
    below_.recordAnnotation(texts);
  }
  void pushCompileContext(std::string& text) override { below_.pushCompileContext(text); }
  void popCompileContext() override { below_.popCompileContext(); }
  void setUserMetadata(const std::string& text) override { below_.setUserMetadata(text); }
  std::string getUserMetadata() override { return below_.getUserMetadata(); }
  void attachOutOfMemoryObserver(native::OutOfMemoryObserver observer) override {
    below_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(native::AllocatorTraceTracker tracker) override {
    below_.attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(DeviceIndex card, DeviceIndex other) override {
    below_.enablePeerAccess(card, other);
  }
  cudaError_t memcpyAsync(void* to, int to_card, const void* from, int from_card, size_t bytes,
                          cudaStream_t stream, bool peers) override {
    return below_.memcpyAsync(to, to_card, from, from_card, bytes, stream, peers);
  }
  std::shared_ptr<native::AllocatorState> getCheckpointState(DeviceIndex card,
                                                             MempoolId_t pool) override {
    return below_.getCheckpointState(card, pool);
  }
  native::CheckpointDelta setCheckpointPoolState(
      DeviceIndex card, std::shared_ptr<native::AllocatorState> state) override {
    return below_.setCheckpointPoolState(card, std::move(state));
  }
  std::string name() override { return below_.name(); }
#if TORCH_VERSION_MINOR >= 12
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* data) override {
    return below_.getContextForPointer(data);
  }
  void attachOomRejectionObserver(native::OomRejectionObserver observer) override {
    below_.attachOomRejectionObserver(std::move(observer));
  }
#endif
#if TORCH_VERSION_MINOR >= 13
  void markCaptureBegin(DeviceIndex card) override { below_.markCaptureBegin(card); }
  void markCaptureEnd(DeviceIndex card) override { below_.markCaptureEnd(card); }
  c10::DataPtr allocateWithAddress(size_t bytes, void* address) override {
    return inside(bytes, [&] { return below_.allocateWithAddress(bytes, address); });
  }
#endif

 private:
  CUDAAllocator& below_;
  std::vector<std::unique_ptr<CardLimit>> limits_;  // of all cards
};

// Puts it in front of PyTorch's own allocator, once.
LimitedCudaAllocator& installed() {
  static auto* allocator = [] {
    auto* front = new LimitedCudaAllocator(*native::get());  // for good
    native::allocator.store(front);
    c10::SetAllocator(c10::kCUDA, front);
    return front;
  }();
  return *allocator;
}

}  // namespace
}  // namespace delta

PYBIND11_MODULE(_cuda, m) {
  namespace py = pybind11;
  m.doc() = "PyTorch's allocator of CUDA memory, so that it keeps to a limit.";
  m.attr("built_for_torch") = TORCH_VERSION;
  m.def(
      "limited_allocator",
      [](int card) {
        delta::LimitedAllocator* limit =
            delta::installed().limit_of(static_cast<c10::DeviceIndex>(card));
        return py::capsule(limit, delta::kLimitedAllocatorName);
      },
      py::arg("card"),
      "Put an allocator that can keep to a limit in front of PyTorch's own, if it is not there "
      "yet; "
      "what `_C.set_limited_allocator` takes for that card.");
}

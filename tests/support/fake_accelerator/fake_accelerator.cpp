// A simulated accelerator for tests: torch's PrivateUse1 backend, with one device, "fake:0".
//
// What it is: device memory is host memory, streams are threads with a queue each, operators run
// on the CPU. What it takes over from CUDA is what code for streams and device memory can get
// wrong:
//   - a freed block is at once free for the next allocation on the stream that it was allocated
//     on, and for no other stream; nobody waits for other streams that still use it, unless
//     record_stream named them,
//   - a freed block is overwritten with 0xFF by a task of its own stream ("poison"),
//   - copies between host and device with non_blocking=True, and copies within the device, return
//     at once and run later, in the order of their stream; nothing keeps their memory alive, except
//     host memory that torch was asked to pin,
//   - events order streams; nothing else does.
// All host memory counts as pinned.
//
// What it is not: fast, or a model of the speed of a device. An operator that is neither a copy nor
// a view waits for the current stream (and for no other), then runs to its end in the calling
// thread. Copies that convert or change the layout do the same. There are no sparse, quantized or
// nested tensors, no graphs, and one device only.
//
// Threads: the workers never take the GIL, never hold a tensor and never take the allocator's lock.
// They, and all state, are never destroyed, so that the end of the process meets none of them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool/limited_allocator.h"
#include "segments.h"

namespace fake {
namespace {

using Clock = std::chrono::steady_clock;

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr size_t kTotalWithoutCapacity = size_t{64} << 30;
std::atomic<int64_t> host_waits{0};  // for the device, that a real one would make its host do too

constexpr int kStreams = 33;  // the default stream and the pool; a thread starts on first use

c10::Device the_device() { return c10::Device(kType, 0); }

void sleep_for(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// ---------------------------------------------------------------------------------------- streams

class Recording;

class Stream {
 public:
  void enqueue(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach();
    }
    tasks_.push_back(std::move(task));
    ++enqueued_;
    wake_.notify_one();
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return finished_ == enqueued_;
  }

  // Waits for what was enqueued before the call.
  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t until = enqueued_;
    done_.wait(lock, [&] { return finished_ >= until; });
  }

  void wait_for(Recording& recording);

  std::atomic<double> copy_bytes_per_s{0};
  std::atomic<uint64_t> copied_bytes{0};
  std::atomic<double> copy_s{0};      // a task of the stream adds to it, and nobody else
  std::atomic<double> blocked_s{0};   // waiting for events
  std::atomic<double> lateness_s{0};  // of each task

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return !tasks_.empty(); });
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      sleep_for(lateness_s);
      task();
      task = nullptr;
      lock.lock();
      ++finished_;
      done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<std::function<void()>> tasks_;
  uint64_t enqueued_ = 0, finished_ = 0;
  bool started_ = false;
};

Stream& stream_of(c10::StreamId id) {
  static auto* streams = new std::array<Stream, kStreams>();
  TORCH_CHECK(id >= 0 && id < kStreams, "fake: no stream ", id);
  return (*streams)[id];
}

thread_local c10::StreamId current_id = 0;

Stream& current() { return stream_of(current_id); }

c10::Stream as_c10(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, the_device(), id); }

c10::StreamId next_of_pool() {
  static std::atomic<unsigned> next{0};
  return 1 + next++ % (kStreams - 1);
}

void synchronize_device() {
  for (int id = 0; id < kStreams; ++id) stream_of(id).synchronize();
}

// ----------------------------------------------------------------------------------------- events

// One recording of an event. A wait refers to the recording that was the latest when it was asked
// for, whatever the event records later.
class Recording {
 public:
  void reach() {
    std::lock_guard<std::mutex> lock(mutex_);
    when_ = Clock::now();
    reached_ = true;
    changed_.notify_all();
  }

  bool reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }

  Clock::time_point wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
    return when_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Clock::time_point when_;
};

// On the stream's own thread.
void Stream::wait_for(Recording& recording) {
  const auto begin = Clock::now();
  recording.wait();
  blocked_s = blocked_s + std::chrono::duration<double>(Clock::now() - begin).count();
}

std::shared_ptr<Recording> record_on(Stream& stream) {
  auto recording = std::make_shared<Recording>();
  stream.enqueue([recording] { recording->reach(); });
  return recording;
}

class Event {
 public:
  void record(Stream& stream) {
    auto recording = record_on(stream);
    std::lock_guard<std::mutex> lock(mutex_);
    latest_ = std::move(recording);
  }

  std::shared_ptr<Recording> latest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return latest_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Recording> latest_;
};

Event* as_event(void* event) { return static_cast<Event*>(event); }

// ------------------------------------------------------------------------------------------ guard

std::atomic<bool> device_lost{false};  // asking for the state of an event fails

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static void check(c10::Device device) {
    TORCH_CHECK(device.type() == kType && device.index() <= 0, "fake: no device ", device);
  }

  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device other) const override {
    check(other);
    return the_device();
  }
  c10::Device getDevice() const override { return the_device(); }
  void setDevice(c10::Device other) const override { check(other); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return as_c10(current_id); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_c10(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_c10(next_of_pool());
  }
  c10::Stream getNewStream(c10::Device, int) const override { return as_c10(next_of_pool()); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    stream_of(stream.id());
    return as_c10(std::exchange(current_id, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &stream_of(stream.id());
  }
  bool queryStream(const c10::Stream& stream) const override {
    return stream_of(stream.id()).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    ++host_waits;
    stream_of(stream.id()).synchronize();
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    ++host_waits;
    synchronize_device();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    as_event(*event)->record(stream_of(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    if (auto recording = as_event(event)->latest()) {
      Stream& blocked = stream_of(stream.id());
      blocked.enqueue([recording, &blocked] { blocked.wait_for(*recording); });
    }
  }
  bool queryEvent(void* event) const override {
    TORCH_CHECK(!device_lost, "fake accelerator: the device is lost");
    if (event == nullptr) return true;
    auto recording = as_event(event)->latest();
    return recording == nullptr || recording->reached();
  }
  void synchronizeEvent(void* event) const override {
    TORCH_CHECK(!device_lost, "fake accelerator: the device is lost");
    if (event == nullptr) return;
    ++host_waits;
    if (auto recording = as_event(event)->latest()) recording->wait();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "fake: both events must be recorded before their time is asked");
    auto begin = as_event(first)->latest(), end = as_event(second)->latest();
    TORCH_CHECK(begin->reached() && end->reached(), "fake: both events must be completed");
    return std::chrono::duration<double, std::milli>(end->wait() - begin->wait()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete as_event(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -------------------------------------------------------------------------------------- allocator

struct Block {
  Piece* piece = nullptr;
  std::vector<c10::StreamId> users;  // named by record_stream
  std::vector<std::shared_ptr<Recording>> pending;
};

using c10::CachingDeviceAllocator::DeviceStats;

class Allocator final : public c10::DeviceAllocator, public delta::LimitedAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &Allocator::release, the_device()};
    const size_t bytes = (n + kRounding - 1) / kRounding * kRounding;
    return inside_limit(static_cast<int64_t>(bytes), [&] { return take(n, bytes); });
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Allocator::release; }
  void copy_data(void* to, const void* from, std::size_t count) const override {
    current().synchronize();
    std::memcpy(to, from, count);
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    std::lock_guard<std::mutex> lock(mutex_);
    drop_cache();
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(data.get());
    if (found == live_.end() || found->second.piece->stream == stream.id()) return;
    auto& users = found->second.users;
    if (std::find(users.begin(), users.end(), stream.id()) == users.end()) {
      users.push_back(stream.id());
    }
  }

  DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : all()) (*stat)[0].reset_accumulated();
    stats_.num_alloc_retries = stats_.num_ooms = 0;
  }

  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : all()) (*stat)[0].reset_peak();
  }

  // Cached memory counts as used, as it does when a real device is asked.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t total = capacity_ ? capacity_ : kTotalWithoutCapacity;
    const size_t used = stats_.reserved_bytes[0].current;
    return {total - std::min(used, total), total};
  }

  void set_capacity(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_ = bytes;
  }

  void set_segments(size_t scale, bool expandable) {
    std::lock_guard<std::mutex> lock(mutex_);
    drop_cache();
    segments_.set(scale, expandable);
  }

  void refuse_in(int64_t allocations) {
    std::lock_guard<std::mutex> lock(mutex_);
    refuses_in_ = allocations;
  }

  bool owns(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = live_.upper_bound(const_cast<void*>(data));
    if (after == live_.begin()) return false;
    --after;
    return static_cast<const char*>(data) <
           static_cast<const char*>(after->first) + after->second.piece->bytes;
  }

  std::atomic<bool> poison{true};

 private:
  static void release(void* data);

  c10::DataPtr take(size_t n, size_t bytes) {
    void* data = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (refuses_in_ >= 0 && refuses_in_-- == 0) refuse(bytes);
      process_pending();
      Piece* piece = segments_.from_cache(bytes, current_id);
      if (piece == nullptr) piece = from_system(bytes);
      segments_.cut(*piece, bytes);
      data = piece->data;
      bytes = piece->bytes;  // with a rest that is too small to be cut off
      live_[data].piece = piece;
      stats_.allocated_bytes[0].increase(bytes);
      stats_.active_bytes[0].increase(bytes);
      stats_.requested_bytes[0].increase(n);
      stats_.allocation[0].increase(1);
      stats_.active[0].increase(1);
    }
    report(data, static_cast<int64_t>(bytes));
    return {data, data, &Allocator::release, the_device()};
  }

  void cap_reserved_bytes(int64_t bytes) noexcept override {
    std::lock_guard<std::mutex> lock(mutex_);
    cap_ = static_cast<size_t>(bytes);
  }

  int64_t reserved_bytes() noexcept override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_.reserved_bytes[0].current;
  }

  std::array<c10::CachingAllocator::StatArray*, 6> all() {
    return {&stats_.allocated_bytes, &stats_.active_bytes, &stats_.requested_bytes,
            &stats_.reserved_bytes,  &stats_.allocation,   &stats_.active};
  }

  void report(void* data, int64_t bytes) {
    int64_t allocated, reserved;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      allocated = stats_.allocated_bytes[0].current;
      reserved = stats_.reserved_bytes[0].current;
    }
    c10::reportMemoryUsageToProfiler(data, bytes, allocated, reserved, the_device());
  }

  // What the system has left, or the cap.
  size_t most_bytes() const {
    size_t most = std::numeric_limits<size_t>::max();
    for (const size_t limit : {capacity_, cap_}) {
      if (limit > 0) most = std::min(most, limit - std::min(limit, segments_.reserved_bytes()));
    }
    return most;
  }

  Piece* from_system(size_t bytes) {
    Piece* piece = segments_.from_system(bytes, current_id, most_bytes());
    if (piece == nullptr) {
      ++stats_.num_alloc_retries;
      drop_cache();
      piece = segments_.from_system(bytes, current_id, most_bytes());
    }
    if (piece == nullptr) refuse(bytes);
    count_reserved();
    return piece;
  }

  void count_reserved() {
    auto& counted = stats_.reserved_bytes[0];
    const auto bytes = static_cast<int64_t>(segments_.reserved_bytes());
    if (bytes > counted.current) counted.increase(static_cast<size_t>(bytes - counted.current));
    if (bytes < counted.current) counted.decrease(static_cast<size_t>(counted.current - bytes));
  }

  [[noreturn]] void refuse(size_t bytes) {
    ++stats_.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "fake: out of memory. Tried to allocate ", bytes,
                     " bytes; ", stats_.allocated_bytes[0].current, " bytes are allocated, ",
                     stats_.reserved_bytes[0].current, " reserved, the capacity is ", capacity_,
                     ", the cap ", cap_, ".");
    std::abort();  // for compilers that do not see that the line above throws
  }

  // Memory goes back to the system only when no stream has anything left to do, as with cudaFree.
  void drop_cache() {
    synchronize_device();
    process_pending();
    synchronize_device();  // for the poison of what was pending
    segments_.drop_cache();
    count_reserved();
  }

  void free(void* data) {
    int64_t bytes;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto found = live_.find(data);
      TORCH_INTERNAL_ASSERT(found != live_.end(), "fake: freed what was not allocated");
      Block block = std::move(found->second);
      live_.erase(found);
      bytes = static_cast<int64_t>(block.piece->bytes);
      stats_.allocated_bytes[0].decrease(block.piece->bytes);
      stats_.allocation[0].decrease(1);
      if (block.users.empty()) {
        retire(*block.piece);
      } else {
        for (c10::StreamId id : block.users) block.pending.push_back(record_on(stream_of(id)));
        pending_.push_back(std::move(block));
      }
    }
    report(data, -bytes);
  }

  // The poison is in the queue of the stream before another task of the same stream can get the
  // block.
  void retire(Piece& piece) {
    stats_.active_bytes[0].decrease(piece.bytes);
    stats_.active[0].decrease(1);
    if (poison) {
      char* data = piece.data;
      const size_t bytes = piece.bytes;
      stream_of(piece.stream).enqueue([data, bytes] { std::memset(data, 0xFF, bytes); });
    }
    segments_.take_back(piece);
  }

  void process_pending() {
    for (auto entry = pending_.begin(); entry != pending_.end();) {
      const auto& waits = entry->pending;
      if (std::all_of(waits.begin(), waits.end(), [](auto& wait) { return wait->reached(); })) {
        retire(*entry->piece);
        entry = pending_.erase(entry);
      } else {
        ++entry;
      }
    }
  }

  std::mutex mutex_;
  DeviceStats stats_;
  size_t capacity_ = 0;
  size_t cap_ = 0;           // of a delta::LimitedAllocator; 0: none
  int64_t refuses_in_ = -1;  // allocations that go well before one does not; negative: all go well
  std::map<void*, Block> live_;
  Segments segments_;
  std::list<Block> pending_;  // freed, but a recorded stream is not done
};

Allocator& allocator() {
  static auto* instance = new Allocator();
  return *instance;
}

void Allocator::release(void* data) {
  if (data != nullptr) allocator().free(data);
}

void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const {
  allocator().recordStream(data, stream);
}

const bool allocator_registered = (c10::SetAllocator(kType, &allocator()), true);

// Moves a storage to a block of another size, with what fits of its contents.
void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  c10::DataPtr data = allocator().allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0) {
    current().synchronize();
    std::memcpy(data.get(), storage->data_ptr().get(), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

// -------------------------------------------------------------------------------------- generator

// Holds a generator of the CPU, which is what the operators are given: CPU kernels refuse a
// generator of another device.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator inner)
      : c10::GeneratorImpl(the_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(inner)) {}

  static c10::DeviceType device_type() { return kType; }

  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override {
    const uint64_t seed = c10::detail::getNonDeterministicRandom();
    inner.set_current_seed(seed);
    return seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator inner;

 private:
  Generator* clone_impl() const override { return new Generator(inner.clone()); }
};

const at::Generator& default_generator() {
  static auto* generator =
      new at::Generator(at::make_generator<Generator>(at::detail::createCPUGenerator()));
  return *generator;
}

at::Generator inner_generator(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// While one exists, the default generator of the CPU is in the state of this device's default one:
// for operators that draw random numbers but take no generator (native_dropout).
class BorrowDefaultGenerator {
 public:
  BorrowDefaultGenerator()
      : outer_(at::detail::getDefaultCPUGenerator()),
        inner_(inner_generator(default_generator())),
        saved_(outer_.get_state()) {
    outer_.set_state(inner_.get_state());
  }
  ~BorrowDefaultGenerator() {
    inner_.set_state(outer_.get_state());
    outer_.set_state(saved_);
  }
  BorrowDefaultGenerator(const BorrowDefaultGenerator&) = delete;
  BorrowDefaultGenerator& operator=(const BorrowDefaultGenerator&) = delete;

 private:
  at::Generator outer_, inner_;
  at::Tensor saved_;
};

// ------------------------------------------------------------------------------------------ hooks

// Memory of the CPU's allocator, given back only when the copies that use it are done, as torch's
// own pinned memory is. Host memory that does not come from here has no such protection.
class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    collect();
    auto block = std::make_unique<Block>();
    block->memory = c10::GetCPUAllocator()->allocate(n);
    block->bytes = n;
    void* data = block->memory.get();
    if (n > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      live_[data] = block.get();
    }
    return {data, block.release(), &PinnedAllocator::release, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, std::size_t count) const override {
    std::memcpy(to, from, count);
  }

  bool record_event(void* data, void*, c10::Stream stream) override {
    return protect(data, stream_of(stream.id()));
  }

  // The block that the address lies in, if there is one, outlives what the stream has to do now.
  bool protect(const void* data, Stream& stream) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = live_.upper_bound(data);
    if (after == live_.begin()) return false;
    Block* block = std::prev(after)->second;
    if (static_cast<const char*>(data) >= static_cast<char*>(block->memory.get()) + block->bytes) {
      return false;
    }
    block->uses.push_back(record_on(stream));
    return true;
  }

  void empty_cache() override { collect(); }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Block {
    c10::DataPtr memory;
    size_t bytes = 0;
    std::vector<std::shared_ptr<Recording>> uses;
  };

  static void release(void* context);

  void free(Block* block) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (block->bytes > 0) live_.erase(block->memory.get());
      freed_.emplace_back(block);
    }
    collect();
  }

  // Never called by a worker: giving memory back may run code of another allocator.
  void collect() {
    std::vector<std::unique_ptr<Block>> done;  // destroyed after the lock is given up
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& block : freed_) {
      const auto& uses = block->uses;
      if (std::all_of(uses.begin(), uses.end(), [](auto& use) { return use->reached(); })) {
        done.push_back(std::move(block));
      }
    }
    freed_.remove(nullptr);
  }

  std::mutex mutex_;
  std::map<const void*, Block*> live_;
  std::list<std::unique_ptr<Block>> freed_;
};

PinnedAllocator* pinned_allocator() {
  static auto* instance = new PinnedAllocator();
  return instance;
}

void PinnedAllocator::release(void* context) {
  pinned_allocator()->free(static_cast<Block*>(context));
}

const bool pinned_registered = (at::setHostAllocator(kType, pinned_allocator()), true);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    Guard::check(c10::Device(kType, index));
  }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    setCurrentDevice(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>(at::detail::createCPUGenerator());
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return !allocator().owns(data); }
  at::Device getDeviceFromPtr(void*) const override { return the_device(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

const bool hooks_registered = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// -------------------------------------------------------------------------- aliases on the CPU

bool is_fake(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

at::Tensor tensor_over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) result._set_conj(true);
  if (like.is_neg()) result._set_neg(true);
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

// Tensors of the CPU over the memory of tensors of the device. Arguments that share a storage share
// one here too.
class Aliases {
 public:
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!is_fake(tensor)) return tensor;
    TORCH_CHECK(tensor.layout() == c10::kStrided && !tensor.is_quantized(),
                "fake: only ordinary strided tensors are supported");
    auto same = cpu_of_.find(tensor.unsafeGetTensorImpl());
    if (same != cpu_of_.end()) return same->second;
    at::Tensor cpu = tensor_over(storage_for(tensor.storage()), c10::DispatchKey::CPU, tensor);
    cpu_of_.emplace(tensor.unsafeGetTensorImpl(), cpu);
    originals_.emplace(cpu.unsafeGetTensorImpl(), tensor);
    return cpu;
  }

  bool empty() const { return originals_.empty(); }

  // After the operator: an argument that it resized gets the new size and contents.
  void write_back(const at::Tensor& tensor) {
    if (!is_fake(tensor)) return;
    const at::Tensor& cpu = cpu_of_.at(tensor.unsafeGetTensorImpl());
    auto* impl = tensor.unsafeGetTensorImpl();
    const auto* data = static_cast<const char*>(cpu.storage().data());
    const bool moved = data != tensor.storage().data();
    if (!moved && cpu.sizes() == tensor.sizes() && cpu.strides() == tensor.strides()) return;
    const size_t bytes = cpu.storage().nbytes();
    if (moved) {
      if (bytes > tensor.storage().nbytes()) {
        resize_storage(tensor.storage().unsafeGetStorageImpl(), bytes);
      }
      current().synchronize();
      if (bytes > 0) std::memcpy(tensor.storage().mutable_data(), data, bytes);
    }
    impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }

  // A result of the operator: an argument itself, a view of one, or a new tensor.
  at::Tensor to_device(const at::Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    auto argument = originals_.find(result.unsafeGetTensorImpl());
    if (argument != originals_.end()) return argument->second;
    if (result.layout() != c10::kStrided) return result;
    for (const auto& [original, alias] : storages_) {
      if (alias.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl()) {
        return tensor_over(original, c10::DispatchKey::PrivateUse1, result);
      }
    }
    const at::Tensor dense =
        result.is_non_overlapping_and_dense() && !result.is_conj() && !result.is_neg()
            ? result
            : result.resolve_conj().resolve_neg().contiguous();
    at::Tensor copy = at::detail::empty_strided_generic(
        dense.sizes(), dense.strides(), &allocator(),
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dense.scalar_type());
    if (dense.numel() > 0) {
      current().synchronize();  // the block's poison
      std::memcpy(copy.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
    }
    if (result.unsafeGetTensorImpl()->is_wrapped_number()) {
      copy.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return copy;
  }

 private:
  const c10::Storage& storage_for(const c10::Storage& original) {
    for (const auto& [known, alias] : storages_) {
      if (known.unsafeGetStorageImpl() == original.unsafeGetStorageImpl()) return alias;
    }
    c10::DataPtr data(const_cast<void*>(original.data()), c10::Device(c10::kCPU));
    c10::Storage alias(c10::Storage::use_byte_size_t(), original.nbytes(), std::move(data),
                       c10::GetDefaultCPUAllocator(), /*resizable=*/true);
    storages_.emplace_back(original, std::move(alias));
    return storages_.back().second;
  }

  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // device, CPU
  std::unordered_map<c10::TensorImpl*, at::Tensor> cpu_of_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_;
};

// --------------------------------------------------------------------------------------- fallback

bool is_generator(const c10::Argument& argument) {
  auto type = argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Calls visit for each tensor of a value, and returns the value with what visit returned.
template <typename Visit>
c10::IValue map_tensors(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) return visit(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (const at::Tensor& tensor : value.toTensorVector()) mapped.push_back(visit(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      mapped.push_back(tensor ? std::optional<at::Tensor>(visit(*tensor)) : std::nullopt);
    }
    return mapped;
  }
  return value;
}

// A device's kernel reads no memory of the host, except for scalars, for indices (which are a list
// of optional tensors) and for arguments that belong on the host by definition.
bool may_be_on_host(const c10::OperatorHandle& op, const at::Tensor& tensor) {
  return !tensor.defined() || tensor.dim() == 0 || !tensor.is_cpu() ||
         op.operator_name().name == "aten::_pack_padded_sequence";
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;
  Aliases aliases;
  std::vector<at::Tensor> written;
  bool to_device = false, takes_generator = false, host_argument = false;
  for (size_t i = 0; i < count; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    c10::IValue& value = (*stack)[first + i];
    if (is_generator(argument)) {
      takes_generator = true;
      const at::Generator& given = value.isNone() ? default_generator() : value.toGenerator();
      if (given.device().type() == kType) value = inner_generator(given);
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kType) {
        to_device = true;
        value = c10::Device(c10::kCPU);
      }
    } else {
      const bool writes = is_written(argument);
      const bool indices = value.isOptionalTensorList();
      value = map_tensors(value, [&](const at::Tensor& tensor) {
        if (writes && is_fake(tensor)) written.push_back(tensor);
        if (!indices && !may_be_on_host(op, tensor)) host_argument = true;
        return aliases.to_cpu(tensor);
      });
    }
  }
  TORCH_CHECK(!host_argument || aliases.empty(),
              "Expected all tensors to be on the same device, but ", op.operator_name(),
              " got tensors on the CPU and on the fake device");
  current().synchronize();
  std::optional<BorrowDefaultGenerator> borrowed;
  if (!takes_generator && op.hasTag(at::Tag::nondeterministic_seeded)) borrowed.emplace();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  borrowed.reset();
  for (const at::Tensor& tensor : written) aliases.write_back(tensor);
  if (aliases.empty() && !to_device) return;
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = map_tensors((*stack)[i],
                              [&](const at::Tensor& tensor) { return aliases.to_device(tensor); });
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// ----------------------------------------------------------------------------------------- copies

std::atomic<int64_t> copies_done{0};

void enqueue_copy(void* to, const void* from, size_t bytes, bool counts) {
  Stream* stream = &current();
  const double speed = stream->copy_bytes_per_s;
  const double pause = speed > 0 ? static_cast<double>(bytes) / speed / 2 : 0;
  stream->enqueue([=] {
    const Clock::time_point begin = Clock::now();
    sleep_for(pause);
    std::memmove(to, from, bytes);  // the two may overlap
    sleep_for(pause);
    stream->copied_bytes += bytes;
    stream->copy_s = stream->copy_s + std::chrono::duration<double>(Clock::now() - begin).count();
    if (counts) ++copies_done;
  });
  pinned_allocator()->protect(to, *stream);
  pinned_allocator()->protect(from, *stream);
}

bool is_plain_copy(const at::Tensor& from, const at::Tensor& to) {
  return from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() &&
         from.layout() == c10::kStrided && to.layout() == c10::kStrided &&
         from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg() &&
         from.is_non_overlapping_and_dense() && to.is_non_overlapping_and_dense() &&
         (from.strides() == to.strides() || (from.is_contiguous() && to.is_contiguous()));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0 || from.numel() == 0 || from.is_same(to)) return to;
  if (is_plain_copy(from, to)) {
    const bool within = is_fake(from) && is_fake(to);
    const bool waits = !within && !non_blocking;
    enqueue_copy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes(), !waits);
    if (waits) {
      ++host_waits;
      current().synchronize();
    }
    return to;
  }
  host_waits += is_fake(from) && is_fake(to) ? 0 : 1;
  current().synchronize();
  Aliases aliases;
  aliases.to_cpu(to).copy_(aliases.to_cpu(from));
  return to;
}

// ---------------------------------------------------------------------- factories, views, storages

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> where,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  Guard::check(c10::device_or_default(where));
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "fake: strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "fake: only tensors of the CPU are pinned");
  return at::detail::empty_generic(size, &allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> where, std::optional<bool> pinned) {
  Guard::check(c10::device_or_default(where));
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "fake: strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "fake: only tensors of the CPU are pinned");
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

at::Tensor view_with(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                     int64_t offset) {
  at::Tensor result = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return result;
}

void check_in_bounds(const c10::Storage& storage, at::IntArrayRef size, at::IntArrayRef stride,
                     size_t itemsize, int64_t offset) {
  const size_t bytes = at::detail::computeStorageNbytes(size, stride, itemsize, offset);
  TORCH_CHECK(offset >= 0 && (bytes <= storage.nbytes() ||
                              at::detail::computeStorageNbytes(size, stride, itemsize) == 0),
              "fake: sizes ", size, " with strides ", stride, " and offset ", offset,
              " are out of bounds for storage of size ", storage.nbytes());
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  const int64_t from = offset.value_or(self.storage_offset());
  check_in_bounds(self.storage(), size, stride, self.itemsize(), from);
  return view_with(self, size, stride, from);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  const at::DimVector inferred = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(),
              "view size is not compatible with input tensor's size and stride (at least one "
              "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return view_with(self, inferred, *stride, self.storage_offset());
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return view_with(self, size, stride, self.storage_offset());
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    const size_t bytes =
        at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
    if (c10::multiply_integers(size) > 0 && bytes > self.storage().nbytes()) {
      resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
    }
    impl->set_sizes_contiguous(size);
  }
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  ++host_waits;
  current().synchronize();
  Aliases aliases;
  return aliases.to_cpu(self).item();
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
  TORCH_CHECK(source.device_type() == kType, "fake: a storage of another device, ",
              source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  at::DimVector contiguous;
  if (stride.data() == nullptr && !size.empty()) {
    contiguous.resize(size.size());
    int64_t step = 1;
    for (size_t i = size.size(); i-- > 0; step *= std::max<int64_t>(size[i], 1)) {
      contiguous[i] = step;
    }
    stride = contiguous;
  }
  impl->set_sizes_and_strides(size, stride, offset);
  const size_t bytes = at::detail::computeStorageNbytes(size, stride, self.itemsize(), offset);
  if (self.numel() > 0 && bytes > self.storage().nbytes()) {
    resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  }
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(),
                     source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator().allocate(0), &allocator(),
                       true);
  return set_storage(self, std::move(storage), 0, {0}, {1});
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

// Torch sends convolutions to operators of their own on a device that it does not know.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  current().synchronize();
  Aliases aliases;
  std::optional<at::Tensor> cpu_bias;
  if (bias && bias->defined()) cpu_bias = aliases.to_cpu(*bias);
  return aliases.to_device(at::convolution(aliases.to_cpu(input), aliases.to_cpu(weight), cpu_bias,
                                           stride, padding, dilation, transposed, output_padding,
                                           groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  current().synchronize();
  Aliases aliases;
  const std::array<int64_t, 1> bias_size{grad.size(1)};
  auto [input_grad, weight_grad, bias_grad] =
      at::convolution_backward(aliases.to_cpu(grad), aliases.to_cpu(input), aliases.to_cpu(weight),
                               mask[2] ? at::OptionalIntArrayRef(bias_size) : std::nullopt, stride,
                               padding, dilation, transposed, output_padding, groups, mask);
  return {aliases.to_device(input_grad), aliases.to_device(weight_grad),
          aliases.to_device(bias_grad)};
}

// Torch takes the fused cell for granted on this kind of device. The workspace holds the gates
// after their activation.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell,
    const std::optional<at::Tensor>& input_bias, const std::optional<at::Tensor>& hidden_bias) {
  current().synchronize();
  Aliases aliases;
  at::Tensor gates = aliases.to_cpu(input_gates) + aliases.to_cpu(hidden_gates);
  for (const auto& bias : {input_bias, hidden_bias}) {
    if (bias && bias->defined()) gates += aliases.to_cpu(*bias);
  }
  auto parts = gates.chunk(4, 1);
  for (int i : {0, 1, 3}) parts[i].sigmoid_();
  parts[2].tanh_();
  const at::Tensor next = parts[1] * aliases.to_cpu(cell) + parts[0] * parts[2];
  const at::Tensor out = parts[3] * next.tanh();
  return {aliases.to_device(out), aliases.to_device(next), aliases.to_device(gates)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const std::optional<at::Tensor>& out_grad, const std::optional<at::Tensor>& next_grad,
    const at::Tensor& cell, const at::Tensor& next, const at::Tensor& gates, bool has_bias) {
  const bool has_out = out_grad && out_grad->defined(),
             has_next = next_grad && next_grad->defined();
  if (!has_out && !has_next) return {};
  current().synchronize();
  Aliases aliases;
  auto parts = aliases.to_cpu(gates).chunk(4, 1);
  const at::Tensor squashed = aliases.to_cpu(next).tanh();
  at::Tensor grad = at::zeros_like(squashed), last = at::zeros_like(squashed);
  if (has_next) grad += aliases.to_cpu(*next_grad);
  if (has_out) {
    const at::Tensor given = aliases.to_cpu(*out_grad);
    grad += given * parts[3] * (1 - squashed * squashed);
    last = given * squashed * parts[3] * (1 - parts[3]);
  }
  const at::Tensor all = at::cat({grad * parts[2] * parts[0] * (1 - parts[0]),
                                  grad * aliases.to_cpu(cell) * parts[1] * (1 - parts[1]),
                                  grad * parts[0] * (1 - parts[2] * parts[2]), last},
                                 1);
  at::Tensor bias_grad;
  if (has_bias) bias_grad = all.sum(0);
  return {aliases.to_device(all), aliases.to_device(grad * parts[1]), aliases.to_device(bias_grad)};
}

// Keeps for backward what a card's kernel does: both gates, the new content, the old one, and what
// came of that.
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates,
                                            const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden,
                                            const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  current().synchronize();
  Aliases aliases;
  const auto with_bias = [&](const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
    at::Tensor sum = aliases.to_cpu(gates);
    return (bias && bias->defined() ? sum + aliases.to_cpu(*bias) : sum).chunk(3, 1);
  };
  const auto given = with_bias(input_gates, input_bias);
  const auto kept = with_bias(hidden_gates, hidden_bias);
  const at::Tensor old = aliases.to_cpu(hidden);
  const at::Tensor reset = (given[0] + kept[0]).sigmoid(), stay = (given[1] + kept[1]).sigmoid();
  const at::Tensor made = (given[2] + reset * kept[2]).tanh();
  const at::Tensor out = made + stay * (old - made);
  return {aliases.to_device(out), aliases.to_device(at::cat({reset, stay, made, old, kept[2]}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& out_grad, const at::Tensor& workspace, bool has_bias) {
  current().synchronize();
  Aliases aliases;
  const at::Tensor grad = aliases.to_cpu(out_grad);
  const auto parts = aliases.to_cpu(workspace).chunk(5, 1);
  const at::Tensor &reset = parts[0], &stay = parts[1], &made = parts[2];
  const at::Tensor made_grad = grad * (1 - stay) * (1 - made * made);
  const at::Tensor reset_grad = made_grad * parts[4] * reset * (1 - reset);
  const at::Tensor stay_grad = grad * (parts[3] - made) * stay * (1 - stay);
  const at::Tensor input = at::cat({reset_grad, stay_grad, made_grad}, 1);
  const at::Tensor hidden = at::cat({reset_grad, stay_grad, made_grad * reset}, 1);
  at::Tensor input_bias, hidden_bias;
  if (has_bias) {
    input_bias = input.sum(0);
    hidden_bias = hidden.sum(0);
  }
  return {aliases.to_device(input), aliases.to_device(hidden), aliases.to_device(grad * stay),
          aliases.to_device(input_bias), aliases.to_device(hidden_bias)};
}

// A card counts whole numbers too; the CPU does not.
at::Tensor histc(const at::Tensor& x, int64_t bins, const at::Scalar& least,
                 const at::Scalar& most) {
  current().synchronize();
  Aliases aliases;
  const at::Tensor values = aliases.to_cpu(x);
  const bool whole = at::isIntegralType(values.scalar_type(), /*includeBool=*/false);
  const at::Tensor counts = at::histc(whole ? values.to(at::kDouble) : values, bins, least, most);
  return aliases.to_device(whole ? counts.to(values.scalar_type()) : counts);
}

// Zeros that take no memory.
class NoMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t) override { return {nullptr, the_device()}; }
  void copy_data(void*, const void*, std::size_t) const override {}
};

at::Tensor efficientzerotensor(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
                               std::optional<c10::Layout>, std::optional<c10::Device>,
                               std::optional<bool>) {
  static NoMemory no_memory;
  return at::detail::empty_generic(
      sizes, &no_memory,
      c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor}),
      c10::dtype_or_default(dtype), std::nullopt);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("histc", histc);
  m.impl("_efficientzerotensor", efficientzerotensor);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_", set_nothing);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("is_set_to", is_set_to);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  // These would be put together from other operators, with a result that differs in the last bits.
  for (const char* name : {"native_layer_norm", "native_group_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

// As an extension may be: it writes to `counter` and draws, of which its schema says nothing,
// before it takes `bytes` of device memory past the dispatcher.
at::Tensor reticent(const at::Tensor& x, const at::Tensor& counter, int64_t bytes) {
  counter.add_(1.0);
  const at::Tensor mask = at::bernoulli(x, 0.5);
  const c10::DataPtr scratch = allocator().allocate(static_cast<size_t>(bytes));
  return x.mul(mask);
}

TORCH_LIBRARY(fake, m) { m.def("reticent(Tensor x, Tensor counter, int bytes) -> Tensor"); }
TORCH_LIBRARY_IMPL(fake, PrivateUse1, m) { m.impl("reticent", reticent); }

// A copy resolves lazy conjugation and negation itself. Torch would resolve them with a clone
// first, which is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace fake

// Autocast: torch's own lists of the operators that it converts. They are written for this
// namespace.
namespace at::autocast {
namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define TO_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TO_FLOAT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TO_FLOAT_BY_ARGUMENT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TO_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(TO_LOWER_PRECISION)
  AT_FORALL_FP32(TO_FLOAT)
  AT_FORALL_FP32_SET_OPT_DTYPE(TO_FLOAT_BY_ARGUMENT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(TO_WIDEST)
}

}  // namespace
}  // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  using namespace fake;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("set_poison", [](bool on) { allocator().poison = on; });
  m.def("set_copy_bytes_per_s", [](double speed, int64_t id) {
    for (int i = 0; i < kStreams; ++i) {
      if (id < 0 || i == id) stream_of(i).copy_bytes_per_s = speed;
    }
  });
  m.def("set_lateness", [](double seconds, int64_t id) { stream_of(id).lateness_s = seconds; });
  m.def("set_segments",
        [](size_t scale, bool expandable) { allocator().set_segments(scale, expandable); });
  m.def("set_lost", [](bool lost) { device_lost = lost; });
  m.def("delay", [](int64_t id, double seconds) {
    stream_of(id).enqueue([seconds] { sleep_for(seconds); });
  });
  m.def("set_capacity", [](size_t bytes) { allocator().set_capacity(bytes); }, no_gil);
  m.def("limited_allocator", [] {
    delta::LimitedAllocator* limited = &allocator();
    return py::capsule(limited, delta::kLimitedAllocatorName);
  });
  m.def("refuse_allocation", [](int64_t after) { allocator().refuse_in(after); }, no_gil);
  m.def("streams", [] { return kStreams; });
  m.def(
      "allocated_bytes", [] { return allocator().getDeviceStats(0).allocated_bytes[0].current; },
      no_gil);
  m.def("copied_bytes", [](int64_t id) { return stream_of(id).copied_bytes.load(); });
  m.def("copy_s", [](int64_t id) { return stream_of(id).copy_s.load(); });
  m.def("copies", [] { return copies_done.load(); });
  m.def("waits", [] { return host_waits.load(); });
  m.def("blocked_s", [](int64_t id) { return stream_of(id).blocked_s.load(); });
  m.def("current_stream_id", [] { return current_id; });
  m.def("synchronize", [] { synchronize_device(); }, no_gil);
  m.def("default_generator", [] { return default_generator(); });
}

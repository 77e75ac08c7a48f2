#include "state/values.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/COW.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "util/streams.h"

namespace delta {
namespace {

// Note: a chain of values and records can be as long as the program; letting it die by recursion
// overflows the stack at about 200,000 ops. The last reference to a record found while another one
// dies is put on this list instead, and the outermost death works it off.
struct Graveyard {
  std::vector<c10::intrusive_ptr<OpRecord>> waiting;
  bool draining = false;
};
void bury(c10::intrusive_ptr<OpRecord>&& record) {
  if (!record) {
    return;
  }
  auto& yard = per_thread<Graveyard>();
  yard.waiting.push_back(std::move(record));
  if (yard.draining) {
    return;
  }
  yard.draining = true;
  while (!yard.waiting.empty()) {
    auto last = std::move(yard.waiting.back());
    yard.waiting.pop_back();
    last.reset();
  }
  yard.draining = false;
}

std::atomic<int64_t> g_live_records{0};

}  // namespace

Trash& thread_trash() { return per_thread<Trash>(); }

void Trash::take(c10::Storage&& storage) {
  if (storage && locked) {
    storages.push_back(std::move(storage));
  } else {
    storage = c10::Storage();
  }
}

void Trash::take(c10::IValue&& value) {
  if (locked) {
    values.push_back(std::move(value));
  } else {
    value = c10::IValue();
  }
}

int64_t live_records() { return g_live_records.load(); }

Value::~Value() {
  if (anchor) {
    thread_trash().take(std::move(anchor));
  }
  if (producer) {
    if (output >= 0) {
      producer->outputs[output].value = nullptr;
    }
    bury(std::move(producer));
  }
}

OpRecord::OpRecord() { g_live_records.fetch_add(1, std::memory_order_relaxed); }

OpRecord::~OpRecord() {
  g_live_records.fetch_sub(1, std::memory_order_relaxed);
  if (keeps_objects) {
    for (auto& x : arguments) {
      thread_trash().take(std::move(x));
    }
  }
}

c10::intrusive_ptr<Value> make_source(int64_t bytes) {
  auto value = c10::make_intrusive<Value>();
  value->bytes = bytes;
  value->input = true;
  return value;
}

bool Value::is_alive() const {
  return home != nullptr && home->residency() == Residency::Resident &&
         (home->strong || !home->weak.expired());
}

bool Value::lies_in(const c10::StorageImpl& storage) const {
  return !watched ||
         hash_of(storage.data(),
                 std::min<int64_t>(bytes, static_cast<int64_t>(storage.nbytes()))) == hash;
}

namespace {

// The moves that there are. A page that is lost stays so: nothing has its bytes, or can make them.
constexpr bool is_legal(Residency from, Residency to) {
  switch (from) {
    case Residency::Resident:
      return to == Residency::Dropped || to == Residency::Swapped;
    case Residency::Dropped:
      return to == Residency::Resident;
    case Residency::Swapped:  // Dropped, here and below: the copy failed, and there is a recipe
      return to == Residency::SwappingIn || to == Residency::Dropped || to == Residency::Lost;
    case Residency::SwappingIn:
      return to == Residency::Resident || to == Residency::Dropped || to == Residency::Lost;
    case Residency::Lost:
      return false;
  }
  return false;
}

}  // namespace

void Page::move_to(Residency next) {
  TORCH_INTERNAL_ASSERT(is_legal(residency_, next), "delta_runtime: page ", id, " cannot go from ",
                        static_cast<int>(residency_), " to ", static_cast<int>(next));
  residency_ = next;
}

Page::~Page() {
  if (strong) {
    thread_trash().take(std::move(strong));
  }
  if (current && current->home == this) {
    current->home = nullptr;
  }
}

void Page::set_current(c10::intrusive_ptr<Value> value) {
  if (current && current->home == this) {
    current->home = nullptr;
  }
  current = std::move(value);
  current->home = this;
  ++epoch;
}

void Page::take_version(const c10::VariableVersion& counter) {
  versions.take(counter);
  if (!current->producer) {
    current->versions = versions;
  }
}

void Page::look_at(const c10::StorageImpl& storage) {
  bytes = static_cast<int64_t>(storage.nbytes());
  // A storage that was copied lazily moves by itself when it is written to.
  const bool lazy = c10::impl::cow::is_cow_data_ptr(storage.data_ptr());
  data = lazy ? nullptr : storage.data_ptr().get();
}

bool Page::lies_over(const void* other, int64_t other_bytes) const {
  const auto* first = static_cast<const char*>(data);
  const auto* second = static_cast<const char*>(other);
  return first != nullptr && second != nullptr && first < second + other_bytes &&
         second < first + bytes && residency_ == Residency::Resident && !weak.expired();
}

bool Page::was_moved(const c10::StorageImpl& storage) const {
  const bool unknown = data == nullptr && bytes > 0;  // see look_at
  if (unknown || (storage.data() == data && static_cast<int64_t>(storage.nbytes()) == bytes)) {
    return false;
  }
  return sabotage() != Sabotage::ResizesUnseen;
}

bool Page::content_unchanged() const {
  return versions.unchanged() || sabotage() == Sabotage::AliasVersionsUnseen;
}

bool Page::is_alone() const {
  const bool flying = below.copy && below.copy->transfer->device;
  return strong.use_count() == (flying ? 2 : 1);
}

// Memory goes back to the stream that it was allocated on, at once. Nobody knows how far another
// stream is that uses it too, so such a page stays until autograd lets it go.
void Page::note_stream(c10::Device device) {
  if (device.is_cpu()) {
    return;
  }
  const c10::StreamId current_stream = current_stream_id(device);
  many_streams |= stream != kNoStream && stream != current_stream;
  stream = current_stream;
}

namespace {

// Two counters are one if they share their count: the only member is the pointer to it.
static_assert(sizeof(c10::VariableVersion) == sizeof(void*), "a version counter is one pointer");
const void* identity_of(const c10::VariableVersion& counter) {
  const void* identity;
  std::memcpy(&identity, static_cast<const void*>(&counter), sizeof(identity));
  return identity;
}

}  // namespace

void Versions::take(const c10::VariableVersion& counter) {
  bool known = false;
  for (auto& each : counts_) {
    each.version = static_cast<int64_t>(each.counter.current_version());
    known |= identity_of(each.counter) == identity_of(counter);
  }
  if (!known) {
    add(counter);
  }
}

// Aliases come and go (an optimizer makes a `.data` at each step); the first and the latest matter.
void Versions::add(const c10::VariableVersion& counter) {
  constexpr size_t most = 8;
  if (counts_.size() >= most) {
    counts_.erase(counts_.begin() + 1);
  }
  counts_.push_back({counter, static_cast<int64_t>(counter.current_version())});
}

bool Versions::moved(const c10::VariableVersion& counter) {
  const auto now = static_cast<int64_t>(counter.current_version());
  for (auto& each : counts_) {
    if (identity_of(each.counter) == identity_of(counter)) {
      return now > each.version;
    }
  }
  add(counter);
  return false;
}

std::string Versions::text() const {
  for (const auto& each : counts_) {
    const auto now = static_cast<int64_t>(each.counter.current_version());
    if (now > each.version) {
      return "Expected version " + std::to_string(each.version) + ", found " + std::to_string(now) +
             ". ";
    }
  }
  return "";
}

ViewSpec ViewSpec::of(const at::Tensor& t) {
  ViewSpec v;
  v.geometry.set_sizes(t.sizes());
  v.geometry.set_strides(t.strides());
  v.offset = t.storage_offset();
  v.dtype = t.dtype();
  v.conj = t.is_conj();
  v.neg = t.is_neg();
  v.requires_grad = t.requires_grad();
  return v;
}

bool ViewSpec::is_of(const at::Tensor& t) const {
  return offset == t.storage_offset() && dtype == t.dtype() &&
         geometry.sizes_arrayref() == t.sizes() && geometry.strides_arrayref() == t.strides() &&
         conj == t.is_conj() && neg == t.is_neg();
}

int64_t ViewSpec::storage_bytes() const {
  return static_cast<int64_t>(at::detail::computeStorageNbytes(
      geometry.sizes_arrayref(), geometry.strides_arrayref(), dtype.itemsize(), offset));
}

at::Tensor ViewSpec::over(const c10::Storage& storage, c10::Device device) const {
  auto key = c10::computeDispatchKey(c10::typeMetaToScalarType(dtype), c10::kStrided, device);
  auto impl =
      c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), dtype);
  impl->set_sizes_and_strides(geometry.sizes_arrayref(), geometry.strides_arrayref(), offset);
  at::Tensor t(std::move(impl));
  if (conj) {
    t._set_conj(true);
  }
  if (neg) {
    t._set_neg(true);
  }
  return t;
}

bool is_plain(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage() || t.layout() != c10::kStrided) {
    return false;
  }
  const auto keys = t.key_set();
  if (keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::Functionalize) ||
      keys.has(c10::DispatchKey::FuncTorchGradWrapper) ||
      keys.has(c10::DispatchKey::FuncTorchBatched) || keys.has(c10::DispatchKey::ZeroTensor) ||
      t.is_quantized() || t.is_meta() || t.is_nested()) {  // a nested one has no sizes
    return false;
  }
  return !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

}  // namespace delta

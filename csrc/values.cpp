#include "values.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DispatchKeySet.h>

#include <atomic>
#include <cstring>

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
  version_counter = counter;
  version = static_cast<int64_t>(counter.current_version());
  version_known = true;
  if (!current->producer) {
    current->version_counter = counter;
    current->version = version;
  }
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
      t.is_quantized() || t.is_meta()) {
    return false;
  }
  return !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

at::Tensor bytes_of(const c10::Storage& storage) {
  auto key = c10::computeDispatchKey(at::kByte, c10::kStrided, storage.device());
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                   caffe2::TypeMeta::Make<uint8_t>());
  impl->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return at::Tensor(std::move(impl));
}

void hash_bytes(const void* data, int64_t bytes, uint64_t out[2]) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t a = 0x9ae16a3b2f90404fULL ^ static_cast<uint64_t>(bytes);
  uint64_t b = 0xc3a5c85c97cb3127ULL;
  int64_t i = 0;
  for (; i + 16 <= bytes; i += 16) {
    uint64_t x;
    uint64_t y;
    std::memcpy(&x, p + i, 8);
    std::memcpy(&y, p + i + 8, 8);
    a = (a ^ x) * 0x9fb21c651e98df25ULL;
    a ^= a >> 29;
    b = (b ^ y) * 0xd6e8feb86659fd93ULL;
    b ^= b >> 31;
  }
  uint64_t tail[2] = {0, 0};
  std::memcpy(tail, p + i, static_cast<size_t>(bytes - i));
  out[0] = mix(a ^ tail[0], b);
  out[1] = mix(b ^ tail[1], out[0]);
}

}  // namespace delta

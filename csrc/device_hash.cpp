#include "device_hash.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>

#include "replay.h"
#include "stream_lane.h"
#include "values.h"

namespace delta {
namespace {

constexpr int64_t kWord = 8;
constexpr int64_t kRows = 1024;      // of a chunk of the table
constexpr size_t kMostWeights = 64;  // of other shapes and streams; they are made again
constexpr int64_t kKeys[] = {0x1e3779b97f4a7c15, -0x40a7b892e31b1a47, -0x6b2fb644ecceee15};

at::Tensor over(const c10::Storage& storage, c10::ScalarType type, at::IntArrayRef sizes,
                int64_t offset) {
  const auto key = c10::computeDispatchKey(type, c10::kStrided, storage.device());
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                   c10::scalarTypeToTypeMeta(type));
  impl->set_sizes_contiguous(sizes);
  impl->set_storage_offset(offset);
  return at::Tensor(std::move(impl));
}

// Numbers that look random, the same in every process, of (2, columns + rows).
at::Tensor make_weights(c10::Device device, int64_t columns, int64_t rows) {
  const int64_t each = columns + rows;
  at::Tensor w = at::arange(1, 2 * each + 1, at::TensorOptions().dtype(at::kLong).device(device));
  for (const int64_t key : kKeys) {
    w = w.mul(key);
    w = w.bitwise_xor(at::bitwise_right_shift(w, 29));
  }
  w = w.bitwise_and(-2).view({2, each});
  w.select(0, 0).narrow(0, 0, columns).add_(1);
  w.select(0, 1).narrow(0, columns, rows).add_(1);
  return w;
}

}  // namespace

int32_t DeviceHashes::take_row(c10::StreamId stream) {
  {
    std::lock_guard<std::mutex> guard(free_mutex_);
    auto& rows = free_[stream];
    if (!rows.empty()) {
      const int32_t row = rows.back();
      rows.pop_back();
      return row;
    }
  }
  at::Tensor words = at::zeros({kRows, 2}, at::TensorOptions().dtype(at::kLong).device(device_));
  const auto first = static_cast<int32_t>(kRows * static_cast<int64_t>(chunks_.size()));
  chunks_.push_back({std::move(words), stream});
  std::lock_guard<std::mutex> guard(free_mutex_);
  stream_of_.push_back(stream);
  auto& rows = free_[stream];
  for (auto row = static_cast<int32_t>(first + kRows - 1); row > first; --row) {
    rows.push_back(row);
  }
  return first;
}

void DeviceHashes::give_back(int32_t row) {
  if (row >= 0) {
    std::lock_guard<std::mutex> guard(free_mutex_);
    free_[stream_of_[static_cast<size_t>(row / kRows)]].push_back(row);
  }
}

const at::Tensor& DeviceHashes::weights_of(c10::StreamId stream, Shape shape) {
  const auto key = std::make_pair(stream, shape);
  const auto known = weights_.find(key);
  if (known != weights_.end()) {
    return known->second;
  }
  if (weights_.size() >= kMostWeights) {
    weights_.clear();
  }
  return weights_.emplace(key, make_weights(device_, shape.first, shape.second)).first->second;
}

int32_t DeviceHashes::hash(const c10::Storage& storage, c10::StreamId stream) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  if (bytes == 0 || reinterpret_cast<uintptr_t>(storage.data()) % kWord != 0) {
    return -1;
  }
  const c10::OptionalDeviceGuard device(device_);
  const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, device_, stream));
  Quiet quiet;
  at::AutoDispatchBelowADInplaceOrView below;
  std::lock_guard<std::mutex> guard(mutex_);
  int32_t row = -1;
  try {
    row = take_row(stream);
    const int64_t words = bytes / kWord;
    int64_t columns = 1;
    while (columns * columns < words) {
      columns *= 2;
    }
    const int64_t rows = words / columns;
    const int64_t left = words - rows * columns;
    const int64_t tail = bytes % kWord;
    const int64_t in_columns = (rows > 0 ? columns : 0) + left + tail;
    const int64_t all = in_columns + rows;
    // Room for all that comes in between, used by one hash after the other; no shape is empty.
    at::Tensor& room = weights_[{stream, {0, 0}}];
    if (!room.defined() || room.numel() < 4 * all) {
      room = at::Tensor();
      room = at::empty({4 * all}, at::TensorOptions().dtype(at::kLong).device(device_));
    }
    const c10::Storage space = room.storage();
    const auto part = [&](at::IntArrayRef sizes, int64_t first) {
      return over(space, at::kLong, sizes, first);
    };
    if (rows > 0) {
      const at::Tensor square = over(storage, at::kLong, {rows, columns}, 0);
      at::Tensor of_columns = part({columns}, 0);
      at::Tensor of_rows = part({rows}, in_columns);
      at::sum_out(of_columns, square, 0);
      at::sum_out(of_rows, square, 1);
    }
    if (left > 0) {
      part({left}, in_columns - left - tail)
          .copy_(over(storage, at::kLong, {left}, rows * columns));
    }
    if (tail > 0) {
      part({tail}, in_columns - tail).copy_(over(storage, at::kByte, {tail}, kWord * words));
    }
    at::Tensor sums = part({all}, 0);
    at::Tensor mixed = part({all}, all);
    at::Tensor weighted = part({2, all}, 2 * all);
    at::bitwise_right_shift_out(mixed, sums, 32);
    mixed.add_(sums);
    at::mul_out(weighted, weights_of(stream, {in_columns, rows}), mixed);
    const auto& chunk = chunks_[static_cast<size_t>(row / kRows)].words;
    at::Tensor out = over(chunk.storage(), at::kLong, {2}, 2 * (row % kRows));
    at::sum_out(out, weighted, 1);
    return row;
  } catch (const std::exception&) {  // no memory, most likely
    give_back(row);
    return -1;
  }
}

std::vector<Hash128> DeviceHashes::read() {
  const c10::OptionalDeviceGuard device(device_);
  Quiet quiet;
  at::AutoDispatchBelowADInplaceOrView below;
  std::lock_guard<std::mutex> guard(mutex_);
  const c10::StreamId current = current_stream_id(device_);
  std::vector<at::Tensor> all;
  std::vector<c10::StreamId> waited{current};
  for (const auto& chunk : chunks_) {
    if (std::find(waited.begin(), waited.end(), chunk.stream) == waited.end()) {
      order_after_stream(device_, chunk.stream);
      waited.push_back(chunk.stream);
    }
    all.push_back(chunk.words);
  }
  if (all.empty()) {
    return {};
  }
  const at::Tensor there = all.size() == 1 ? all.front() : at::cat(all);
  at::Tensor here = at::empty(there.sizes(), at::TensorOptions().dtype(at::kLong));
  here.copy_(there);
  std::vector<Hash128> hashes(static_cast<size_t>(there.size(0)));
  static_assert(sizeof(Hash128) == 2 * kWord, "a row of the table is a hash");
  std::memcpy(hashes.data(), here.const_data_ptr(), hashes.size() * sizeof(Hash128));
  return hashes;
}

}  // namespace delta

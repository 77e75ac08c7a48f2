#include "rebuild/device_hash.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_right_shift.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>

#include "rebuild/quiet.h"
#include "state/values.h"
#include "util/gil.h"
#include "util/streams.h"

namespace delta {
namespace {

constexpr int64_t kWord = 8;
constexpr int64_t kRows = 1024;          // of a chunk of the table
constexpr int64_t kShare = 512;          // of the budget: what the room takes, on each stream
constexpr int64_t kLeastRoom = 1 << 13;  // words
constexpr int64_t kMostRoom = 1 << 22;
constexpr int64_t kWeightsOfRoom = 8;  // so many words of room for one weight of each kind
constexpr int64_t kKinds = 4;
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

// Odd numbers that look random, of (kinds, most). Each is the same in every process and does not
// depend on how many there are.
at::Tensor make_weights(c10::Device device, int64_t most) {
  const auto options = at::TensorOptions().dtype(at::kLong).device(device);
  at::Tensor w = at::arange(1, kKinds * most + 1, options);
  at::Tensor room = at::empty_like(w);
  for (const int64_t key : kKeys) {
    w.mul_(key);
    at::bitwise_right_shift_out(room, w, 29);
    w.bitwise_xor_(room);
  }
  w.bitwise_or_(1);
  return w.view({most, kKinds}).t().contiguous();
}

// t becomes t * weights, and that has its upper half added to it.
void mix_into(at::Tensor& t, const at::Tensor& of, const at::Tensor& weights, at::Tensor& room) {
  at::mul_out(t, of, weights);
  at::bitwise_right_shift_out(room, t, 32);
  t.add_(room);
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

DeviceHashes::DeviceHashes(c10::Device device, int64_t budget_bytes)
    : device_(device),
      room_words_(std::clamp(budget_bytes / kWord / kShare, kLeastRoom, kMostRoom)) {}

void DeviceHashes::take_weights(Room& room, int64_t sums) {
  if (!room.weights.defined() || room.weights.size(1) < sums) {
    int64_t most = room_words_ / kWeightsOfRoom;
    while (most < sums) {
      most *= 2;
    }
    room.weights = make_weights(device_, most);
  }
}

// At least so many words. What there was stays if there is no memory for more.
void DeviceHashes::take_space(Room& room, int64_t least) {
  if (room.space.defined() && room.space.numel() >= least) {
    return;
  }
  const auto options = at::TensorOptions().dtype(at::kLong).device(device_);
  if (least < room_words_) {
    try {
      room.space = at::empty({room_words_}, options);
      return;
    } catch (const c10::OutOfMemoryError&) {  // for that much
    }
  }
  room.space = at::empty({least}, options);
}

void DeviceHashes::reserve(c10::StreamId stream) {
  const c10::OptionalDeviceGuard device(device_);
  const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, device_, stream));
  const Quiet quiet;
  const WithoutRescue at_once;
  at::AutoDispatchBelowADInplaceOrView below;
  std::lock_guard<std::timed_mutex> guard(mutex_);
  Room& room = rooms_[stream];
  if (room.space.defined()) {
    return;
  }
  try {
    take_space(room, kLeastRoom);
    take_weights(room, 1);
    give_back(take_row(stream));
  } catch (const c10::OutOfMemoryError&) {  // there may be some when a value is hashed
  }
}

int32_t DeviceHashes::hash(const c10::Storage& storage, c10::StreamId stream) {
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  if (bytes == 0) {
    return -1;
  }
  const bool aligned = reinterpret_cast<uintptr_t>(storage.data()) % kWord == 0;
  const at::ScalarType word = aligned ? at::kLong : at::kByte;
  const c10::OptionalDeviceGuard device(device_);
  const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, device_, stream));
  const Quiet quiet;
  const WithoutRescue at_once;
  at::AutoDispatchBelowADInplaceOrView below;
  std::unique_lock<std::timed_mutex> guard(mutex_, std::defer_lock);
  if (!inside_allocation()) {
    guard.lock();
  } else if (!guard.try_lock_for(gil_patience())) {
    return -1;  // who has it may wait for what this thread holds (util/gil.h)
  }
  int32_t row = -1;
  try {
    row = take_row(stream);
    const int64_t words = aligned ? bytes / kWord : bytes;
    int64_t columns = 1;
    while (columns * columns < words) {
      columns *= 2;
    }
    const int64_t rows = words / columns;
    const int64_t left = words - rows * columns;
    const int64_t tail = aligned ? bytes % kWord : 0;
    const int64_t first_row = (rows > 0 ? columns : 0) + left + tail;  // of the sums
    const int64_t sums = first_row + rows;
    Room& room = rooms_[stream];
    take_weights(room, sums);
    const at::Tensor& weights = room.weights;
    const int64_t fixed = 4 * sums;
    take_space(room, fixed + 2 * columns);
    const int64_t tile = std::clamp((room.space.numel() - fixed) / (2 * columns), int64_t{1},
                                    std::max(rows, int64_t{1}));
    const auto part = [&](at::IntArrayRef sizes, int64_t first) {
      return over(room.space.storage(), at::kLong, sizes, first);
    };
    const auto weights_of = [&](int64_t kind, at::IntArrayRef sizes, int64_t first) {
      return over(weights.storage(), at::kLong, sizes, kind * weights.size(1) + first);
    };
    at::Tensor of_columns = part({columns}, 0);
    for (int64_t first = 0; first < rows; first += tile) {
      const int64_t some = std::min(tile, rows - first);
      at::Tensor t = part({some, columns}, fixed);
      at::Tensor spare = part({some, columns}, fixed + tile * columns);
      mix_into(t, over(storage, word, {some, columns}, first * columns),
               weights_of(3, {some, 1}, first_row + first), spare);
      mix_into(t, t, weights_of(3, {columns}, 0), spare);
      at::Tensor of_rows = part({some}, first_row + first);
      at::sum_out(of_rows, t, 1);
      at::Tensor of_tile = first == 0 ? of_columns : part({columns}, fixed + tile * columns);
      at::sum_out(of_tile, t, 0);
      if (first > 0) {
        of_columns.add_(of_tile);
      }
    }
    if (left > 0) {
      part({left}, first_row - left - tail).copy_(over(storage, word, {left}, rows * columns));
    }
    if (tail > 0) {
      part({tail}, first_row - tail).copy_(over(storage, at::kByte, {tail}, kWord * words));
    }
    at::Tensor mixed = part({sums}, sums);
    at::Tensor spare = part({sums}, 2 * sums);
    at::Tensor weighted = part({2, sums}, 2 * sums);
    mix_into(mixed, part({sums}, 0), weights_of(2, {sums}, 0), spare);
    at::mul_out(weighted, weights.narrow(0, 0, 2).narrow(1, 0, sums), mixed);
    const auto& chunk = chunks_[static_cast<size_t>(row / kRows)].words;
    at::Tensor out = over(chunk.storage(), at::kLong, {2}, 2 * (row % kRows));
    at::sum_out(out, weighted, 1);
    return row;
  } catch (const c10::OutOfMemoryError&) {
    give_back(row);
    return -1;
  } catch (...) {
    give_back(row);
    throw;
  }
}

std::vector<Hash128> DeviceHashes::read() {
  const c10::OptionalDeviceGuard device(device_);
  const Quiet quiet;
  const WithoutRescue at_once;
  at::AutoDispatchBelowADInplaceOrView below;
  std::lock_guard<std::timed_mutex> guard(mutex_);
  const c10::StreamId current = current_stream_id(device_);
  std::vector<c10::StreamId> waited{current};
  std::vector<Hash128> hashes(static_cast<size_t>(kRows) * chunks_.size());
  static_assert(sizeof(Hash128) == 2 * kWord, "a row of the table is a hash");
  at::Tensor here = at::empty({kRows, 2}, at::TensorOptions().dtype(at::kLong));
  size_t first = 0;
  for (const auto& chunk : chunks_) {
    if (std::find(waited.begin(), waited.end(), chunk.stream) == waited.end()) {
      order_after_stream(device_, chunk.stream);
      waited.push_back(chunk.stream);
    }
    here.copy_(chunk.words);
    std::memcpy(hashes.data() + first, here.const_data_ptr(), sizeof(Hash128) * kRows);
    first += kRows;
  }
  return hashes;
}

}  // namespace delta

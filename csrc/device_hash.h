// Hashes of an accelerator's memory, made and kept there, by torch's own ops.
//
// Note: the hash
//  1. The bytes are taken as words of 64 bits in rows and columns, about as many of each. The words
//     of each column are summed, and those of each row, both without a temporary of any size. What
//     is left of an incomplete row goes with the sums as it is.
//  2. Each sum has its upper half added to it and is multiplied by a weight of its own, and all of
//     that is summed to two words of 64 bits. The weights of columns are odd in the first word and
//     even in the second, those of rows the other way round, so that one bit that flips changes
//     both.
//  3. What it cannot see are changes that cancel each other in every row and in every column at
//     once. Nothing but intent makes those in practice.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "hash.h"
#include "lanes.h"

namespace delta {

// A table of hashes on a device. Its rows are written in the order of the streams that they belong
// to. Not to be called under a session's lock, but for `give_back`.
class DeviceHashes {
 public:
  explicit DeviceHashes(c10::Device device) : device_(device) {}

  // The row that will hold the hash of what the stream finds in the storage; -1: there is no room.
  int32_t hash(const c10::Storage& storage, c10::StreamId stream);
  void give_back(int32_t row);

  // All rows, by number. Waits for the device.
  std::vector<Hash128> read();

 private:
  struct Chunk {
    at::Tensor words;
    c10::StreamId stream;
  };
  using Shape = std::pair<int64_t, int64_t>;  // sums of columns and what is left; sums of rows

  int32_t take_row(c10::StreamId stream);
  const at::Tensor& weights_of(c10::StreamId stream, Shape shape);

  c10::Device device_;
  std::mutex mutex_;  // held while ops are queued
  std::vector<Chunk> chunks_;
  std::map<std::pair<c10::StreamId, Shape>, at::Tensor> weights_;
  std::mutex free_mutex_;  // held for moments
  ska::flat_hash_map<c10::StreamId, std::vector<int32_t>> free_;
  std::vector<c10::StreamId> stream_of_;  // by chunk
};

}  // namespace delta

// Hashes of an accelerator's memory, made and kept there, by torch's own ops.
//
// Note: the hash
//  1. The bytes are taken as words of 64 bits in rows and columns, about as many of each (as single
//     bytes where the memory does not begin at a multiple of eight). Each word is mixed before any
//     sum: it is multiplied by the weight of its row, has its upper half added to it, is multiplied
//     by the weight of its column and has its upper half added once more. The weights look random
//     and are odd. So what a change adds to a sum depends on where the word is and on all its bits:
//     signs that flip, factors, words that change places and changes that would cancel in a plain
//     sum do not. That is done tile by tile; the room for two tiles is taken from the device, a
//     small part of the budget.
//  2. The mixed words of each row are summed, and those of each column. What is left of an
//     incomplete row goes with the sums as it is.
//  3. Each sum is mixed in the same way with a weight of its own, multiplied by two more, and all
//     of that is summed to two words of 64 bits.
//  4. The weights are the same in every process: who knows them can make content that the hash does
//     not tell apart. It is made for what happens, not against intent.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>

#include <map>
#include <mutex>
#include <vector>

#include "tiers/lanes.h"
#include "util/hash.h"

namespace delta {

// A table of hashes on a device. Its rows are written in the order of the streams that they belong
// to. Not to be called under a session's lock, but for `give_back`.
class DeviceHashes {
 public:
  DeviceHashes(c10::Device device, int64_t budget_bytes);

  // Takes what most hashes need on this stream while there is memory, once. Does not raise for want
  // of it.
  void reserve(c10::StreamId stream);

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
  struct Room {          // of a stream, used by one hash after the other
    at::Tensor space;    // for all that comes in between
    at::Tensor weights;  // of (kinds, most sums)
  };

  int32_t take_row(c10::StreamId stream);
  void take_weights(Room& room, int64_t sums);
  void take_space(Room& room, int64_t least);

  c10::Device device_;
  int64_t room_words_;
  std::timed_mutex mutex_;  // held while ops are queued
  std::vector<Chunk> chunks_;
  std::map<c10::StreamId, Room> rooms_;
  std::mutex free_mutex_;  // held for moments
  ska::flat_hash_map<c10::StreamId, std::vector<int32_t>> free_;
  std::vector<c10::StreamId> stream_of_;  // by chunk
};

}  // namespace delta

#include "util/hash.h"

#include <cstring>

namespace delta {
namespace {

// Eight sums of 64 bits run beside each other, so that the compiler makes vector instructions of
// them. A word is taken apart into halves, which are multiplied after a key was mixed in, and is
// added to a neighbour's sum as it is: a zero half hides nothing. The key moves on with each block,
// so that two blocks that change places change the sums.
constexpr int kLanes = 8;
constexpr int64_t kBlockBytes = 8 * kLanes;
constexpr int64_t kBlocksToStir = 16;

constexpr uint64_t kKeys[kLanes] = {
    0x243f6a8885a308d3ULL, 0x13198a2e03707344ULL, 0xa4093822299f31d0ULL, 0x082efa98ec4e6c89ULL,
    0x452821e638d01377ULL, 0xbe5466cf34e90c6cULL, 0xc0ac29b7c97c50ddULL, 0x3f84d5b5b5470917ULL,
};  // digits of pi
constexpr uint64_t kStride = 0x9e3779b97f4a7c15ULL;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void add_blocks(const unsigned char* p, int64_t blocks, uint64_t* sums) {
  uint64_t sum[kLanes];
  uint64_t key[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    sum[i] = sums[i];
    key[i] = kKeys[i];
  }
  for (int64_t b = 0; b < blocks; ++b) {
    uint64_t word[kLanes];
    std::memcpy(word, p + b * kBlockBytes, sizeof(word));
    uint64_t beside[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      beside[i] = word[i ^ 1];
    }
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t mixed = word[i] ^ key[i];
      sum[i] += (mixed & 0xffffffffULL) * (mixed >> 32) + beside[i];
      key[i] += kStride;
    }
    if (b % kBlocksToStir == kBlocksToStir - 1) {
      for (int i = 0; i < kLanes; ++i) {
        const uint64_t stirred = sum[i] ^ (sum[i] >> 29) ^ key[i];
        sum[i] = stirred + (stirred << 21);
      }
    }
  }
  for (int i = 0; i < kLanes; ++i) {
    sums[i] = sum[i];
  }
}

}  // namespace

Hash128 hash_of(const void* data, int64_t bytes) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t sums[kLanes] = {1, 2, 3, 4, 5, 6, 7, 8};
  const int64_t blocks = bytes / kBlockBytes;
  add_blocks(p, blocks, sums);
  const int64_t rest = bytes - blocks * kBlockBytes;
  if (rest > 0) {
    unsigned char last[kBlockBytes] = {};
    std::memcpy(last, p + blocks * kBlockBytes, static_cast<size_t>(rest));
    // Behind a block that tells how many there were, so that its key is its own.
    for (int i = 0; i < kLanes; ++i) {
      sums[i] = mix(sums[i], static_cast<uint64_t>(blocks));
    }
    add_blocks(last, 1, sums);
  }
  Hash128 h;
  h.words[0] = mix(0x5851f42d4c957f2dULL, static_cast<uint64_t>(bytes));
  h.words[1] = mix(0x14057b7ef767814fULL, static_cast<uint64_t>(bytes));
  for (int i = 0; i < kLanes; ++i) {
    h.words[0] = mix(h.words[0], sums[i]);
    h.words[1] = mix(h.words[1], sums[kLanes - 1 - i] * kStride);
  }
  return h;
}

}  // namespace delta

// Hashes: of bytes, at the speed of memory, on which evidence rests; and of single numbers.
#pragma once

#include <cstdint>
#include <string>

namespace delta {

struct Hash128 {
  uint64_t words[2] = {0, 0};
  bool operator==(const Hash128& other) const {
    return words[0] == other.words[0] && words[1] == other.words[1];
  }
  bool operator!=(const Hash128& other) const { return !(*this == other); }
};

// Not for strangers who choose the bytes; for memory that should hold the same as before.
Hash128 hash_of(const void* data, int64_t bytes);

inline void hash_bytes(const void* data, int64_t bytes, uint64_t out[2]) {
  const Hash128 h = hash_of(data, bytes);
  out[0] = h.words[0];
  out[1] = h.words[1];
}

inline uint64_t hash_of_name(const std::string& text) {  // FNV-1a
  uint64_t h = 1469598103934665603ULL;
  for (unsigned char c : text) {
    h = (h ^ c) * 1099511628211ULL;
  }
  return h;
}

inline uint64_t mix(uint64_t h, uint64_t v) {
  h ^= v + 0x9e3779b97f4a7c15ULL + (h << 6) + (h >> 2);
  h *= 0xff51afd7ed558ccdULL;
  return h ^ (h >> 32);
}

}  // namespace delta

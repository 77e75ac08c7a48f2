// Host memory below the device: slabs, and blocks of exact sizes cut out of them.
//
// torch's own pinned allocator rounds each block up to a power of two and one pinned allocation for
// each tensor costs milliseconds; here a few large slabs are taken from the system and never more
// than the cap. Blocks are placed best fit, neighbours that are free grow together, and a slab that
// is all free goes back to the system unless it is the only one of that kind.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace delta {

class HostMemory;

// A piece of a slab; goes back to it when it dies, on any thread.
class HostBlock {
 public:
  HostBlock(std::shared_ptr<HostMemory> owner, char* data, int64_t bytes, int64_t taken_bytes)
      : owner_(std::move(owner)), data_(data), bytes_(bytes), taken_bytes_(taken_bytes) {}
  ~HostBlock();
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<HostMemory> owner_;
  char* data_;
  int64_t bytes_;
  int64_t taken_bytes_;
};

struct HostUsage {
  int64_t cap_bytes = 0;
  int64_t used_bytes = 0;       // asked for by the blocks that there are
  int64_t peak_used_bytes = 0;  // the most of it
  int64_t slab_bytes = 0;       // taken from the system
  int64_t peak_slab_bytes = 0;
  int64_t refusals = 0;  // requests that the cap, or the system, did not allow
};

// Thread-safe. Always held by a shared_ptr: blocks keep it alive.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  static constexpr int64_t kAlignment = 256;
  static constexpr int64_t kSlabBytes = 32 << 20;

  explicit HostMemory(int64_t cap_bytes) { usage_.cap_bytes = cap_bytes; }
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // nullptr where there is no room below the cap. The content is undefined.
  std::unique_ptr<HostBlock> allocate(int64_t bytes);
  HostUsage usage() const;

 private:
  friend class HostBlock;
  using Hole =
      std::pair<int64_t, char*>;  // bytes, begin: the smallest that is large enough is next

  bool add_slab(int64_t bytes);  // under the lock
  void give_back(char* data, int64_t bytes, int64_t taken_bytes);
  void add_hole(char* begin, int64_t bytes);

  mutable std::mutex mutex_;
  HostUsage usage_;
  std::map<char*, int64_t> slabs_;  // begin -> bytes
  std::map<char*, int64_t> holes_;  // by place
  std::set<Hole> by_size_;
};

}  // namespace delta

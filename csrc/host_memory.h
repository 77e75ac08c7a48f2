// Host memory below the device: blocks of exact sizes, cut out of one reservation.
//
// torch's own pinned allocator rounds each block up to a power of two, and one pinned allocation
// for each tensor costs milliseconds. Here address space for the whole cap is taken once; the
// system gives memory for what is written to. Blocks are placed best fit, lowest first, and
// neighbours that are free grow together.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace delta {

class HostMemory;

// A piece of the reservation; goes back to it when it dies, on any thread.
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
  int64_t taken_bytes = 0;      // up to the highest end of a block that there ever was
  int64_t refusals = 0;         // requests that the cap, or the system, did not allow
};

// Thread-safe. Always held by a shared_ptr: blocks keep it alive.
class HostMemory : public std::enable_shared_from_this<HostMemory> {
 public:
  static constexpr int64_t kAlignment = 256;

  explicit HostMemory(int64_t cap_bytes);  // less where the system has no address space for it
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // nullptr where there is no room below the cap. The content is undefined.
  std::unique_ptr<HostBlock> allocate(int64_t bytes);
  HostUsage usage() const;
  int64_t returns() const { return returns_.load(); }  // blocks that have come back so far

 private:
  friend class HostBlock;

  void give_back(char* data, int64_t bytes, int64_t taken_bytes);
  void add_hole(char* begin, int64_t bytes);

  mutable std::mutex mutex_;
  char* begin_ = nullptr;
  int64_t reserved_bytes_ = 0;
  HostUsage usage_;
  std::atomic<int64_t> returns_{0};
  std::map<char*, int64_t> holes_;               // by place
  std::set<std::pair<int64_t, char*>> by_size_;  // the smallest that is large enough, lowest first
};

}  // namespace delta

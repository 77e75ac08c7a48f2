// What a tier below the device is made of: a store, and the blocks in it that hold pages' bytes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace delta {

enum class Tier : int8_t { Host = 0, Disk = 1 };

// Aligned memory for one chunk: for file systems that copy nothing by themselves (O_DIRECT), and
// for what a device copies from and to. One for each lane, made when it is first needed.
class Bounce {
 public:
  static constexpr int64_t kBytes = 1 << 20;
  static constexpr int64_t kAlignment = 4096;

  Bounce() = default;
  explicit Bounce(char* lent) : lent_(lent) {}  // of kBytes, aligned; stays its owner's
  ~Bounce() { std::free(own_); }
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;

  char* data() {  // nullptr: no memory
    if (lent_ != nullptr) {
      return lent_;
    }
    if (own_ == nullptr) {
      own_ = static_cast<char*>(std::aligned_alloc(kAlignment, kBytes));
    }
    return own_;
  }

 private:
  char* const lent_ = nullptr;
  char* own_ = nullptr;
};

// Goes back to its store when it dies, on any thread.
class Block {
 public:
  explicit Block(int64_t bytes) : bytes_(bytes) {}
  virtual ~Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  int64_t bytes() const { return bytes_; }
  // One chunk: what lies at `at`, a multiple of Bounce::kBytes, up to the next such place or the
  // end. 0 or an errno. `from` and `to` may be the bounce's own memory.
  virtual int write(int64_t at, const char* from, int64_t bytes, Bounce& bounce) = 0;
  virtual int read(int64_t at, char* to, int64_t bytes, Bounce& bounce) = 0;
  virtual void* memory() { return nullptr; }  // where it lies in host memory, if it does

  // Calls `move(at, bytes)` for each chunk, until one fails. 0 or its errno.
  template <class Move>
  int each_chunk(const Move& move) const {
    for (int64_t at = 0; at < bytes_; at += Bounce::kBytes) {
      const int error = move(at, std::min(Bounce::kBytes, bytes_ - at));
      if (error != 0) {
        return error;
      }
    }
    return 0;
  }

 private:
  int64_t bytes_;
};

struct StoreUsage {
  int64_t cap_bytes = 0;
  int64_t used_bytes = 0;       // asked for by the blocks that there are
  int64_t peak_used_bytes = 0;  // the most of it
  int64_t taken_bytes = 0;      // up to the highest end of a block that there ever was
  int64_t pinned_bytes = 0;
  int64_t refusals = 0;  // requests that the cap, or the system, did not allow
};

// Thread-safe. Always held by a shared_ptr: blocks keep it alive.
class Store {
 public:
  virtual ~Store() = default;

  // nullptr where there is no room below the cap. The content is undefined.
  virtual std::shared_ptr<Block> allocate(int64_t bytes) = 0;
  virtual StoreUsage usage() const = 0;
  // Takes nothing any more: writing failed, or the runtime is closed. Once it is empty, a closed
  // one gives what it took back to the system.
  virtual void fail() = 0;
  virtual void retire() = 0;  // under no lock: it may take the GIL
  virtual bool is_open() const = 0;
  virtual int descriptor() const { return -1; }  // of a file
  // Takes more from the system, where it does so by and by. Under no lock: it may take the GIL.
  virtual void grow() {}
  // Whether it will have room for so many bytes once it has grown.
  virtual bool grows_to(int64_t /*bytes*/) const { return false; }
  int64_t returns() const { return returns_.load(); }  // blocks that have come back so far

 protected:
  std::atomic<int64_t> returns_{0};
};

}  // namespace delta

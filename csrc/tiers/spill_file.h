// A file below the device: one, preallocated, without a name. Blocks are places in it.
//
// Opened by delta_runtime/act/spill.py. With O_DIRECT, bytes go through the lane's bounce buffer,
// since nobody's tensors are aligned to 4,096 bytes; without, the page cache takes them.
//
// Note: a file can be cut, written to or lose blocks behind our back, and reading it then succeeds.
// So a block hashes each chunk on its way out and compares it on its way in, on the lane's thread
// and while the chunk is in the processor's cache, whatever `verify` says.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

#include "tiers/best_fit.h"
#include "tiers/store.h"

namespace delta {

class SpillFile : public Store, public std::enable_shared_from_this<SpillFile> {
 public:
  static constexpr int64_t kAlignment = Bounce::kAlignment;

  // Keeps a descriptor of its own; the one given stays the caller's.
  SpillFile(int fd, int64_t cap_bytes, bool direct);
  ~SpillFile() override;
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  std::shared_ptr<Block> allocate(int64_t bytes) override;
  StoreUsage usage() const override;
  void fail() override;
  bool is_open() const override;
  void retire() override;
  int descriptor() const override { return fd_; }

 private:
  friend class SpillBlock;

  bool is_own_process() const { return getpid() == process_; }
  // One chunk, of at most Bounce::kBytes. 0 or an errno.
  int write(int64_t offset, const char* from, int64_t bytes, Bounce& bounce);
  int read(int64_t offset, char* to, int64_t bytes, Bounce& bounce);
  void give_back(int64_t offset, int64_t bytes);
  void return_if_empty();  // under the mutex

  const int fd_;
  const bool direct_;
  const pid_t process_;  // a forked child shares the file, but not the account of its places
  mutable std::mutex mutex_;
  BestFit places_;
  StoreUsage usage_;
  bool failed_ = false;
  bool retired_ = false;
};

// The errno of a read that found other bytes than were written.
constexpr int kOtherBytes = EBADMSG;

// Takes disk space for the file now, so that it cannot run short later. 0 or an errno.
int preallocate(int fd, int64_t bytes);

}  // namespace delta

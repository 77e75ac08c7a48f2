#include "tiers/spill_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <vector>

#include "util/hash.h"

namespace delta {

class SpillBlock : public Block {
 public:
  SpillBlock(std::shared_ptr<SpillFile> owner, int64_t offset, int64_t bytes)
      : Block(bytes), owner_(std::move(owner)), offset_(offset) {
    written_.resize(static_cast<size_t>((bytes + Bounce::kBytes - 1) / Bounce::kBytes));
  }
  ~SpillBlock() override { owner_->give_back(offset_, bytes()); }

  int write(int64_t at, const char* from, int64_t bytes, Bounce& bounce) override {
    if (!owner_->is_own_process()) {
      return ECHILD;  // a forked child leaves alone what the parent's lane was at
    }
    written_[static_cast<size_t>(at / Bounce::kBytes)] = hash_of(from, bytes);
    return owner_->write(offset_ + at, from, bytes, bounce);
  }
  int read(int64_t at, char* to, int64_t bytes, Bounce& bounce) override {
    if (!owner_->is_own_process()) {
      return ECHILD;
    }
    const int error = owner_->read(offset_ + at, to, bytes, bounce);
    if (error != 0) {
      return error;
    }
    const auto& written = written_[static_cast<size_t>(at / Bounce::kBytes)];
    return written && hash_of(to, bytes) == *written ? 0 : kOtherBytes;
  }

 private:
  std::shared_ptr<SpillFile> owner_;
  int64_t offset_;
  // Of each chunk. Written by the lane out; the lane in reads it once the copy out has ended.
  std::vector<std::optional<Hash128>> written_;
};

namespace {

int64_t aligned(int64_t bytes) {
  return (bytes + SpillFile::kAlignment - 1) / SpillFile::kAlignment * SpillFile::kAlignment;
}

// Calls `move(done, rest)` until everything is through. A file that moves only part of what was
// asked is asked again; one that moves nothing has ended, or is full.
template <class Move>
int move_all(int64_t bytes, bool direct, int nothing_moved, const Move& move) {
  int64_t done = 0;
  while (done < bytes) {
    ssize_t moved = move(done, bytes - done);
    if (moved < 0) {
      if (errno == EINTR) {
        continue;
      }
      return errno;
    }
    if (direct && done + moved < bytes) {
      moved -= moved % SpillFile::kAlignment;  // the rest has to begin at an aligned place
    }
    if (moved == 0) {
      return nothing_moved;
    }
    done += moved;
  }
  return 0;
}

}  // namespace

SpillFile::SpillFile(int fd, int64_t cap_bytes, bool direct)
    : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)),
      direct_(direct),
      process_(getpid()),
      places_(cap_bytes, kAlignment) {
  usage_.cap_bytes = cap_bytes;
  failed_ = fd_ < 0;
}

SpillFile::~SpillFile() {
  if (fd_ >= 0) {
    close(fd_);
  }
}

std::shared_ptr<Block> SpillFile::allocate(int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  const int64_t offset = failed_ || retired_ ? -1 : places_.take(bytes);
  if (offset < 0) {
    ++usage_.refusals;
    return nullptr;
  }
  usage_.used_bytes += bytes;
  usage_.peak_used_bytes = std::max(usage_.peak_used_bytes, usage_.used_bytes);
  usage_.taken_bytes = places_.highest_end();
  return std::make_shared<SpillBlock>(shared_from_this(), offset, bytes);
}

void SpillFile::give_back(int64_t offset, int64_t bytes) {
  std::lock_guard<std::mutex> guard(mutex_);
  usage_.used_bytes -= bytes;
  places_.give_back(offset, bytes);
  returns_.fetch_add(1);
  return_if_empty();
}

void SpillFile::retire() {
  std::lock_guard<std::mutex> guard(mutex_);
  retired_ = true;
  return_if_empty();
}

void SpillFile::return_if_empty() {
  if (retired_ && usage_.used_bytes == 0 && getpid() == process_) {
    // Best effort: closing the file gives it back all the same.
    [[maybe_unused]] const int ignored = ftruncate(fd_, 0);
  }
}

StoreUsage SpillFile::usage() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return usage_;
}

bool SpillFile::is_open() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return !failed_ && !retired_;
}

void SpillFile::fail() {
  std::lock_guard<std::mutex> guard(mutex_);
  failed_ = true;
}

int SpillFile::write(int64_t offset, const char* from, int64_t bytes, Bounce& bounce) {
  if (!direct_) {
    return move_all(bytes, direct_, ENOSPC, [&](int64_t done, int64_t rest) {
      return pwrite(fd_, from + done, static_cast<size_t>(rest), offset + done);
    });
  }
  if (bounce.data() == nullptr) {
    return ENOMEM;
  }
  if (from != bounce.data()) {
    std::memcpy(bounce.data(), from, static_cast<size_t>(bytes));
  }
  std::memset(bounce.data() + bytes, 0, static_cast<size_t>(aligned(bytes) - bytes));
  return move_all(aligned(bytes), direct_, ENOSPC, [&](int64_t done, int64_t rest) {
    return pwrite(fd_, bounce.data() + done, static_cast<size_t>(rest), offset + done);
  });
}

int SpillFile::read(int64_t offset, char* to, int64_t bytes, Bounce& bounce) {
  if (!direct_) {
    return move_all(bytes, direct_, ENODATA, [&](int64_t done, int64_t rest) {
      return pread(fd_, to + done, static_cast<size_t>(rest), offset + done);
    });
  }
  if (bounce.data() == nullptr) {
    return ENOMEM;
  }
  const int error = move_all(aligned(bytes), direct_, ENODATA, [&](int64_t done, int64_t rest) {
    return pread(fd_, bounce.data() + done, static_cast<size_t>(rest), offset + done);
  });
  if (error == 0 && to != bounce.data()) {
    std::memcpy(to, bounce.data(), static_cast<size_t>(bytes));
  }
  return error;
}

int preallocate(int fd, int64_t bytes) { return fallocate(fd, 0, 0, bytes) == 0 ? 0 : errno; }

}  // namespace delta

// Python's global interpreter lock (GIL), which PyTorch takes inside of what looks like plain C++.
//
// Note: the GIL and other locks
//  A tensor or a storage that only Python holds has its Python object's count raised by whoever
//  locks a weak pointer to it or copies a pointer to it, and lowered when that is let go of: under
//  the GIL. So whoever holds a lock of ours may come to wait for the GIL, and nobody waits for such
//  a lock while holding the GIL.
#pragma once

struct _ts;  // Python's PyThreadState

namespace delta {

// Lets other threads have the GIL while it lives, if this thread has it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  _ts* state_ = nullptr;
};

}  // namespace delta

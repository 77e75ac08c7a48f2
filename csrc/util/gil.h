// Python's global interpreter lock (GIL), which PyTorch takes inside of what looks like plain C++.
//
// Note: the GIL and other locks
//  A tensor or a storage that only Python holds has its Python object's count raised by whoever
//  locks a weak pointer to it or copies a pointer to it, and lowered when that is let go of: under
//  the GIL. So whoever holds a lock of ours may come to wait for the GIL, and nobody waits long for
//  such a lock while holding the GIL.
//  Inside of an allocation the caller may hold a lock of PyTorch's for which another thread waits
//  with the GIL. There the GIL is kept for as long as an honest wait can take, and nobody asks for
//  it: a storage that only Python holds is left alone.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>

struct _ts;  // Python's PyThreadState

namespace delta {

bool holds_gil();

// How long a thread waits for a lock of ours before it lets the GIL go.
std::chrono::microseconds gil_patience();

// While it lives, this thread is inside of an allocation.
class InsideAllocation {
 public:
  InsideAllocation();
  ~InsideAllocation();
  InsideAllocation(const InsideAllocation&) = delete;
  InsideAllocation& operator=(const InsideAllocation&) = delete;

 private:
  bool before_;
};

bool inside_allocation();

// The storage, if it is there still. Inside of an allocation nothing, either, where only Python
// holds it.
c10::intrusive_ptr<c10::StorageImpl> lock(const c10::weak_intrusive_ptr<c10::StorageImpl>& weak);

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

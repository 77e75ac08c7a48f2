// Objects that come and go with every op take their memory from a small free list of their thread.
#pragma once

#include <cstddef>
#include <new>

#include "util/per_thread.h"

namespace delta {

// Derive from Pooled<T> to give T such an operator new. Objects may die on another thread than they
// were made on; what does not fit a thread's list goes back to malloc.
template <class T>
class Pooled {
 public:
  static void* operator new(std::size_t size) {
    auto& list = per_thread<FreeList>();
    if (list.count > 0) {
      return list.blocks[--list.count];
    }
    return ::operator new(size);
  }
  static void operator delete(void* block) {
    auto& list = per_thread<FreeList>();
    if (list.count < kMost) {
      list.blocks[list.count++] = block;
    } else {
      ::operator delete(block);
    }
  }

 private:
  static constexpr int kMost = 1024;
  struct FreeList {
    void* blocks[kMost];
    int count = 0;

    ~FreeList() {
      while (count > 0) {
        ::operator delete(blocks[--count]);
      }
    }
  };
};

}  // namespace delta

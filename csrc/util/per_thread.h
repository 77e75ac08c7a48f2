// One object of a type per thread, found in a few cycles.
#pragma once

namespace delta {

// A plain `thread_local` of a shared library costs a call into the dynamic linker and a guard at
// each access, which adds up in what runs at every op. Here only a pointer is thread-local, of the
// "initial-exec" model (eight bytes of the static block that the linker keeps for late libraries).
// The object dies with its thread; whoever asks after that gets a new one, which is never freed.
template <class T>
struct PerThreadSlot {
  T* object = nullptr;
  bool closed = false;
};

template <class T>
[[gnu::noinline, gnu::cold]] void fill(PerThreadSlot<T>& slot) {
  slot.object = new T();
  if (slot.closed) {
    return;
  }
  struct Owner {
    PerThreadSlot<T>* slot = nullptr;
    ~Owner() {
      if (slot != nullptr) {
        T* last = slot->object;
        slot->object = nullptr;
        slot->closed = true;
        delete last;
      }
    }
  };
  static thread_local Owner owner;
  owner.slot = &slot;
}

template <class T>
[[gnu::always_inline]] inline T& per_thread() {
  static thread_local PerThreadSlot<T> slot __attribute__((tls_model("initial-exec")));
  if (__builtin_expect(slot.object == nullptr, 0)) {
    fill(slot);
  }
  return *slot.object;
}

}  // namespace delta

// One object of a type per thread, found in a few cycles.
#pragma once

namespace delta {

// A plain `thread_local` of a shared library costs a call into the dynamic linker and a guard at
// each access, which adds up in what runs at every op. Here only a pointer is thread-local, of the
// "initial-exec" model (eight bytes of the static block that the linker keeps for late libraries).
// The object dies with its thread; whoever asks after that gets a new one, which is never freed.
template <class T>
T& per_thread() {
  struct Slot {
    T* object = nullptr;
    bool closed = false;
  };
  static thread_local Slot slot __attribute__((tls_model("initial-exec")));
  if (__builtin_expect(slot.object == nullptr, 0)) {
    slot.object = new T();
    if (!slot.closed) {
      struct Owner {
        Slot* slot = nullptr;
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
  }
  return *slot.object;
}

}  // namespace delta

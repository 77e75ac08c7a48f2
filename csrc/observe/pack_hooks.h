// Whose saved-tensor hooks a thread has.
#pragma once

#include <Python.h>

namespace delta {

// How the hook is told that some session packs saved tensors with.
void set_is_pack_hook(bool (*is_pack_hook)(PyObject* hook));

bool has_our_pack_hook();

// Whether what autograd saves goes to hooks that are not a session's.
bool has_foreign_pack_hook();

}  // namespace delta

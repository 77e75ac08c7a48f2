// The saved-tensor hooks of a session as autograd calls them without Python.
//
// Note: hooks without Python
//  1. Autograd asks its default engine for the hooks of what it saves, and PyTorch's gives those on
//     top of the thread's stack: Python callables, for which it takes the GIL and makes Python
//     objects. The engine put in place here gives a session's hooks as C++ objects instead, if the
//     session's pair is on top, and passes all else on to PyTorch's.
//  2. The pair stays on the stack, as the mark of whose hooks come first. All that looks there
//     finds it: hooks above it, functions that refuse hooks, threads that are given the stack.
//  3. Autograd's distributed engine keeps the default engine that it finds first, and starts the
//     threads of devices with it. Where remote procedure calls are on, Python's hooks are used.
//  4. Packing, unpacking and letting go run with or without the GIL, as ops do.
#pragma once

namespace delta {

// Puts the engine in place, once in a process. Behind `import torch`.
void offer_direct_hooks();

// Whether sessions' hooks are given without Python from now on.
void use_direct_hooks(bool wanted);

}  // namespace delta

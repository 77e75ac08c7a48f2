// The RecordFunction callback: what sees each op of each thread.
//
// Note: one callback for all threads
//  1. Ops of the thread that entered a session, and of the threads of its backward, are recorded.
//     Of all others only writes and draws count. One global callback does both: autograd sets
//     PyTorch's thread-local callbacks anew for each node of backward, and a second callback beside
//     it makes that dearer by four allocations.
//  2. The threads of backward have the thread-local state of the thread that called it, our saved
//     tensor hooks among it, and know of the backward that they work for. That is how they are
//     known. The threads of a process group have the same state, and run ops that copy what they
//     received: recorded, these would be recipes without the receiving.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/python_stub.h>

namespace delta {

// Announces each op of a thread that is followed to the session that is entered; and the writes and
// draws of other threads, and of code under delta.disable(), to the sessions that still have saved
// tensors to bring back.
at::RecordFunctionCallback observer_callback();

// An observer of the same kind that does nothing: what boxing and callbacks cost at the least.
void enter_bare_observer();
void leave_bare_observer();

}  // namespace delta

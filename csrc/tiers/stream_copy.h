// A copy between host memory and an accelerator, queued on a stream, that no hook or mode sees.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>

namespace delta {

// Queues the copy of `bytes` bytes at `there`, memory of the stream's device, to `here` on the host
// (`out`), or back. Holds neither: a worker thread that held a storage, be it for a moment, would
// make it look as if somebody else used it. Runs no Python: the caller may hold the session's lock.
// Whoever wants the host to go on meanwhile gives pinned memory.
void queue_copy(const c10::Stream& stream, void* there, void* here, int64_t bytes, bool out);

}  // namespace delta

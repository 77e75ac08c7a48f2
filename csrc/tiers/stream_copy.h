// A copy between host memory and an accelerator, queued on a stream, that no hook or mode sees.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace delta {

// Queues the copy of `bytes` bytes of the storage, from its byte `at` on, to `memory` on the host
// (`out`), or from there. Runs no Python: the caller may hold the session's lock. Whoever wants the
// host to go on meanwhile gives pinned memory.
void queue_copy(const c10::Stream& stream, const c10::Storage& storage, int64_t at, int64_t bytes,
                void* memory, bool out);

}  // namespace delta

// Streams of an accelerator, of whatever device type; the CPU has none.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <limits>

namespace delta {

constexpr c10::StreamId kNoStream = std::numeric_limits<c10::StreamId>::min();

// The id of the stream that is current on this thread; kNoStream on devices without any.
c10::StreamId current_stream_id(c10::Device device);

// What the current stream does next comes after what `stream` has queued until now.
void order_after_stream(c10::Device device, c10::StreamId stream);

}  // namespace delta

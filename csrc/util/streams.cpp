#include "util/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace delta {

c10::StreamId current_stream_id(c10::Device device) {
  if (device.is_cpu()) {
    return kNoStream;
  }
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).id();
}

void order_after_stream(c10::Device device, c10::StreamId stream) {
  c10::Event queued(device.type());
  queued.record(c10::Stream(c10::Stream::UNSAFE, device, stream));
  queued.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace delta

// What replay shares: how storages are made.
#pragma once

#include <c10/core/Storage.h>

namespace delta {

// Memory of the device that nothing has written to, or zeros.
c10::Storage fresh_storage(int64_t bytes, c10::Device device, bool zeros);

}  // namespace delta

// What malloc adds to a request.
#pragma once

#include <cstdint>

namespace delta {

// It rounds up: the most that it takes beyond what is asked. So much more has to be free.
constexpr int64_t most_rounding_bytes(int64_t bytes) { return bytes >= 65536 ? 4096 + 64 : 128; }

}  // namespace delta

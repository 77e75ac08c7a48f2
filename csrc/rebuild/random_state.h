// Random state, restored for an op that is run again: see the Note in observe/random_draws.h, rules
// 1 and 2.
#pragma once

#include <ATen/core/stack.h>

#include <vector>

#include "observe/random_draws.h"

namespace delta {

struct OpInfo;

// Runs the op on the arguments on the stack with the numbers that it drew before.
void run_with_draws(const OpInfo& info, const std::vector<RecordedDraw>& draws,
                    torch::jit::Stack& stack);

}  // namespace delta

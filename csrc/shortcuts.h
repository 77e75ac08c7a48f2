// Cheaper ways to the same bits when an op runs again.
//
// Note: why a shortcut is never wrong
//  1. It is written so that it computes what the op computes, rounding by rounding: batch norm in
//     training first finds mean and deviation, which autograd has kept; random draws come from the
//     same stream.
//  2. Nobody takes its word for that. The first time that a recorded op could take one, both run
//     and a 128-bit hash of the contents decides; for each op of each graph anew, and again when a
//     number among its arguments changes. A shortcut that failed is not tried again for that op.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/Storage.h>

#include <array>
#include <string>

namespace delta {

struct Shortcut {
  // Which return values it needs to be there; -1: none. It makes the first one, or what is written.
  std::array<int16_t, 2> given;
  bool (*applies)(const torch::jit::Stack& arguments);
  // Takes the arguments off the stack and leaves the return values, as the op does; those that it
  // was given are left undefined.
  void (*run)(torch::jit::Stack& stack, const std::array<c10::Storage, 2>& given);
};

// On the CPU. nullptr: there is none.
const Shortcut* find_shortcut(const std::string& op_name);

}  // namespace delta

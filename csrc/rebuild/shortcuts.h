// Cheaper ways to the same bits when an op runs again.
//
// Note: why a shortcut is never wrong
//  1. It is written so that it computes what the op computes, rounding by rounding: batch norm in
//     training first finds mean and deviation, which autograd has kept; random draws come from the
//     same stream. `applies` is as narrow as the kernel path that this was shown for.
//  2. This torch and this CPU are asked first: on data of its own (weights that are neither 0 nor
//     1, odd sizes, an odd place in the stream) each kind of call is made both ways, once in a
//     process. The user's data cannot decide that: weights of 1 hide how a kernel rounds.
//  3. Then the user's data are asked. The first time that a recorded op could take one, both run
//     and a 128-bit hash of the contents decides; for each op of each graph anew, and again when a
//     number or a layout among its arguments changes. What failed is not tried again for that op.
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
  // Rule 2, for calls like this one. Runs ops.
  bool (*proven)(const torch::jit::Stack& arguments);
  // Takes the arguments off the stack and leaves the return values, as the op does; those that it
  // was given are left undefined.
  void (*run)(torch::jit::Stack& stack, const std::array<c10::Storage, 2>& given);
};

// On the CPU. nullptr: there is none.
void forget_shortcuts_lock();  // in a forked child
const Shortcut* find_shortcut(const std::string& op_name);

}  // namespace delta

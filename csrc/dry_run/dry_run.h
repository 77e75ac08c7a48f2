// A dry run: ops say what they return, and none computes. Tensors are ordinary ones of the CPU,
// whose memory is never touched; so all that watches a step watches a dry one alike.
//
// It lies behind a dispatch key below autograd that nothing else uses, and not behind a dispatch
// mode: where there is a mode, autograd chooses other ops.
//
// Note: what a dry op does
//   1. A composite op runs, for what it calls. A view is taken. Empty memory is made.
//   2. An op on small tensors whose content is known computes: masks, positions, an optimizer's
//   count
//      of steps. Known is what was there before, and what such ops make.
//   3. Of any other op somebody else is asked for the shapes of what it returns. That is allocated.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <string>
#include <variant>
#include <vector>

namespace delta {
namespace dry_run {

// One tensor that an op returns.
struct NewTensor {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype;
};
struct ViewOf {
  size_t argument;  // among the tensors of the op's arguments, in order
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;  // elements, from the argument's own
};
struct Argument {
  size_t number;
};
struct Nothing {};
using Returned = std::variant<NewTensor, ViewOf, Argument, Nothing>;
struct Resized {
  size_t argument;
  std::vector<int64_t> sizes;
};

// What an op returns; nothing where that depends on content, and `known` says that it is known.
// `arguments` are the op's own, with tensors without memory in place of its tensors, but for those
// that are `numbers`: given as such where a tensor is asked for.
struct Answer {
  std::vector<std::vector<Returned>> returns;     // a list of tensors has several, another one
  std::vector<std::optional<c10::IValue>> plain;  // of each return that holds no tensor
  std::vector<Resized> resized;
};
using Ask = std::function<std::optional<Answer>(
    const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
    const std::vector<at::Tensor>& tensors, bool known, bool numbers)>;

// Of this thread, and of the backward that it calls. They nest.
void enter(Ask ask);
void leave();
bool is_entered();

// Whether the content of a tensor is what it would be if all ops computed.
bool is_known(const at::Tensor& t);

}  // namespace dry_run
}  // namespace delta

#include "observe/first_ops.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>

#include "observe/operands.h"
#include "util/hash.h"

namespace delta {
namespace {

constexpr size_t kOps = 8;
constexpr size_t kMostKnown = 1 << 12;  // of a program whose shapes never repeat

bool counts(c10::ArrayRef<const c10::IValue> inputs) {
  return c10::GradMode::is_enabled() && any_needs_grad(inputs) &&
         torch::autograd::get_current_graph_task_id() == -1 &&
         at::SavedTensorDefaultHooks::is_enabled() &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

}  // namespace

void FirstOps::begin_learning() {
  mode_ = Mode::Learning;
  beginnings_.clear();
}

void FirstOps::begin_comparing() {
  begin_learning();
  mode_ = Mode::Comparing;
}

void FirstOps::learn_behind(std::vector<uint64_t> beginnings) {
  begin_learning();
  beginnings_ = std::move(beginnings);
  if (beginnings_.size() >= kOps) {
    end();
  }
}

FirstOps::Found FirstOps::next(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  if (!counts(inputs)) {
    return Found::Known;
  }
  uint64_t so_far = mix(beginnings_.empty() ? 0 : beginnings_.back(), info.name_hash);
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      so_far = mix(mix_geometry(so_far, t), t.defined() && t.requires_grad() ? 2 : 1);
    });
  }
  beginnings_.push_back(so_far);
  if (comparing() && known_.count(so_far) == 0) {
    return Found::Unknown;
  }
  if (beginnings_.size() == kOps) {
    end();
    return Found::Enough;
  }
  return Found::Known;
}

void FirstOps::remember() {
  if (known_.size() > kMostKnown) {
    known_.clear();
  }
  known_.insert(beginnings_.begin(), beginnings_.end());
}

void FirstOps::forget() { known_.clear(); }

}  // namespace delta

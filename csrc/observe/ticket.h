// What autograd gets in place of a saved tensor.
#pragma once

#include <ATen/Tensor.h>

#include "state/counters.h"
#include "state/values.h"

namespace delta {

struct Ticket {
  enum class State : uint8_t { Managed, Kept, Pending };

  c10::intrusive_ptr<Page> page;
  ViewSpec view;
  at::Tensor kept;
  c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl> original{
      c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>()};
  uint64_t node = 0;        // that the next node of autograd would have got on this thread
  uint64_t thread = 0;      // as autograd counts them
  bool was_leaf = false;    // when it was saved
  bool made_by_op = false;  // it was saved inside the op that made it
  c10::VariableVersion version_counter;
  int64_t version = -1;
  State state = State::Kept;
  bool counted = false;  // the session knows of it
  KeptReason reason = KeptReason::Unknown;
};

}  // namespace delta

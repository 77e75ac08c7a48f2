// The tensors among an op's arguments and results.
#pragma once

#include <ATen/core/ivalue.h>

namespace delta {

// Calls f(tensor, index in a list or -1) for each tensor of an argument or result.
template <class F>
void for_each_tensor(const c10::IValue& x, const F& f) {
  if (x.isTensor()) {
    f(x.toTensor(), -1);
  } else if (x.isList()) {
    const auto elements = x.toListRef();
    for (size_t i = 0; i < elements.size(); ++i) {
      if (elements[i].isTensor()) {
        f(elements[i].toTensor(), static_cast<int>(i));
      }
    }
  }
}

}  // namespace delta

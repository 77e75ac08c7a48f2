// The tensors among an op's arguments and results.
#pragma once

#include <ATen/core/ivalue.h>

#include "util/hash.h"

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

inline bool any_needs_grad(c10::ArrayRef<const c10::IValue> inputs) {
  bool found = false;
  for (const auto& x : inputs) {
    for_each_tensor(x,
                    [&](const at::Tensor& t, int) { found |= t.defined() && t.requires_grad(); });
  }
  return found;
}

// Adds dtype and sizes of a tensor to a hash.
inline uint64_t mix_geometry(uint64_t h, const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) {
    return mix(h, 7);
  }
  h = mix(h, static_cast<uint64_t>(t.scalar_type()) + 31 * static_cast<uint64_t>(t.dim()));
  if (t.is_nested()) {  // has no sizes
    return mix(h, static_cast<uint64_t>(t.storage().sym_nbytes().maybe_as_int().value_or(0)));
  }
  for (auto n : t.sizes()) {
    h = mix(h, static_cast<uint64_t>(n));
  }
  return h;
}

}  // namespace delta

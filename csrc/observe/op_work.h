// What an op has to do, whatever it runs on: floating-point operations and bytes. How long that
// takes is for others to say.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <string>

namespace delta {

struct OpWork {
  double flops = 0;         // of products: matrices, convolutions, attention; else 0
  int64_t moved_bytes = 0;  // that it reads, and that it writes
  int32_t dtype = -1;       // of the numbers that it computes with; -1: it has no tensors
};

// Counts the operations of one kind of product from the arguments; a multiplication with an
// addition is two.
using CountFlops = double (*)(c10::ArrayRef<const c10::IValue> inputs);
CountFlops find_flops(const std::string& name);  // null: no product

// Whether an op reads of its first tensor no more than it returns: rows of a table.
bool reads_a_part(const std::string& name);

int64_t touched_bytes(const at::Tensor& t);  // elements that lie at the same place count once

}  // namespace delta

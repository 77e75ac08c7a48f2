// The library behind PyTorch's elementwise functions on the CPU, made ready before anything counts
// on its bits.
#pragma once

namespace delta {

// Calls each function of MKL's vector math once, on the calling thread. Once per process.
//
// MKL chooses a function's kernel at the first call of that function. Two threads that make that
// call together can see a half-made choice, and one of them computes its part with the kernel of
// low precision (github.com/pytorch/pytorch/issues/188792). That value never comes out again: a
// program's first `sin` would differ from the same `sin` when it is recomputed.
void settle_vector_math();

}  // namespace delta

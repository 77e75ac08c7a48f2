#include "rebuild/vector_math.h"

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <mutex>

#include "rebuild/quiet.h"

namespace delta {
namespace {

// All that ATen sends to that library (ATen/cpu/vml.h of torch 2.11 to 2.13).
using Function = at::Tensor (*)(const at::Tensor&);
constexpr Function kFunctions[] = {at::acos, at::asin,   at::atan, at::cos,   at::erf,  at::erfc,
                                   at::exp,  at::erfinv, at::log,  at::log10, at::log2, at::sin,
                                   at::sqrt, at::tan,    at::tanh, at::trunc};

}  // namespace

void settle_vector_math() {
  static std::once_flag once;
  std::call_once(once, [] {
    Quiet quiet;
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto type : {at::kFloat, at::kDouble}) {
      const at::Tensor x = at::full({1}, 0.5, at::TensorOptions().dtype(type).device(at::kCPU));
      for (const Function function : kFunctions) {
        function(x);
      }
    }
  });
}

}  // namespace delta

#include "rebuild/numeric_context.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>
#include <dlfcn.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <array>

#include "observe/op_info.h"

namespace delta {
namespace {

struct Flag {
  bool (*get)(const at::Context&);
  void (*set)(at::Context&, bool);
  bool on_cpu;  // false: it says something about accelerators only
};

const std::array<Flag, 16> kFlags = {{
    {[](const at::Context& c) { return c.deterministicAlgorithms(); },
     [](at::Context& c, bool on) {
       c.setDeterministicAlgorithms(on, c.deterministicAlgorithmsWarnOnly());
     },
     true},
    {[](const at::Context& c) { return c.deterministicAlgorithmsWarnOnly(); },
     [](at::Context& c, bool on) { c.setDeterministicAlgorithms(c.deterministicAlgorithms(), on); },
     true},
    {[](const at::Context& c) { return c.deterministicFillUninitializedMemory(); },
     [](at::Context& c, bool on) { c.setDeterministicFillUninitializedMemory(on); }, true},
    {[](const at::Context& c) { return c.userEnabledMkldnn(); },
     [](at::Context& c, bool on) { c.setUserEnabledMkldnn(on); }, true},
    {[](const at::Context& c) { return c.deterministicMkldnn(); },
     [](at::Context& c, bool on) { c.setDeterministicMkldnn(on); }, true},
    {[](const at::Context& c) { return c.userEnabledNNPACK(); },
     [](at::Context& c, bool on) { c.setUserEnabledNNPACK(on); }, true},
    {[](const at::Context& c) { return c.allowFP16ReductionCPU(); },
     [](at::Context& c, bool on) { c.setAllowFP16ReductionCPU(on); }, true},
    {[](const at::Context& c) { return c.userEnabledCuDNN(); },
     [](at::Context& c, bool on) { c.setUserEnabledCuDNN(on); }, false},
    {[](const at::Context& c) { return c.benchmarkCuDNN(); },
     [](at::Context& c, bool on) { c.setBenchmarkCuDNN(on); }, false},
    {[](const at::Context& c) { return c.deterministicCuDNN(); },
     [](at::Context& c, bool on) { c.setDeterministicCuDNN(on); }, false},
    {[](const at::Context& c) {
       return c.allowFP16ReductionCuBLAS() ==
              at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
     },
     [](at::Context& c, bool on) { c.setAllowFP16ReductionCuBLAS(on); }, false},
    {[](const at::Context& c) {
       return c.allowBF16ReductionCuBLAS() ==
              at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
     },
     [](at::Context& c, bool on) { c.setAllowBF16ReductionCuBLAS(on); }, false},
    {[](const at::Context& c) { return c.allowFP16AccumulationCuBLAS(); },
     [](at::Context& c, bool on) { c.setAllowFP16AccumulationCuBLAS(on); }, false},
    {[](const at::Context& c) { return c.userEnabledFlashSDP(); },
     [](at::Context& c, bool on) { c.setSDPUseFlash(on); }, false},
    {[](const at::Context& c) { return c.userEnabledMemEfficientSDP(); },
     [](at::Context& c, bool on) { c.setSDPUseMemEfficient(on); }, false},
    {[](const at::Context& c) { return c.allowFP16BF16ReductionMathSDP(); },
     [](at::Context& c, bool on) { c.setAllowFP16BF16ReductionMathSDP(on); }, false},
}};

struct PrecisionPlace {
  at::Float32Backend backend;
  at::Float32Op op;
  bool on_cpu;
};
const std::array<PrecisionPlace, 6> kPlaces = {{
    {at::Float32Backend::MKLDNN, at::Float32Op::MATMUL, true},
    {at::Float32Backend::MKLDNN, at::Float32Op::CONV, true},
    {at::Float32Backend::MKLDNN, at::Float32Op::RNN, true},
    {at::Float32Backend::CUDA, at::Float32Op::MATMUL, false},
    {at::Float32Backend::CUDA, at::Float32Op::CONV, false},
    {at::Float32Backend::CUDA, at::Float32Op::RNN, false},
}};

// Flush to zero, denormals are zero, and the way of rounding.
#if defined(__x86_64__)
constexpr uint32_t kFloatControl = 0xe040;
#elif defined(__aarch64__)
constexpr uint32_t kFloatControl = 7U << 22;
#endif

uint32_t read_float_control() {
#if defined(__x86_64__)
  return _mm_getcsr() & kFloatControl;
#elif defined(__aarch64__)
  uint64_t fpcr;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  return static_cast<uint32_t>(fpcr & kFloatControl);
#else
  return 0;
#endif
}

void write_float_control(uint32_t bits) {
#if defined(__x86_64__)
  _mm_setcsr((_mm_getcsr() & ~kFloatControl) | bits);
#elif defined(__aarch64__)
  uint64_t fpcr;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  fpcr = (fpcr & ~uint64_t{kFloatControl}) | bits;
  asm volatile("msr fpcr, %0" : : "r"(fpcr));
#else
  (void)bits;
#endif
}

void change(const NumericContext& from, const NumericContext& to, c10::DeviceType device) {
  auto& context = at::globalContext();
  for (size_t i = 0; i < kFlags.size(); ++i) {
    const bool on = (to.flags >> i & 1U) != 0;
    if (((from.flags >> i & 1U) != 0) != on && (kFlags[i].on_cpu || device != c10::kCPU)) {
      kFlags[i].set(context, on);
    }
  }
  for (size_t i = 0; i < kPlaces.size(); ++i) {
    const uint32_t wanted = to.precisions >> (4 * i) & 15U;
    if ((from.precisions >> (4 * i) & 15U) == wanted ||
        (!kPlaces[i].on_cpu && device == c10::kCPU)) {
      continue;
    }
    auto precision = static_cast<at::Float32Precision>(wanted);
    // The older setter keeps the older getter, which raises where the two disagree, in step.
    if (kPlaces[i].backend == at::Float32Backend::CUDA && kPlaces[i].op == at::Float32Op::MATMUL) {
      context.setAllowTF32CuBLAS(precision == at::Float32Precision::TF32);
      continue;
    }
    // A place that says nothing itself goes by what is said for all: what it is told to is read,
    // and whether it was told by itself is not. "None" is to follow; what computes as if nobody had
    // said anything is "ieee".
    const auto all = context.float32Precision(kPlaces[i].backend, at::Float32Op::ALL);
    if (precision == all) {
      precision = at::Float32Precision::NONE;
    } else if (precision == at::Float32Precision::NONE) {
      precision = at::Float32Precision::IEEE;
    }
    context.setFloat32Precision(kPlaces[i].backend, kPlaces[i].op, precision);
  }
  if (from.float_control != to.float_control) {
    write_float_control(to.float_control);
  }
  if (from.threads != to.threads && to.threads > 0) {
    at::set_num_threads(to.threads);
  }
  if (from.default_dtype != to.default_dtype) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(to.default_dtype));
  }
}

}  // namespace

// torch brings an OpenMP library of its own; which one is known to the dynamic linker only.
int32_t omp_threads() {
  static const auto ask = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  return ask != nullptr ? ask() : 0;
}

NumericContext NumericContext::now(c10::DeviceType device, uint8_t needs) {
  NumericContext n = without_threads(device, needs);
  n.threads = omp_threads();
  return n;
}

NumericContext NumericContext::without_threads(c10::DeviceType device, uint8_t needs) {
  NumericContext n;
  n.needs = needs;
  const auto& context = at::globalContext();
  const bool everything = device != c10::kCPU;
  for (size_t i = 0; i < kFlags.size(); ++i) {
    if (kFlags[i].on_cpu || everything) {
      n.flags |= static_cast<uint32_t>(kFlags[i].get(context)) << i;
    }
  }
  // PyTorch's getter makes and frees tables at each call: half a microsecond for all places.
  for (size_t i = 0; i < kPlaces.size() && (needs & kNeedsPrecisions) != 0; ++i) {
    if (kPlaces[i].on_cpu || everything) {
      n.precisions |=
          static_cast<uint32_t>(context.float32Precision(kPlaces[i].backend, kPlaces[i].op))
          << (4 * i);
    }
  }
  n.float_control = read_float_control();
  if ((needs & kNeedsDefaultDtype) != 0) {
    n.default_dtype = c10::get_default_dtype_as_scalartype();
  }
  return n;
}

NumericContextGuard::NumericContextGuard(const NumericContext& wanted, c10::DeviceType device)
    : wanted_(wanted), before_(NumericContext::now(device, wanted.needs)), device_(device) {
  if (!(before_ == wanted_)) {
    change(before_, wanted_, device_);
  }
}

NumericContextGuard::~NumericContextGuard() {
  if (!(before_ == wanted_)) {
    change(wanted_, before_, device_);
  }
}

}  // namespace delta

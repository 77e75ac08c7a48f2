#include "rebuild/random_state.h"

#include <ATen/ops/empty.h>

#include <deque>
#include <mutex>

#include "observe/op_info.h"
#include "util/errors.h"
#include "util/sabotage.h"

namespace delta {
namespace {

// Puts the program's generator back, whatever happens.
class BorrowedGenerator {
 public:
  explicit BorrowedGenerator(const RecordedDraw& draw) : generator_(draw.generator) {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    theirs_ = generator_.get_state();
    generator_.set_state(draw.before.get_state());
  }
  ~BorrowedGenerator() {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(theirs_);
  }
  BorrowedGenerator(const BorrowedGenerator&) = delete;
  BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

  GeneratorState state() {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    return GeneratorState::of(generator_);
  }

 private:
  at::Generator generator_;
  at::Tensor theirs_;
};

// native_dropout takes no generator; on the CPU it is these ops, of which one draws. Of an input
// that is contiguous: the mask of another is drawn in the order that it lies in memory, by some
// versions of PyTorch.
void dropout_with(const at::Generator& generator, torch::jit::Stack& stack) {
  const at::Tensor input = stack[0].toTensor();
  const double keep = 1. - stack[1].toDouble();
  const double scale = keep == 0 ? 0. : 1. / keep;
  const at::Tensor mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  mask.bernoulli_(keep, generator);
  at::Tensor output = input.mul(mask).mul_(scale);
  stack.clear();
  stack.emplace_back(std::move(output));
  stack.emplace_back(mask);
}

}  // namespace

void run_with_draws(const OpInfo& info, const std::vector<RecordedDraw>& draws,
                    torch::jit::Stack& stack) {
  check_is_defined(info);
  const bool shared = sabotage() == Sabotage::SharedGenerator;
  if (draws.empty() || sabotage() == Sabotage::NoRngRestore) {
    info.handle.callBoxed(&stack);
    return;
  }
  if (info.takes_generator() && !shared) {
    const auto place = static_cast<size_t>(info.generator_argument);
    at::Generator copy = draws.front().before.clone();
    if (!info.with_generator.has_value()) {
      stack[place] = std::move(copy);
      info.handle.callBoxed(&stack);
    } else {
      stack.insert(stack.begin() + static_cast<std::ptrdiff_t>(place), std::move(copy));
      info.with_generator->callBoxed(&stack);
    }
    return;
  }
  if (info.name == "aten::native_dropout" && draws.front().generator.device().is_cpu() && !shared &&
      stack[0].toTensor().is_contiguous()) {
    dropout_with(draws.front().before.clone(), stack);  // it drew, so it was in training
    return;
  }
  std::deque<BorrowedGenerator> borrowed;
  for (const auto& draw : draws) {
    borrowed.emplace_back(draw);
  }
  info.handle.callBoxed(&stack);
  for (size_t i = 0; i < draws.size() && !shared; ++i) {
    if (!(borrowed[i].state() == draws[i].after)) {
      throw RecomputeMismatchError(
          "delta_runtime: " + info.name +
          " was run again, and its random generator is not where the op left it the first time: "
          "another thread drew from it meanwhile, or the op does not draw the same numbers twice. "
          "What was recomputed is not used. Give that thread a torch.Generator of its own, or keep "
          "this op's results with policy=\"swap\" or delta_runtime.disable().");
    }
  }
}

}  // namespace delta

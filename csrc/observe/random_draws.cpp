#include "observe/random_draws.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <deque>
#include <mutex>

#include "observe/op_info.h"
#include "util/errors.h"
#include "util/hash.h"

namespace delta {
namespace {

RecordedDraw copy_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  at::Generator copy = generator.clone();
  return {std::move(generator), std::move(copy), {}};
}

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

GeneratorState GeneratorState::of(const at::Generator& generator) {
  GeneratorState state;
  if (generator.device().is_cpu()) {
    auto* cpu = at::check_generator<at::CPUGeneratorImpl>(generator);
    struct {
      at::mt19937_data_pod engine;
      double cached[2];
      int64_t has_cached;
    } all;
    std::memset(static_cast<void*>(&all), 0, sizeof(all));  // padding too
    const auto engine = cpu->engine().data();
    all.engine.seed_ = engine.seed_;
    all.engine.left_ = engine.left_;
    all.engine.seeded_ = engine.seeded_;
    all.engine.next_ = engine.next_;
    all.engine.state_ = engine.state_;
    const auto single = cpu->next_float_normal_sample();
    const auto twice = cpu->next_double_normal_sample();
    all.cached[0] = single.value_or(0);
    all.cached[1] = twice.value_or(0);
    all.has_cached = (single.has_value() ? 1 : 0) + (twice.has_value() ? 2 : 0);
    hash_bytes(&all, sizeof(all), state.words);
    return state;
  }
  state.words[0] = generator.current_seed();
  try {
    state.words[1] = generator.get_offset();
  } catch (const std::exception&) {
    // A device whose generators have no offset: all of the state.
    const at::Tensor bytes = generator.get_state();
    hash_bytes(bytes.const_data_ptr(), static_cast<int64_t>(bytes.nbytes()), state.words);
  }
  return state;
}

std::vector<RecordedDraw> copy_generators(const OpInfo& info,
                                          c10::ArrayRef<const c10::IValue> inputs,
                                          c10::Device device) {
  std::vector<RecordedDraw> draws;
  for (const auto& x : inputs) {
    if (x.isGenerator()) {
      draws.push_back(copy_of(x.toGenerator()));
    }
  }
  if (draws.empty()) {
    draws.push_back(copy_of(at::globalContext().defaultGenerator(device)));
  }
  return draws;
}

void note_drawn(const OpInfo& info, std::vector<RecordedDraw>& draws) {
  if (info.takes_generator()) {
    return;
  }
  bool moved = false;
  for (auto& draw : draws) {
    std::lock_guard<std::mutex> lock(draw.generator.mutex());
    draw.after = GeneratorState::of(draw.generator);
    moved |= !(draw.after == GeneratorState::of(draw.before));
  }
  if (!moved) {
    draws.clear();
  }
}

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

StrangerDraws& stranger_draws() {
  static StrangerDraws draws;
  return draws;
}

}  // namespace delta

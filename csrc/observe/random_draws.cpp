#include "observe/random_draws.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <cstring>
#include <mutex>

#include "observe/op_info.h"
#include "util/hash.h"

namespace delta {
namespace {

RecordedDraw copy_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  at::Generator copy = generator.clone();
  return {std::move(generator), std::move(copy), {}};
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

StrangerDraws& stranger_draws() {
  static StrangerDraws draws;
  return draws;
}

}  // namespace delta

#include "rebuild/shortcuts.h"
#include "util/errors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "observe/op_info.h"
#include "state/values.h"
#include "util/bytes_of.h"

namespace delta {
namespace {

using Stack = torch::jit::Stack;
using Given = std::array<c10::Storage, 2>;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.nbytes() == b.nbytes() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::mutex verdicts_mutex;

// A verdict per kind of call, found once in a process.
template <class Find>
bool once_for(uint64_t kind, const Find& find) {
  static std::unordered_map<uint64_t, bool> verdicts;
  {
    std::lock_guard<std::mutex> lock(verdicts_mutex);
    const auto known = verdicts.find(kind);
    if (known != verdicts.end()) {
      return known->second;
    }
  }
  bool verdict = false;
  try {
    verdict = find();
  } catch (const c10::OutOfMemoryError&) {
    return false;  // nothing was shown; another time
  } catch (const BudgetPassed&) {
    return false;
  } catch (const std::exception&) {
  }
  std::lock_guard<std::mutex> lock(verdicts_mutex);
  return verdicts.emplace(kind, verdict).first->second;
}

// ---------------------------------------------------------------- batch norm in training

// native_batch_norm(input, weight?, bias?, running_mean?, running_var?, training, momentum, eps)
//   -> (output, save_mean, save_invstd)
// For contiguous arguments ATen's CPU kernel scales by alpha = invstd * weight and shifts by
// beta = bias - mean * alpha. With running_var = 1 and eps = 0 the same kernel in evaluation finds
// invstd = 1, and alpha is the weight that it is given. For other layouts it rounds after each of
// four operations, and for weights of half precision elsewhere: neither applies.

bool batch_norm_applies(const Stack& arguments) {
  if (arguments.size() != 8 || !arguments[0].isTensor() || !arguments[5].isBool() ||
      !arguments[5].toBool()) {
    return false;
  }
  const auto& input = arguments[0].toTensor();
  const auto type = input.scalar_type();
  const bool half = type == at::kHalf || type == at::kBFloat16;
  if (input.dim() < 2 || input.numel() == 0 ||
      !(type == at::kFloat || type == at::kDouble || half)) {
    return false;
  }
  const auto statistics = half ? at::kFloat : type;
  bool any = false;
  for (size_t i = 1; i < 5; ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) {
      continue;
    }
    const auto& t = arguments[i].toTensor();
    if (t.scalar_type() != statistics || !t.is_contiguous()) {
      return false;
    }
    any = true;
  }
  if (half && !any) {
    return false;  // nothing says that statistics are kept as float
  }
  return input.is_contiguous() ||
         (input.dim() == 4 && input.is_contiguous(at::MemoryFormat::ChannelsLast)) ||
         (input.dim() == 5 && input.is_contiguous(at::MemoryFormat::ChannelsLast3d));
}

void batch_norm(Stack& stack, const Given& given) {
  const at::Tensor input = stack[0].toTensor();
  const auto weight = stack[1].toOptional<at::Tensor>();
  const auto bias = stack[2].toOptional<at::Tensor>();
  const double momentum = stack[6].toDouble();
  const auto type = input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto statistic = [&](const c10::Storage& storage) {
    const auto t = bytes_of(storage).view(type);
    TORCH_CHECK(t.numel() == input.size(1), "one statistic per channel");
    return t;
  };
  const at::Tensor mean = statistic(given[0]);
  const at::Tensor invstd = statistic(given[1]);
  const bool has_weight = weight.has_value() && weight->defined();
  const at::Tensor alpha = has_weight ? at::mul(invstd, *weight) : invstd;
  auto output = std::get<0>(at::native_batch_norm(input, alpha, bias, mean, at::ones_like(mean),
                                                  /*training=*/false, momentum, /*eps=*/0));
  stack.clear();
  stack.emplace_back(std::move(output));
  stack.emplace_back(at::Tensor());
  stack.emplace_back(at::Tensor());
}

bool batch_norm_proven(const Stack& arguments) {
  const auto& input = arguments[0].toTensor();
  const auto given = [&](size_t i) {
    return arguments[i].isTensor() && arguments[i].toTensor().defined();
  };
  const bool channels_last = !input.is_contiguous();
  const auto type = input.scalar_type();
  uint64_t kind = mix(1, static_cast<uint64_t>(type));
  kind = mix(kind, static_cast<uint64_t>(input.dim()) * 16 + (channels_last ? 8 : 0) +
                       (given(1) ? 4 : 0) + (given(2) ? 2 : 0) + (given(3) ? 1 : 0));
  return once_for(kind, [&] {
    for (const int64_t channels : {13, 64}) {
      std::vector<int64_t> sizes(static_cast<size_t>(input.dim()), 5);
      sizes.back() = 11;
      sizes[0] = 6;
      sizes[1] = channels;
      const auto options = at::TensorOptions().dtype(at::kDouble);
      const auto waves = [&](at::IntArrayRef shape, double pace, double shift) {
        const auto n = c10::multiply_integers(shape);
        return at::add(at::sin(at::mul(at::arange(n, options), pace)), shift).view(shape);
      };
      const auto statistics = type == at::kDouble ? at::kDouble : at::kFloat;
      at::Tensor x = at::mul(waves(sizes, 0.7391, 0.31), 2.7).to(type);
      if (channels_last) {
        x = x.contiguous(input.dim() == 4 ? at::MemoryFormat::ChannelsLast
                                          : at::MemoryFormat::ChannelsLast3d);
      }
      Stack stack{x, c10::IValue(), c10::IValue(), c10::IValue(), c10::IValue(), true, 0.1, 1e-5};
      for (size_t i = 1; i < 5; ++i) {
        if (given(i)) {
          stack[i] = waves({channels}, 0.377 * static_cast<double>(i), 1.3).to(statistics);
        }
      }
      const auto optional = [&](size_t i) { return stack[i].toOptional<at::Tensor>(); };
      const auto [output, mean, invstd] = at::native_batch_norm(
          x, optional(1), optional(2), optional(3), optional(4), true, 0.1, 1e-5);
      batch_norm(stack, {mean.storage(), invstd.storage()});
      if (!same_bits(output, stack[0].toTensor())) {
        return false;
      }
    }
    return true;
  });
}

// ---------------------------------------------------------------- bernoulli_

// bernoulli_.float(self, p, generator?)
// ATen draws each number by itself: two words of the Mersenne Twister (Matsumoto and Nishimura,
// 1998) through three layers of calls. Here the stream is made by whole blocks, in loops that the
// compiler turns into vector instructions.

class TwisterBlocks {
 public:
  static constexpr size_t kWords = 624;

  explicit TwisterBlocks(const at::mt19937_data_pod& state)
      : left_(static_cast<size_t>(state.left_) - 1) {
    std::copy(state.state_.begin(), state.state_.end(), state_);
  }

  // Writes the next words of the stream, at most kWords; returns how many.
  size_t next(uint32_t* words) {
    if (left_ == 0) {
      advance();
      left_ = kWords;
    }
    const uint32_t* from = state_ + (kWords - left_);
    for (size_t i = 0; i < left_; ++i) {
      uint32_t y = from[i];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9d2c5680U;
      y ^= (y << 15) & 0xefc60000U;
      words[i] = y ^ (y >> 18);
    }
    return std::exchange(left_, 0);
  }

 private:
  static uint32_t twist(uint32_t u, uint32_t v) {
    return (((u & 0x80000000U) | (v & 0x7fffffffU)) >> 1) ^ ((0U - (v & 1U)) & 0x9908b0dfU);
  }

  void advance() {
    constexpr size_t kAhead = 397;
    constexpr size_t kWrap = kWords - kAhead;
    uint32_t* s = state_;
    for (size_t i = 0; i < kWrap; ++i) {
      s[i] = s[i + kAhead] ^ twist(s[i], s[i + 1]);
    }
    for (size_t i = kWrap; i < kWords - 1; ++i) {
      s[i] = s[i - kWrap] ^ twist(s[i], s[i + 1]);
    }
    s[kWords - 1] = s[kAhead - 1] ^ twist(s[kWords - 1], s[0]);
  }

  uint32_t state_[kWords];
  size_t left_;
};

// A draw is below p where its 53 bits, as an integer, are below p * 2^53: no rounding anywhere.
template <class T>
void compare(const uint32_t* words, size_t draws, uint64_t threshold, T* out) {
  constexpr uint32_t kSign = 0x80000000U;  // makes unsigned order the order of signed numbers
  const auto high_limit = static_cast<int32_t>(threshold >> 32);
  const auto low_limit = static_cast<int32_t>(static_cast<uint32_t>(threshold) ^ kSign);
  for (size_t i = 0; i < draws; ++i) {
    const auto high = static_cast<int32_t>(words[2 * i] & 0x1fffffU);
    const auto low = static_cast<int32_t>(words[2 * i + 1] ^ kSign);
    const bool below = (high < high_limit) | ((high == high_limit) & (low < low_limit));
    out[i] = below ? T(1) : T(0);
  }
}

bool bernoulli_applies(const Stack& arguments) {
  if (arguments.size() != 3 || !arguments[0].isTensor() || !arguments[1].isDouble()) {
    return false;
  }
  const auto& self = arguments[0].toTensor();
  const double p = arguments[1].toDouble();
  const auto type = self.scalar_type();
  return self.is_contiguous() && p >= 0 && p <= 1 &&
         (type == at::kFloat || type == at::kDouble || type == at::kBool || type == at::kHalf ||
          type == at::kBFloat16);
}

void bernoulli(Stack& stack, const Given&) {
  const at::Tensor self = stack[0].toTensor();
  const auto threshold = static_cast<uint64_t>(std::ceil(std::ldexp(stack[1].toDouble(), 53)));
  auto* generator = at::get_generator_or_default<at::CPUGeneratorImpl>(
      stack[2].toOptional<at::Generator>(), at::detail::getDefaultCPUGenerator());
  at::mt19937_data_pod state;
  {
    std::lock_guard<std::mutex> lock(generator->mutex_);
    state = generator->engine().data();
  }
  TORCH_CHECK(state.left_ >= 1 && state.left_ <= static_cast<int>(TwisterBlocks::kWords) &&
                  (state.left_ == 1 ||
                   state.next_ + static_cast<uint32_t>(state.left_) == TwisterBlocks::kWords + 1),
              "the generator's state is not one of a Mersenne Twister");
  AT_DISPATCH_FLOATING_TYPES_AND3(
      at::kBool, at::kHalf, at::kBFloat16, self.scalar_type(), "bernoulli_shortcut", [&] {
        TwisterBlocks blocks(state);
        auto* out = self.mutable_data_ptr<scalar_t>();
        auto missing = static_cast<size_t>(self.numel());
        uint32_t words[TwisterBlocks::kWords + 1];
        size_t there = 0;  // 1: half a draw is left of the last block
        const bool wrong = sabotage() == Sabotage::WrongShortcut;
        while (missing > 0) {
          there += blocks.next(words + there);
          const size_t draws = std::min(there / 2, missing);
          compare(words, draws, threshold - (wrong ? threshold / 2 : 0), out);
          out += draws;
          missing -= draws;
          if (there % 2 == 1) {
            words[0] = words[there - 1];
          }
          there %= 2;
        }
      });
  stack.clear();
  stack.emplace_back(self);
}

// On Intel's CPUs ATen draws with MKL, which is another stream.
bool bernoulli_proven(const Stack& arguments) {
  const auto type = arguments[0].toTensor().scalar_type();
  return once_for(mix(2, static_cast<uint64_t>(type)), [&] {
    for (const double p : {0.5, 0.9, 0.137}) {
      auto generator = at::detail::createCPUGenerator(20221);
      auto again = at::detail::createCPUGenerator(20221);
      for (auto* g : {&generator, &again}) {
        at::check_generator<at::CPUGeneratorImpl>(*g)->random();  // an odd place in the stream
      }
      at::Tensor drawn = at::empty({4099}, type);
      drawn.bernoulli_(p, generator);
      Stack stack{at::empty({4099}, type), p, again};
      bernoulli(stack, {});
      if (!same_bits(drawn, stack[0].toTensor())) {
        return false;
      }
    }
    return true;
  });
}

constexpr Shortcut kBatchNorm{{1, 2}, batch_norm_applies, batch_norm_proven, batch_norm};
constexpr Shortcut kBernoulli{{-1, -1}, bernoulli_applies, bernoulli_proven, bernoulli};

}  // namespace

void forget_shortcuts_lock() { new (&verdicts_mutex) std::mutex(); }

const Shortcut* find_shortcut(const std::string& op_name) {
  if (op_name == "aten::native_batch_norm") {
    return &kBatchNorm;
  }
  if (op_name == "aten::bernoulli_.float") {
    return &kBernoulli;
  }
  return nullptr;
}

}  // namespace delta

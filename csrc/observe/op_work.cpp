#include "observe/op_work.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

namespace delta {
namespace {

using Inputs = c10::ArrayRef<const c10::IValue>;

double of_product(const at::Tensor& a, const at::Tensor& b) {
  return b.dim() == 0 ? 0 : 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
}

// a @ b of the two arguments from `First` on, by matrices or by batches of them.
template <size_t First>
double matrices(Inputs in) {
  return of_product(in[First].toTensor(), in[First + 1].toTensor());
}

template <size_t First>
double with_vector(Inputs in) {
  return 2.0 * static_cast<double>(in[First].toTensor().numel());
}

// Each element of what comes out (of a transposed one: of what goes in) is a product with the
// weights of its group.
double of_convolution(const at::Tensor& weight, int64_t elements, int64_t channels) {
  const auto of_one = static_cast<double>(weight.numel()) / static_cast<double>(channels);
  return 2.0 * static_cast<double>(elements) * of_one;
}

double convolution(Inputs in) {
  const at::Tensor x = in[0].toTensor();
  const at::Tensor weight = in[1].toTensor();
  if (weight.numel() == 0) {
    return 0;
  }
  if (in[6].toBool()) {  // transposed
    return of_convolution(weight, x.numel(), weight.size(0));
  }
  const auto strides = in[3].toIntVector();
  const auto padding = in[4].toIntVector();
  const auto dilation = in[5].toIntVector();
  const auto of = [](const std::vector<int64_t>& numbers, size_t i) {
    return numbers.size() == 1 ? numbers[0] : numbers.at(i);
  };
  const auto spatial = static_cast<size_t>(weight.dim() - 2);
  const auto first = static_cast<size_t>(x.dim()) - spatial;
  int64_t elements = weight.size(0) * (first == 2 ? x.size(0) : 1);
  for (size_t i = 0; i < spatial; ++i) {
    const int64_t reach = of(dilation, i) * (weight.size(static_cast<int64_t>(i) + 2) - 1) + 1;
    const int64_t room = x.size(static_cast<int64_t>(first + i)) + 2 * of(padding, i) - reach;
    elements *= std::max<int64_t>(0, room / of(strides, i) + 1);
  }
  return of_convolution(weight, elements, weight.size(0));
}

// For each of the gradients of input and weight as much as forward.
double convolution_backward(Inputs in) {
  const at::Tensor grad = in[0].toTensor();
  const at::Tensor x = in[1].toTensor();
  const at::Tensor weight = in[2].toTensor();
  if (weight.numel() == 0) {
    return 0;
  }
  const bool transposed = in[7].toBool();
  const auto mask = in[10].toBoolList();
  const double once = of_convolution(weight, transposed ? x.numel() : grad.numel(), weight.size(0));
  return once * ((mask.get(0) ? 1 : 0) + (mask.get(1) ? 1 : 0));
}

// Scores, and what they weigh; of a causal one half. A mask saves nothing.
double attention_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const auto queries = static_cast<double>(query.numel());
  return 2.0 * static_cast<double>(key.size(-2)) *
         (queries +
          queries / static_cast<double>(query.size(-1)) * static_cast<double>(value.size(-1)));
}

double share_of(Inputs in, size_t is_causal) {
  return is_causal < in.size() && in[is_causal].isBool() && in[is_causal].toBool() ? 0.5 : 1.0;
}

template <size_t IsCausal>
double attention(Inputs in) {
  return share_of(in, IsCausal) *
         attention_of(in[0].toTensor(), in[1].toTensor(), in[2].toTensor());
}

// Five products where forward has two: the scores are made again.
template <size_t IsCausal>
double attention_backward(Inputs in) {
  return 2.5 * share_of(in, IsCausal) *
         attention_of(in[1].toTensor(), in[2].toTensor(), in[3].toTensor());
}

}  // namespace

CountFlops find_flops(const std::string& name) {
  static const std::unordered_map<std::string, CountFlops> known{
      {"aten::mm", &matrices<0>},
      {"aten::bmm", &matrices<0>},
      {"aten::addmm", &matrices<1>},
      {"aten::_addmm_activation", &matrices<1>},
      {"aten::baddbmm", &matrices<1>},
      {"aten::addbmm", &matrices<1>},
      {"aten::mv", &with_vector<0>},
      {"aten::addmv", &with_vector<1>},
      {"aten::dot", &with_vector<0>},
      {"aten::vdot", &with_vector<0>},
      {"aten::convolution", &convolution},
      {"aten::_convolution", &convolution},
      {"aten::convolution_overrideable", &convolution},
      {"aten::convolution_backward", &convolution_backward},
      {"aten::_scaled_dot_product_flash_attention", &attention<4>},
      {"aten::_scaled_dot_product_flash_attention_for_cpu", &attention<4>},
      {"aten::_scaled_dot_product_efficient_attention", &attention<6>},
      {"aten::_scaled_dot_product_cudnn_attention", &attention<6>},
      {"aten::_scaled_dot_product_flash_attention_backward", &attention_backward<11>},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", &attention_backward<7>},
      {"aten::_scaled_dot_product_efficient_attention_backward", &attention_backward<11>},
      {"aten::_scaled_dot_product_cudnn_attention_backward", &attention_backward<14>},
  };
  const auto found = known.find(name);
  return found != known.end() ? found->second : nullptr;
}

bool reads_a_part(const std::string& name) {
  static const std::unordered_set<std::string> names{"aten::embedding", "aten::index_select",
                                                     "aten::index", "aten::gather", "aten::take"};
  return names.count(name) > 0;
}

int64_t touched_bytes(const at::Tensor& t) {
  if (!t.defined() || !t.has_storage() || t.layout() != at::kStrided) {
    return 0;
  }
  int64_t elements = 1;
  for (int64_t i = 0; i < t.dim(); ++i) {
    elements *= t.stride(i) == 0 ? std::min<int64_t>(1, t.size(i)) : t.size(i);
  }
  return elements * static_cast<int64_t>(t.itemsize());
}

}  // namespace delta

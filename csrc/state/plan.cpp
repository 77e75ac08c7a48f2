#include "state/plan.h"

#include <c10/util/Exception.h>

#include "state/values.h"

namespace delta {
namespace {

void check_offsets(const std::vector<int64_t>& offsets, size_t values, size_t rows,
                   const char* name) {
  TORCH_CHECK_VALUE(offsets.size() == values + 1 && offsets.front() == 0 &&
                        offsets.back() == static_cast<int64_t>(rows),
                    "a plan's ", name, " do not fit its values");
  for (size_t i = 0; i < values; ++i) {
    TORCH_CHECK_VALUE(offsets[i] <= offsets[i + 1], "a plan's ", name, " go down at value ", i);
  }
}

}  // namespace

void Plan::check() const {
  const size_t values = fingerprint.size();
  TORCH_CHECK_VALUE(weight.size() == values, "a plan has ", weight.size(), " weights for ", values,
                    " values");
  check_offsets(use_offsets, values, uses.size(), "uses");
  check_offsets(interval_offsets, values, exit.size(), "intervals");
  TORCH_CHECK_VALUE(copy_back_at.size() == exit.size() && dropped_twice.size() == values,
                    "a plan's columns have different lengths");
  for (size_t value = 0; value < values; ++value) {
    const int64_t first = interval_offsets[value];
    const int64_t count = interval_offsets[value + 1] - first;
    TORCH_CHECK_VALUE(count <= 2, "a plan moves value ", value, " out of device memory ", count - 1,
                      " times; plans are carried out where each value leaves once");
    for (int64_t i = first; i < first + count; ++i) {
      const auto row = static_cast<size_t>(i);
      const bool known = exit[row] == kStays || exit[row] == static_cast<int64_t>(Exit::Drop) ||
                         exit[row] == static_cast<int64_t>(Exit::Swap);
      TORCH_CHECK_VALUE(known, "a plan has the exit ", exit[row], " for value ", value);
      TORCH_CHECK_VALUE(i == first || exit[row] == kStays, "a plan moves value ", value,
                        " once more after it came back; plans are carried out where each value "
                        "leaves once");
    }
  }
}

int64_t Plan::exit_of(std::size_t key) const {
  const auto first = static_cast<size_t>(interval_offsets[key]);
  return interval_offsets[key] < interval_offsets[key + 1] ? exit[first] : kStays;
}

int64_t Plan::copy_back_of(std::size_t key) const {
  const auto first = static_cast<size_t>(interval_offsets[key]);
  return interval_offsets[key] < interval_offsets[key + 1] ? copy_back_at[first] : kNever;
}

}  // namespace delta

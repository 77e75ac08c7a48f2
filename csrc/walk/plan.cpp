#include "walk/plan.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>

#include "walk/row.h"

namespace delta {
namespace {

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) {
    return;
  }
  std::ostringstream text;
  (text << ... << parts);
  throw std::invalid_argument(text.str());
}

void check_offsets(const std::vector<int64_t>& offsets, size_t values, size_t rows,
                   const char* name) {
  require(offsets.size() == values + 1 && offsets.front() == 0 &&
              offsets.back() == static_cast<int64_t>(rows),
          "a plan's ", name, " do not fit its values");
  for (size_t i = 0; i < values; ++i) {
    require(offsets[i] <= offsets[i + 1], "a plan's ", name, " go down at value ", i);
  }
}

}  // namespace

void Plan::check() const {
  const size_t values = fingerprint.size();
  require(weight.size() == values, "a plan has ", weight.size(), " weights for ", values,
          " values");
  require(maker.size() == values && bytes.size() == values, "a plan has ", maker.size(),
          " makers and ", bytes.size(), " sizes for ", values, " values");
  check_offsets(use_offsets, values, uses.size(), "uses");
  check_offsets(interval_offsets, values, exit.size(), "intervals");
  require(begin.size() == exit.size() && end.size() == exit.size() &&
              copy_back_at.size() == exit.size() && dropped_twice.size() == values,
          "a plan's columns have different lengths");
  for (size_t value = 0; value < values; ++value) {
    for (int64_t i = interval_offsets[value]; i < interval_offsets[value + 1]; ++i) {
      const int64_t way = exit[static_cast<size_t>(i)];
      const bool known = way == kStays || way == static_cast<int64_t>(Exit::Drop) ||
                         way == static_cast<int64_t>(Exit::Swap);
      require(known, "a plan has the exit ", way, " for value ", value);
    }
    if (as_written) {
      check_as_written(value);
    } else {
      check_once(value);
    }
  }
}

void Plan::check_once(std::size_t key) const {
  const int64_t count = interval_offsets[key + 1] - interval_offsets[key];
  require(count <= 2, "a plan moves value ", key, " out of device memory ", count - 1,
          " times; a plan that is not carried out as written moves each value once");
  const bool again = count == 2 && exit[static_cast<size_t>(interval_offsets[key]) + 1] != kStays;
  require(!again, "a plan moves value ", key,
          " once more after it came back; a plan that is not carried out as written "
          "moves each value once");
}

void Plan::check_as_written(std::size_t key) const {
  int64_t before = 0;  // the tick at which the interval before ends
  for (int64_t i = interval_offsets[key]; i < interval_offsets[key + 1]; ++i) {
    const auto row = static_cast<size_t>(i);
    const bool last = i + 1 == interval_offsets[key + 1];
    require(before <= begin[row] && begin[row] <= end[row], "a plan has the interval [", begin[row],
            ", ", end[row], ") of value ", key, " out of order");
    require(last || exit[row] != kStays, "a plan has a gap of value ", key, " behind tick ",
            end[row], " without a way out");
    const bool copied = !last && exit[row] == static_cast<int64_t>(Exit::Swap);
    const bool in_gap =
        copied && end[row] <= copy_back_at[row] && copy_back_at[row] <= begin[row + 1];
    require(copied ? in_gap : copy_back_at[row] == kNever, "a plan copies value ", key,
            " back at tick ", copy_back_at[row], ", outside of the gap behind tick ", end[row],
            " that a copy crosses");
    before = end[row];
  }
}

void Plan::sort() {
  value_of.resize(exit.size());
  by_begin.clear();
  by_end.clear();
  for (size_t value = 0; value < fingerprint.size(); ++value) {
    for (int64_t i = interval_offsets[value]; i < interval_offsets[value + 1]; ++i) {
      value_of[static_cast<size_t>(i)] = static_cast<int64_t>(value);
      if (i > interval_offsets[value]) {
        by_begin.push_back(i);
      }
      if (exit[static_cast<size_t>(i)] != kStays) {
        by_end.push_back(i);
      }
    }
  }
  const auto in_order_of = [](const std::vector<int64_t>& ticks) {
    return [&ticks](int64_t a, int64_t b) {
      return ticks[static_cast<size_t>(a)] < ticks[static_cast<size_t>(b)];
    };
  };
  std::stable_sort(by_begin.begin(), by_begin.end(), in_order_of(begin));
  std::stable_sort(by_end.begin(), by_end.end(), in_order_of(end));
}

int64_t Plan::exit_of(std::size_t key) const {
  const auto first = static_cast<size_t>(interval_offsets[key]);
  return interval_offsets[key] < interval_offsets[key + 1] ? exit[first] : kStays;
}

int64_t Plan::copy_back_of(std::size_t key) const {
  const auto first = static_cast<size_t>(interval_offsets[key]);
  return interval_offsets[key] < interval_offsets[key + 1] ? copy_back_at[first] : kNever;
}

int64_t Plan::interval_at(std::size_t key, int64_t tick) const {
  int64_t found = -1;
  for (int64_t i = interval_offsets[key]; i < interval_offsets[key + 1]; ++i) {
    if (found < 0 || begin[static_cast<size_t>(i)] <= tick) {
      found = i;
    }
  }
  return found;
}

bool Plan::covers(std::size_t key, int64_t tick) const {
  const int64_t i = interval_at(key, tick);
  return i < 0 || (begin[static_cast<size_t>(i)] <= tick && tick < end[static_cast<size_t>(i)]);
}

}  // namespace delta

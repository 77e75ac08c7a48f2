// A set of addresses, kept as ranges that do not touch.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>

namespace delta {

class AddressRanges {
 public:
  void add(const void* data, int64_t bytes) {
    auto first = address(data);
    auto end = first + static_cast<uintptr_t>(bytes);
    for (auto it = first_that_ends_at_or_behind(first); it != ends_.end() && it->first <= end;) {
      first = first < it->first ? first : it->first;
      end = end > it->second ? end : it->second;
      it = ends_.erase(it);
    }
    ends_.emplace(first, end);
  }

  // Whether any of these bytes is in the set.
  bool meets(const void* data, int64_t bytes) const {
    const auto first = address(data);
    auto it = first_that_ends_at_or_behind(first + 1);
    return it != ends_.end() && it->first < first + static_cast<uintptr_t>(bytes);
  }

  void clear() { ends_.clear(); }

 private:
  using Ends = std::map<uintptr_t, uintptr_t>;  // by beginning

  static uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

  // As the ranges do not overlap, their ends come in the order of their beginnings.
  Ends::const_iterator first_that_ends_at_or_behind(uintptr_t at) const {
    auto it = ends_.upper_bound(at);
    if (it != ends_.begin() && std::prev(it)->second >= at) {
      --it;
    }
    return it;
  }

  Ends ends_;
};

}  // namespace delta

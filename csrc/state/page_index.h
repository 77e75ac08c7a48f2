// Which pages lie over some memory.
//
// Note: when it is made
//   The few memories that others own as well, in most programs, are looked for in all pages. Only
//   after many such searches are the pages put in order, until one of them goes; those that come
//   later are looked through one by one, until there are many of them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "state/values.h"

namespace delta {

class PageIndex {
 public:
  // One of the pages is new, or lies elsewhere now.
  void note(Page& page) {
    if (made_) {
      late_.push_back(&page);
    }
  }

  // One of them is about to go, or several.
  void clear() {
    if (made_) {
      for (auto& pages : by_size_) {
        pages.clear();
      }
      late_.clear();
      made_ = false;
    }
    searches_ = 0;
  }

  // Calls `act` with each page of the table `pages` that lies over these bytes now. `act` may add
  // to the table.
  template <class Pages, class Act>
  void for_each_over(const Pages& pages, const void* data, int64_t bytes, const Act& act) {
    std::vector<Page*> found;
    const auto look = [&](Page* page) {
      if (page->lies_over(data, bytes)) {
        found.push_back(page);
      }
    };
    if (++searches_ <= kMostPlainSearches) {
      for (const auto& [storage, page] : pages) {
        look(page.get());
      }
    } else {
      if (!made_ || late_.size() > kMostLate) {
        make(pages);
      }
      const auto first = address(data);
      const auto end = first + static_cast<uintptr_t>(bytes);
      for (size_t size = 0; size < by_size_.size(); ++size) {
        const auto& sorted = by_size_[size];
        if (sorted.empty()) {
          continue;
        }
        const uintptr_t most = uintptr_t{2} << size;  // all of these have fewer bytes
        const Place from{first > most ? first - most : 0, nullptr};
        for (auto it = std::lower_bound(sorted.begin(), sorted.end(), from);
             it != sorted.end() && it->begin < end; ++it) {
          look(it->page);
        }
      }
      for (Page* page : late_) {
        look(page);
      }
      std::sort(found.begin(), found.end());  // one that moved is there twice
      found.erase(std::unique(found.begin(), found.end()), found.end());
    }
    for (Page* page : found) {
      act(*page);
    }
  }

 private:
  struct Place {
    uintptr_t begin;
    Page* page;
    bool operator<(const Place& other) const { return begin < other.begin; }
  };

  static constexpr int kMostPlainSearches = 64;
  static constexpr size_t kMostLate = 1024;

  static uintptr_t address(const void* data) { return reinterpret_cast<uintptr_t>(data); }

  template <class Pages>
  void make(const Pages& pages) {
    for (auto& each : by_size_) {
      each.clear();
    }
    late_.clear();
    made_ = true;
    for (const auto& [storage, page] : pages) {
      if (page->data != nullptr && page->bytes > 0) {
        size_t size = 0;
        while (page->bytes >> (size + 1) > 0) {
          ++size;
        }
        by_size_[size].push_back({address(page->data), page.get()});
      }
    }
    for (auto& each : by_size_) {
      std::sort(each.begin(), each.end());
    }
  }

  bool made_ = false;
  int searches_ = 0;                            // since it was cleared
  std::array<std::vector<Place>, 63> by_size_;  // by the power of two, then by address
  std::vector<Page*> late_;
};

}  // namespace delta

#include "observe/outside_memory.h"

#include <algorithm>

#include "pool/cpu_pool.h"
#include "util/gil.h"

namespace delta {
namespace {

constexpr int64_t kCheapToWatchBytes = 64 * 1024;
// Of a larger one that others can write to so many times as much may be hashed as ops read of it;
// beyond that, all of it so many times in all.
constexpr int64_t kMostTimesRead = 16;
constexpr int64_t kMostLooksInVain = 8;

}  // namespace

int64_t most_watched_bytes = int64_t{1} << 30;

OutsideMemory::OutsideMemory(SessionState& state, Sources& sources)
    : Part(state), sources_(sources) {
  if (!options_.device.is_cpu()) {
    const c10::OptionalDeviceGuard guard(options_.device);
    own_deleter_ = c10::GetAllocator(options_.device.type())->allocate(1).get_deleter();
  }
}

bool OutsideMemory::is_foreign(const c10::DataPtr& data) const {
  if (options_.device.is_cpu()) {
    return cpu_pool::is_foreign(data);
  }
  return own_deleter_ != nullptr && data.get() != nullptr && data.get_deleter() != own_deleter_;
}

void OutsideMemory::set_unguarded(Page& page, int64_t loan) {
  if (loan == kForGood) {
    page.outside.loans = 0;
  } else if (!page.outside.unguarded || page.outside.loans > 0) {
    ++page.outside.loans;
    lent_[loan] = c10::intrusive_ptr<Page>::reclaim_copy(&page);
  }
  page.outside.unguarded = true;
}

void OutsideMemory::take_back(const std::vector<int64_t>& loans) {
  Guard guard(lock_);
  for (const int64_t loan : loans) {
    auto entry = lent_.find(loan);
    if (entry != lent_.end()) {
      returned_.push_back(std::move(entry->second));
      lent_.erase(entry);
    }
  }
  end_loans();
}

void OutsideMemory::end_loans() {
  const auto has_ended = [](const c10::intrusive_ptr<Page>& page) {
    if (page->outside.loans > 1) {
      --page->outside.loans;
      return true;
    }
    if (page->outside.loans == 0 || page->weak.expired()) {
      return true;
    }
    const Value& value = *page->current;
    if (page->tickets > 0 || value.producer || page->current.use_count() > 1) {
      return false;
    }
    page->outside.loans = 0;
    page->outside.unguarded = false;
    page->set_current(make_source(page->bytes));
    return true;
  };
  returned_.erase(std::remove_if(returned_.begin(), returned_.end(), has_ended), returned_.end());
}

void OutsideMemory::find_owners(Page& page, const c10::DataPtr& data) {
  if (page.bytes == 0 || sabotage() == Sabotage::ForeignMemoryTrusted) {
    return;
  }
  if (is_foreign(data)) {
    pages_.add_foreign(page);
    share_with_others(page);
    pages_.for_each_over(page, [&](Page& other) { link_if_aliases(page, other); });
  } else if (page.data != nullptr && pages_.may_be_foreign(page.data, page.bytes)) {
    pages_.for_each_foreign_over(page, [&](Page& other) { link_if_aliases(page, other); });
  }
}

// Notes it if both lie over the same memory.
void OutsideMemory::link_if_aliases(Page& page, Page& other) {
  if (&page == &other || !other.lies_over(page.data, page.bytes)) {
    return;
  }
  auto alive = lock(other.weak);
  if (!alive) {
    return;
  }
  const bool moved = other.was_moved(*alive);
  thread_trash().take(c10::Storage(std::move(alive)));
  if (moved) {
    return;  // when it is used next its owners are looked for where it lies now
  }
  for (Page* each : {&page, &other}) {
    each->outside.has_aliases = true;
    pages_.add_foreign(*each);
    share_with_others(*each);
  }
}

bool OutsideMemory::watches() const {
  return options_.drop && options_.device.is_cpu() && options_.verify != Verify::Off;
}

bool OutsideMemory::can_watch(const Page& page) const {
  return options_.device.is_cpu() && page.bytes <= most_watched_bytes &&
         !page.outside.dear_to_watch;
}

void OutsideMemory::watch(Value& value, const void* data, int64_t bytes) const {
  if (watches() && data != nullptr && bytes <= most_watched_bytes) {
    value.hash = hash_of(data, bytes);
    value.watched = true;
  }
}

void OutsideMemory::share_with_others(Page& page, int64_t loan, ToClone* to_clone) {
  ++page.epoch;  // copies that were made so far are no longer good
  if (options_.device.is_cpu() && !watches()) {
    return;
  }
  set_unguarded(page, loan);
  if (to_clone != nullptr) {
    const auto keep = [&](Page& each) {
      if (sources_.needs_clone(each)) {
        to_clone->push_back(each.current);
      }
    };
    keep(page);
    for_each_alias(page, keep);
  }
  if (!can_watch(page)) {
    if (to_clone != nullptr) {
      sources_.forget_content(page);
    } else {
      forget_shared(page);
    }
  } else if (!page.current->watched && !page.outside.unread &&
             page.residency() == Residency::Resident && !nothing_is_saved_at_rest()) {
    watch(*page.current, page.data, page.bytes);
  }
}

void OutsideMemory::spoil_newly_shared() {
  for (const auto& value : newly_shared_) {
    value->spoiled = true;
    sources_.doubt_recipes();
  }
  newly_shared_.clear();
}

void OutsideMemory::take_newly_shared(ToClone& to_clone) {
  to_clone.insert(to_clone.end(), newly_shared_.begin(), newly_shared_.end());
  newly_shared_.clear();
}

bool OutsideMemory::nothing_is_saved_at_rest() const {
  return resting_ && pages_.managed().empty();
}

// Forgets a content that others can write to: what dropped pages need of it is copied before that.
void OutsideMemory::forget_shared(Page& page) {
  if (sources_.needs_clone(page)) {
    newly_shared_.push_back(page.current);
  }
  sources_.forget_content(page);
}

void OutsideMemory::before_write_of_others(Page& page, ToClone& to_clone) {
  for_each_alias(page, [&](Page& other) {
    if (sources_.needs_clone(other)) {
      to_clone.push_back(other.current);
    }
    sources_.forget_content(other);
  });
}

void OutsideMemory::spoil_others(Page& page) {
  for_each_alias(page, [&](Page& other) {
    sources_.spoil_anchor(other);
    sources_.forget_content(other);
  });
}

// Calls `act` with each other page over the same memory.
template <class Act>
void OutsideMemory::for_each_alias(Page& page, const Act& act) {
  if (!page.outside.has_aliases) {
    return;
  }
  pages_.for_each_foreign_over(page, [&](Page& other) {
    if (&other != &page) {
      act(other);
    }
  });
}

// All of the page was looked at for an op that reads this tensor. Where ops read small parts of it
// again and again, as rows of a data set, that gets too dear.
void OutsideMemory::note_look(Page& page, const at::Tensor& t) {
  if (!page.outside.unguarded || page.bytes <= kCheapToWatchBytes) {
    return;
  }
  const int64_t worth = kMostTimesRead * static_cast<int64_t>(t.numel() * t.element_size());
  page.outside.looked_in_vain_bytes =
      std::max<int64_t>(0, page.outside.looked_in_vain_bytes + page.bytes - worth);
  page.outside.dear_to_watch |= page.outside.looked_in_vain_bytes > kMostLooksInVain * page.bytes;
}

void OutsideMemory::check_content(Page& page, const at::Tensor& t) {
  if (!options_.device.is_cpu()) {
    return;
  }
  auto* storage = storage_of(t);
  if (!page.current->watched) {
    if (page.outside.unguarded && watches()) {
      // It was handed out while nobody looked. What is copied lazily moves before it is written to.
      if (page.current->producer && page.data != nullptr) {
        forget_shared(page);
      }
      if (can_watch(page)) {
        watch(*page.current, storage->data(), page.bytes);
      }
    }
    return;
  }
  if (page.current->lies_in(*storage)) {
    note_look(page, t);
    if (page.outside.dear_to_watch) {
      forget_shared(page);
    }
    return;
  }
  set_unguarded(page);  // who wrote once may write again
  sources_.spoil(page, t);
  watch(*page.current, storage->data(), page.bytes);
}

}  // namespace delta

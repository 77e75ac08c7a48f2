// Memory that others than ops can write to: foreign memory, and what was lent to arrays. It is
// watched by hashes, or nothing is recomputed from it.
#include "pool/cpu_pool.h"
#include "state/session.h"

namespace delta {

int64_t most_watched_bytes = int64_t{1} << 30;

// Whether the memory is not the allocator's own.
bool Session::is_foreign(const c10::DataPtr& data) const {
  if (options_.device.is_cpu()) {
    return cpu_pool::is_foreign(data);
  }
  return own_deleter_ != nullptr && data.get() != nullptr && data.get_deleter() != own_deleter_;
}

void Session::add_foreign(Page& page) {
  if (!page.outside.listed) {
    page.outside.listed = true;
    foreign_.push_back(c10::intrusive_ptr<Page>::reclaim_copy(&page));
  }
  if (page.data != nullptr) {
    foreign_ranges_.add(page.data, page.bytes);
  }
}

void Session::set_unguarded(Page& page, int64_t loan) {
  if (loan == kForGood) {
    page.outside.loans = 0;
  } else if (!page.outside.unguarded || page.outside.loans > 0) {
    ++page.outside.loans;
    lent_[loan] = c10::intrusive_ptr<Page>::reclaim_copy(&page);
  }
  page.outside.unguarded = true;
}

// The arrays of these loans are gone.
void Session::take_back(const std::vector<int64_t>& loans) {
  Guard guard(*this);
  for (const int64_t loan : loans) {
    auto entry = lent_.find(loan);
    if (entry != lent_.end()) {
      returned_.push_back(std::move(entry->second));
      lent_.erase(entry);
    }
  }
  end_loans();
}

// A page whose last array is gone is guarded again, as soon as no recipe starts from what it holds.
void Session::end_loans() {
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

// Of a storage that is new here, or lies elsewhere now: do others hold its memory, or storages over
// the same memory?
void Session::find_owners(Page& page, const c10::DataPtr& data) {
  if (page.bytes == 0 || sabotage() == Sabotage::ForeignMemoryTrusted) {
    return;
  }
  if (is_foreign(data)) {
    add_foreign(page);
    share_with_others(page);
    page_index_.for_each_over(pages_, page.data, page.bytes,
                              [&](Page& other) { link_if_aliases(page, other); });
  } else if (page.data != nullptr && foreign_ranges_.meets(page.data, page.bytes)) {
    for_each_foreign_over(page, [&](Page& other) { link_if_aliases(page, other); });
  }
}

// Notes it if both lie over the same memory.
void Session::link_if_aliases(Page& page, Page& other) {
  if (&page == &other || !other.lies_over(page.data, page.bytes)) {
    return;
  }
  auto alive = lock(other.weak);
  if (!alive) {
    return;
  }
  const bool moved = was_moved(other, *alive);
  thread_trash().take(c10::Storage(std::move(alive)));
  if (moved) {
    return;  // when it is used next its owners are looked for where it lies now
  }
  for (Page* each : {&page, &other}) {
    each->outside.has_aliases = true;
    add_foreign(*each);
    share_with_others(*each);
  }
}

// Whether contents are compared here: what is never recomputed needs no evidence, and the bytes of
// an accelerator cannot be looked at without waiting for it.
bool Session::watches() const {
  return options_.drop && options_.device.is_cpu() && options_.verify != Verify::Off;
}

// Whether somebody can look at the page's content: not on an accelerator, and not at too much.
bool Session::can_watch(const Page& page) const {
  return options_.device.is_cpu() && page.bytes <= most_watched_bytes &&
         !page.outside.dear_to_watch;
}

void Session::watch(Value& value, const void* data, int64_t bytes) const {
  if (watches() && data != nullptr && bytes <= most_watched_bytes) {
    value.hash = hash_of(data, bytes);
    value.watched = true;
  }
}

// From here on the content of the page is looked at whenever an op reads it. What dropped pages
// need of it is to be copied now. Where nobody can look it is unknown; who found that it is shared
// takes what is to be copied before the lock is let go.
void Session::share_with_others(Page& page, int64_t loan, ToClone* to_clone) {
  ++page.epoch;  // copies that were made so far are no longer good
  if (options_.device.is_cpu() && !watches()) {
    return;
  }
  set_unguarded(page, loan);
  if (to_clone != nullptr) {
    const auto keep = [&](Page& each) {
      if (needs_clone(each)) {
        to_clone->push_back(each.current);
      }
    };
    keep(page);
    for_each_alias(page, keep);
  }
  if (!can_watch(page)) {
    if (to_clone != nullptr) {
      forget_content(page);
    } else {
      forget_shared(page);
    }
  } else if (!page.current->watched && !page.outside.unread &&
             page.residency() == Residency::Resident && !nothing_is_saved_at_rest()) {
    watch(*page.current, page.data, page.bytes);
  }
}

void Session::take_newly_shared(ToClone& to_clone) {
  to_clone.insert(to_clone.end(), newly_shared_.begin(), newly_shared_.end());
  newly_shared_.clear();
}

// What a step finds when it begins is taken as it is.
bool Session::nothing_is_saved_at_rest() const { return resting_ && managed_.empty(); }

// From here on the page holds something that no recorded op made.
void Session::forget_content(Page& page) {
  page.set_current(make_source(page.bytes));
  if (page.tickets > 0) {
    emit(EventKind::Inadmissible, &page, page.bytes, 0);
  }
}

// The same, where somebody else can write to it: what dropped pages need of it is copied before.
void Session::forget_shared(Page& page) {
  if (needs_clone(page)) {
    newly_shared_.push_back(page.current);
  }
  forget_content(page);
}

// Others over the same memory are about to be written to through this page.
void Session::before_write_of_others(Page& page, ToClone& to_clone) {
  for_each_alias(page, [&](Page& other) {
    if (needs_clone(other)) {
      to_clone.push_back(other.current);
    }
    forget_content(other);
  });
}

// They were written to through this page, and what lay there is gone.
void Session::spoil_others(Page& page) {
  for_each_alias(page, [&](Page& other) {
    spoil_anchor(other);
    forget_content(other);
  });
}

// Calls `act` with each page of `foreign_` over the memory of this one. Few are looked through;
// many are found among all pages, which are in order then.
template <class Act>
void Session::for_each_foreign_over(Page& page, const Act& act) {
  if (foreign_.size() > kFewForeign) {
    page_index_.for_each_over(pages_, page.data, page.bytes, [&](Page& other) {
      if (other.outside.listed) {
        act(other);
      }
    });
    return;
  }
  for (size_t i = 0, n = foreign_.size(); i < n; ++i) {  // `act` may add to them
    if (foreign_[i]->lies_over(page.data, page.bytes)) {
      act(*foreign_[i]);
    }
  }
}

// Calls `act` with each other page over the same memory.
template <class Act>
void Session::for_each_alias(Page& page, const Act& act) {
  if (!page.outside.has_aliases) {
    return;
  }
  for_each_foreign_over(page, [&](Page& other) {
    if (&other != &page) {
      act(other);
    }
  });
}

// Whether the bytes are those that the value was watched with; they are if it is not watched.
bool Session::holds(const Value& value, const c10::StorageImpl& storage) const {
  return !value.watched ||
         hash_of(storage.data(),
                 std::min<int64_t>(value.bytes, static_cast<int64_t>(storage.nbytes()))) ==
             value.hash;
}

// All of the page was looked at for an op that reads this tensor. Where ops read small parts of it
// again and again, as rows of a data set, that gets too dear.
void Session::note_look(Page& page, const at::Tensor& t) {
  if (!page.outside.unguarded || page.bytes <= kCheapToWatchBytes) {
    return;
  }
  const int64_t worth = kMostTimesRead * static_cast<int64_t>(t.numel() * t.element_size());
  page.outside.looked_in_vain_bytes =
      std::max<int64_t>(0, page.outside.looked_in_vain_bytes + page.bytes - worth);
  page.outside.dear_to_watch |= page.outside.looked_in_vain_bytes > kMostLooksInVain * page.bytes;
}

// An op is about to read the page: is what lies there what we think? On an accelerator nobody can
// look.
void Session::check_content(Page& page, const at::Tensor& t) {
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
  if (holds(*page.current, *storage)) {
    note_look(page, t);
    if (page.outside.dear_to_watch) {
      forget_shared(page);
    }
    return;
  }
  set_unguarded(page);  // who wrote once may write again
  spoil(page, t);
  watch(*page.current, storage->data(), page.bytes);
}

// Python code is about to get hold of a storage's memory, or to write to it past the dispatcher.
// `loan` names the array that it gets; kForGood: what it gets is not an array, and may be kept.
void Session::before_raw_access(const c10::Storage& storage, bool writes, int64_t loan) {
  if (storage.device() != options_.device || sabotage() == Sabotage::RawWritesUnseen) {
    return;
  }
  ToClone to_clone;
  {
    Guard guard(*this);
    if (writes && nothing_is_saved_at_rest()) {
      return;
    }
    sweep_if_due();  // where ops of a step do not
    Page& page = page_for(storage);
    if (writes) {
      before_write_unseen(page, to_clone);
    } else {
      share_with_others(page, loan, &to_clone);
    }
    take_newly_shared(to_clone);
  }
  if (!to_clone.empty()) {
    clone_sources(to_clone);
  }
}

}  // namespace delta

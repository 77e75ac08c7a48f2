#include "state/page_table.h"

#include <algorithm>

#include "util/streams.h"

namespace delta {

Page* PageTable::find(const c10::StorageImpl* storage) const {
  auto it = pages_.find(storage);
  return it == pages_.end() ? nullptr : it->second.get();
}

AddedPage PageTable::find_or_add(const c10::Storage& storage) {
  auto [entry, is_new] = pages_.emplace(storage.unsafeGetStorageImpl(), nullptr);
  if (is_new) {
    try {
      entry->second = c10::make_intrusive<Page>(storage.getWeakStorageImpl());
    } catch (...) {
      pages_.erase(entry);
      throw;
    }
  }
  return {*this, *entry->second, is_new};
}

AddedPage::~AddedPage() {
  if (is_new_ && page_.current == nullptr) {
    table_.forget(page_);
  }
}

void PageTable::forget(const Page& page) {
  index_.clear();
  pages_.erase(page.weak._unsafe_get_target());
}

void PageTable::erase(const Page& page) {
  index_.clear();
  pages_.erase(page.strong.unsafeGetStorageImpl());
}

void PageTable::rehome(Page& page, const c10::Storage& storage) {
  auto self = pages_.find(page.strong.unsafeGetStorageImpl());
  c10::intrusive_ptr<Page> keep = self != pages_.end() ? self->second : nullptr;
  if (self != pages_.end()) {
    pages_.erase(self);
  }
  thread_trash().take(std::move(page.strong));
  page.strong = storage;
  page.weak = storage.getWeakStorageImpl();
  look(page, *storage.unsafeGetStorageImpl());
  page.last_use = now_.tick;
  page.stream = current_stream_id(options_.device);
  page.many_streams = false;
  page.below.arrival.reset();
  if (keep) {
    pages_.emplace(storage.unsafeGetStorageImpl(), std::move(keep));
  }
}

void PageTable::look(Page& page, const c10::StorageImpl& storage) {
  page.look_at(storage);
  index_.note(page);
}

void PageTable::look_again(Page& page, const c10::StorageImpl& storage) {
  const int64_t before = page.bytes;
  look(page, storage);
  if (page.candidate >= 0) {
    managed_resident_bytes_ += page.bytes - before;
  }
}

Page* PageTable::managed(int64_t id) const {
  const auto entry = managed_.find(id);
  return entry == managed_.end() ? nullptr : entry->second;
}

void PageTable::manage(Page& page) {
  page.id = next_page_++;
  managed_.emplace(page.id, &page);
}

void PageTable::unmanage(Page& page) { managed_.erase(page.id); }

void PageTable::add_candidate(Page& page) {
  if (page.candidate >= 0) {
    return;
  }
  page.candidate = static_cast<int32_t>(candidates_.size());
  candidates_.push_back(&page);
  managed_resident_bytes_ += page.bytes;
}

void PageTable::remove_candidate(Page& page) {
  if (page.candidate < 0) {
    return;
  }
  Page* last = candidates_.back();
  candidates_[static_cast<size_t>(page.candidate)] = last;
  last->candidate = page.candidate;
  candidates_.pop_back();
  page.candidate = -1;
  managed_resident_bytes_ -= page.bytes;
}

void PageTable::add_foreign(Page& page) {
  if (!page.outside.listed) {
    page.outside.listed = true;
    foreign_.push_back(c10::intrusive_ptr<Page>::reclaim_copy(&page));
  }
  if (page.data != nullptr) {
    foreign_ranges_.add(page.data, page.bytes);
  }
}

void PageTable::sweep_if_due() {
  if (pages_.size() >= sweep_at_) {
    sweep();
    sweep_at_ = std::max<size_t>(512, 2 * pages_.size());
  }
}

namespace {

bool is_over(const Page& page) { return page.tickets == 0 && page.weak.expired(); }

}  // namespace

void PageTable::sweep() {
  index_.clear();
  for (auto it = pages_.begin(); it != pages_.end();) {
    Page& page = *it->second;
    if (is_over(page)) {
      if (page.uncounted_bytes > 0) {
        account_.charge(page, 0);
      }
      it = pages_.erase(it);
    } else {
      ++it;
    }
  }
  sweep_foreign();
  sweep_anchors();  // only now: the pages that went may have been the last to reach these
}

void PageTable::sweep_foreign() {
  const auto rest = std::remove_if(foreign_.begin(), foreign_.end(),
                                   [](const auto& page) { return is_over(*page); });
  if (rest == foreign_.end()) {
    return;
  }
  foreign_.erase(rest, foreign_.end());
  foreign_ranges_.clear();
  for (const auto& page : foreign_) {
    add_foreign(*page);
  }
}

void PageTable::sweep_anchors() {
  if (!has_anchors_) {
    return;
  }
  has_anchors_ = false;
  for (auto& [storage, page] : pages_) {
    if (!page->current->anchor) {
      continue;
    }
    if (page->current.use_count() == 1) {
      thread_trash().take(std::move(page->current->anchor));
      page->current->anchor = c10::Storage();
    } else {
      has_anchors_ = true;
    }
  }
}

void PageTable::forget_past() {
  Guard guard(lock_);
  const auto past = [](const Page& page) {
    return page.tickets == 0 && page.current->producer && page.current.use_count() == 1;
  };
  std::vector<Page*> waiting;
  for (auto& [storage, page] : pages_) {
    if (past(*page)) {
      waiting.push_back(page.get());
    }
  }
  while (!waiting.empty()) {
    Page& page = *waiting.back();
    waiting.pop_back();
    if (!past(page)) {
      continue;
    }
    auto record = page.current->producer;
    auto source = make_source(page.bytes);
    source->versions = page.versions;
    source->watched = page.current->watched;
    source->hash = page.current->hash;
    page.set_current(std::move(source));
    if (record.use_count() > 1) {
      continue;  // another output needs it
    }
    // With this record go the last uses of what it read, perhaps.
    std::vector<Page*> homes;
    for (auto& ref : record->inputs) {
      if (ref.value->home != nullptr) {
        homes.push_back(ref.value->home);
      }
    }
    record.reset();
    for (Page* home : homes) {
      if (past(*home)) {
        waiting.push_back(home);
      }
    }
  }
  sweep();
}

}  // namespace delta

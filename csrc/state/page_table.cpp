// Which page a storage is, where its bytes lie, and whether they are still what they were.
#include "pool/cpu_pool.h"
#include "state/session.h"

namespace delta {

Page* Session::find_page(const c10::StorageImpl* storage) {
  auto it = pages_.find(storage);
  return it == pages_.end() ? nullptr : it->second.get();
}

Page* Session::page_of(const at::Tensor& t) {
  auto* storage = storage_of(t);
  const bool counts = version_of(t) >= 0;
  auto [entry, unknown] = pages_.emplace(storage, nullptr);
  if (!unknown) {
    Page* page = entry->second.get();
    note_stream(*page);
    if (page->residency() == Residency::Resident && was_moved(*page, *storage)) {
      move_page(*page, t.storage());
      if (counts) {
        page->take_version(t.unsafeGetTensorImpl()->version_counter());
      }
    } else if (counts && page->versions.moved(t.unsafeGetTensorImpl()->version_counter()) &&
               sabotage() != Sabotage::AliasVersionsUnseen) {
      spoil(*page, t);
    }
    if (page->outside.unread) {
      note_first_use(*page, t.storage());
    }
    return page;
  }
  pages_.erase(entry);
  Page& page = new_source(t.storage());
  note_first_use(page, t.storage());
  if (counts) {
    page.take_version(t.unsafeGetTensorImpl()->version_counter());
  }
  return &page;
}

// The page of a storage that is seen for the first time.
Page& Session::new_source(const c10::Storage& storage) {
  auto fresh = c10::make_intrusive<Page>(storage.getWeakStorageImpl());
  Page& page = *fresh;
  pages_.emplace(storage.unsafeGetStorageImpl(), std::move(fresh));
  page.many_streams = !options_.device.is_cpu();  // whose memory it is was not seen
  look(page, *storage.unsafeGetStorageImpl());
  page.set_current(make_source(page.bytes));
  page.outside.unread = true;
  find_owners(page, storage.data_ptr());
  return page;
}

Page& Session::page_for(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  Page* page = find_page(impl);
  if (page == nullptr) {
    return new_source(storage);
  }
  if (page->residency() == Residency::Resident && was_moved(*page, *impl)) {
    move_page(*page, storage);
  }
  return *page;
}

// The page of what is about to be written to; null where no page can lie over that memory.
Page* Session::page_to_write(const at::Tensor& t) {
  if (!is_plain(t)) {
    return nullptr;
  }
  const c10::Storage& storage = t.storage();
  if (find_page(storage.unsafeGetStorageImpl()) != nullptr) {
    return &page_for(storage);
  }
  if (t.device() != options_.device || storage.nbytes() == 0) {
    return nullptr;
  }
  const bool shared = is_foreign(storage.data_ptr()) ||
                      foreign_ranges_.meets(storage.data(), static_cast<int64_t>(storage.nbytes()));
  return shared ? &new_source(storage) : nullptr;
}

// Whether the storage's bytes lie elsewhere than they did, or are more or fewer.
bool Session::was_moved(const Page& page, const c10::StorageImpl& storage) const {
  const bool unknown = page.data == nullptr && page.bytes > 0;  // see look_at
  if (unknown ||
      (storage.data() == page.data && static_cast<int64_t>(storage.nbytes()) == page.bytes)) {
    return false;
  }
  return sabotage() != Sabotage::ResizesUnseen;
}

void Session::look(Page& page, const c10::StorageImpl& storage) {
  page.look_at(storage);
  page_index_.note(page);
}

// Of a page that may be managed.
void Session::look_again(Page& page, const c10::StorageImpl& storage) {
  const int64_t before = page.bytes;
  look(page, storage);
  if (page.candidate >= 0) {
    managed_resident_bytes_ += page.bytes - before;
  }
}

// Code that the dispatcher does not see gave the storage other memory: it is another storage.
void Session::move_page(Page& page, const c10::Storage& storage) {
  look_again(page, *storage.unsafeGetStorageImpl());
  page.doubts.resized = true;
  spoil_anchor(page);
  page.versions.clear();
  forget_content(page);
  if (!page.outside.unread) {
    note_first_use(page, storage);
  }
  find_owners(page, storage.data_ptr());
}

bool Session::storage_alive(const Value& v) const {
  return v.home != nullptr && v.home->residency() == Residency::Resident &&
         (v.home->strong || !v.home->weak.expired());
}

c10::Storage Session::storage_there(const Value& v) const {
  if (!storage_alive(v) || !content_unchanged(*v.home) || !v.readable()) {
    return {};
  }
  c10::Storage storage = v.home->strong;
  if (!storage) {
    auto alive = lock(v.home->weak);
    storage = alive ? c10::Storage(std::move(alive)) : c10::Storage();
  }
  if (storage && (was_moved(*v.home, *storage.unsafeGetStorageImpl()) ||
                  !holds(v, *storage.unsafeGetStorageImpl()))) {
    thread_trash().take(std::move(storage));
    return {};
  }
  order_after_arrival(*v.home, storage);
  return storage;
}

bool Session::content_unchanged(const Page& page) const {
  return page.versions.unchanged() || sabotage() == Sabotage::AliasVersionsUnseen;
}

void Session::sweep_if_due() {
  if (pages_.size() >= sweep_at_) {
    sweep();
    sweep_at_ = std::max<size_t>(512, 2 * pages_.size());
  }
}

void Session::sweep() {
  page_index_.clear();
  for (auto it = pages_.begin(); it != pages_.end();) {
    Page& page = *it->second;
    if (page.tickets == 0 && page.weak.expired()) {
      if (page.uncounted_bytes > 0) {
        charge_uncounted(page, 0);
      }
      it = pages_.erase(it);
    } else {
      ++it;
    }
  }
  const auto is_over = [](const auto& page) { return page->tickets == 0 && page->weak.expired(); };
  const auto rest = std::remove_if(foreign_.begin(), foreign_.end(), is_over);
  if (rest != foreign_.end()) {
    foreign_.erase(rest, foreign_.end());
    foreign_ranges_.clear();
    for (const auto& page : foreign_) {
      add_foreign(*page);
    }
  }
  // Only now: the pages that went may have been the last to reach these.
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

}  // namespace delta

#include "observe/tensor_pages.h"

namespace delta {

Page* TensorPages::page_of(const at::Tensor& t) {
  auto* storage = storage_of(t);
  const bool counts = version_of(t) >= 0;
  Page* known = pages_.find(storage);
  if (known == nullptr) {
    Page& page = new_source(t.storage());
    account_.charge_first_read(page, t.storage());
    if (counts) {
      page.take_version(t.unsafeGetTensorImpl()->version_counter());
    }
    return &page;
  }
  Page& page = *known;
  page.note_stream(options_.device);
  if (page.residency() == Residency::Resident && page.was_moved(*storage)) {
    move_page(page, t.storage());
    if (counts) {
      page.take_version(t.unsafeGetTensorImpl()->version_counter());
    }
  } else if (counts && page.versions.moved(t.unsafeGetTensorImpl()->version_counter()) &&
             sabotage() != Sabotage::AliasVersionsUnseen) {
    sources_.spoil(page, t);
  }
  if (page.outside.unread) {
    account_.charge_first_read(page, t.storage());
  }
  return &page;
}

// The page of a storage that is seen for the first time.
Page& TensorPages::new_source(const c10::Storage& storage) {
  const AddedPage added = pages_.find_or_add(storage);
  Page& page = *added;
  page.many_streams = !options_.device.is_cpu();  // whose memory it is was not seen
  pages_.look(page, *storage.unsafeGetStorageImpl());
  page.set_current(make_source(page.bytes));
  page.outside.unread = true;
  outside_.find_owners(page, storage.data_ptr());
  return page;
}

Page& TensorPages::page_for(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  Page* page = pages_.find(impl);
  if (page == nullptr) {
    return new_source(storage);
  }
  if (page->residency() == Residency::Resident && page->was_moved(*impl)) {
    move_page(*page, storage);
  }
  return *page;
}

Page* TensorPages::page_to_write(const at::Tensor& t) {
  if (!is_plain(t)) {
    return nullptr;
  }
  const c10::Storage& storage = t.storage();
  if (pages_.find(storage.unsafeGetStorageImpl()) != nullptr) {
    return &page_for(storage);
  }
  if (t.device() != options_.device || storage.nbytes() == 0) {
    return nullptr;
  }
  const bool shared = outside_.is_foreign(storage.data_ptr()) ||
                      pages_.may_be_foreign(storage.data(), static_cast<int64_t>(storage.nbytes()));
  return shared ? &new_source(storage) : nullptr;
}

// Code that the dispatcher does not see gave the storage other memory: it is another storage.
void TensorPages::move_page(Page& page, const c10::Storage& storage) {
  pages_.look_again(page, *storage.unsafeGetStorageImpl());
  page.doubts.resized = true;
  sources_.spoil_anchor(page);
  page.versions.clear();
  sources_.forget_content(page);
  if (!page.outside.unread) {
    account_.charge_first_read(page, storage);
  }
  outside_.find_owners(page, storage.data_ptr());
}

void TensorPages::mark_written(const at::Tensor& t) {
  Guard guard(lock_);
  if (Page* page = page_to_write(t)) {
    sources_.spoil(*page, t);
    outside_.spoil_others(*page);
  }
  outside_.spoil_newly_shared();
}

void TensorPages::take_in(const at::Tensor& t) {
  Guard guard(lock_);
  if (is_plain(t) && t.device() == options_.device && t.storage().nbytes() > 0) {
    page_of(t);
  }
}

void TensorPages::prepare_write(const at::Tensor& t) {
  ToClone to_clone;
  {
    Guard guard(lock_);
    if (Page* page = page_to_write(t)) {
      before_write(*page, t, to_clone);
    }
    outside_.take_newly_shared(to_clone);
  }
  sources_.clone(to_clone);
}

void TensorPages::before_write(Page& page, const at::Tensor& t, ToClone& to_clone) {
  if (version_of(t) >= 0 && page.versions.moved(t.unsafeGetTensorImpl()->version_counter())) {
    sources_.spoil(page, t);
    outside_.before_write_of_others(page, to_clone);
    return;
  }
  before_write_unseen(page, to_clone);
}

void TensorPages::before_write_unseen(Page& page, ToClone& to_clone) {
  if (sources_.needs_clone(page)) {
    to_clone.push_back(page.current);
  }
  // Whose counter will count this write is not known: `.data` has one of its own.
  page.versions.clear();
  sources_.forget_content(page);
  outside_.before_write_of_others(page, to_clone);
}

void TensorPages::before_raw_access(const c10::Storage& storage, bool writes, int64_t loan) {
  if (storage.device() != options_.device || sabotage() == Sabotage::RawWritesUnseen) {
    return;
  }
  ToClone to_clone;
  {
    Guard guard(lock_);
    if (writes && outside_.nothing_is_saved_at_rest()) {
      return;
    }
    pages_.sweep_if_due();  // where ops of a step do not
    Page& page = page_for(storage);
    if (writes) {
      before_write_unseen(page, to_clone);
    } else {
      outside_.share_with_others(page, loan, &to_clone);
    }
    outside_.take_newly_shared(to_clone);
  }
  if (!to_clone.empty()) {
    sources_.clone(to_clone);
  }
}

}  // namespace delta

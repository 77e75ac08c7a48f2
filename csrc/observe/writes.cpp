// What a write changes: values that are gone, copies taken before it, sources that are spoiled.
#include "state/session.h"

namespace delta {

// Something wrote to the page that we did not see. Recipes that start from its former content are
// lost: rebuilding them raises, and what is still there is not dropped any more.
void Session::spoil(Page& page, const at::Tensor& t) {
  spoil_anchor(page);
  forget_content(page);
  if (version_of(t) >= 0) {
    page.take_version(t.unsafeGetTensorImpl()->version_counter());
  }
}

void Session::spoil_anchor(Page& page) {
  if (page.current->anchor &&
      page.current->anchor.unsafeGetStorageImpl() == page.weak._unsafe_get_target()) {
    page.current->spoiled = true;
    ++anchor_epoch_;
  }
}

void Session::mark_written(const at::Tensor& t) {
  Guard guard(*this);
  if (Page* page = page_to_write(t)) {
    spoil(*page, t);
    spoil_others(*page);
  }
  for (const auto& value : newly_shared_) {
    value->spoiled = true;
    ++anchor_epoch_;
  }
  newly_shared_.clear();
}

// Something that we shall not see is about to write to this tensor.
void Session::prepare_write(const at::Tensor& t) {
  ToClone to_clone;
  {
    Guard guard(*this);
    if (Page* page = page_to_write(t)) {
      before_write(*page, t, to_clone);
    }
    take_newly_shared(to_clone);
  }
  clone_sources(to_clone);
}

// Something that is not taped is about to write to the page.
void Session::before_write(Page& page, const at::Tensor& t, ToClone& to_clone) {
  if (version_of(t) >= 0 && page.versions.moved(t.unsafeGetTensorImpl()->version_counter())) {
    spoil(page, t);
    before_write_of_others(page, to_clone);
    return;
  }
  before_write_unseen(page, to_clone);
}

void Session::before_write_unseen(Page& page, ToClone& to_clone) {
  if (needs_clone(page)) {
    to_clone.push_back(page.current);
  }
  page.versions
      .clear();  // whose counter will count this write is not known: `.data` has one of its own
  forget_content(page);
  before_write_of_others(page, to_clone);
}

// A source that some dropped page needs gets a copy of its own before it is overwritten. Where
// there is no room for that, what needs it raises when it is rebuilt.
void Session::clone_sources(const ToClone& sources) {
  for (const auto& value : sources) {
    c10::Storage copy;
    if (sabotage() != Sabotage::NoCloneOnWrite) {
      try {
        const c10::Storage old = storage_to_copy(*value);
        auto* allocator = c10::GetAllocator(old.device_type());
        c10::DataPtr data = allocator->allocate(old.nbytes());
        allocator->copy_data(data.get(), old.data(), old.nbytes());
        copy = c10::Storage(c10::Storage::use_byte_size_t(), old.nbytes(), std::move(data),
                            allocator, true);
      } catch (const std::exception&) {
        Guard guard(*this);
        value->spoiled |= static_cast<bool>(value->anchor);
        ++anchor_epoch_;
        continue;
      }
    }
    Guard guard(*this);
    if (copy) {
      thread_trash().take(std::move(value->anchor));
      value->set_anchor(std::move(copy));
    }
    value->versions.clear();
    ++counters_.clones_on_write;
    cloned_bytes_ += value->bytes;
  }
}

// Where a source lies, whether or not anything needs it yet.
c10::Storage Session::storage_to_copy(const Value& value) {
  Guard guard(*this);  // another thread may be about to copy it too
  if (value.anchor) {
    return value.anchor;
  }
  has_anchors_ = true;
  TORCH_CHECK(value.home != nullptr, "delta_runtime: the source is gone");
  auto alive = lock(value.home->weak);
  TORCH_CHECK(alive, "delta_runtime: the source's memory is gone");
  return c10::Storage(std::move(alive));
}

// Whether what is about to be overwritten is an anchored source that some record can still reach.
// Lets go of an anchor that none can.
bool Session::needs_clone(Page& page) {
  Value& value = *page.current;
  if (!value.anchor || value.anchor.unsafeGetStorageImpl() != page.weak._unsafe_get_target()) {
    return false;
  }
  if (page.current.use_count() > 1) {
    return true;
  }
  thread_trash().take(std::move(value.anchor));
  value.anchor = c10::Storage();
  return false;
}

}  // namespace delta

#include "state/sources.h"

#include "util/gil.h"

namespace delta {

void Sources::forget_content(Page& page) {
  page.set_current(make_source(page.bytes));
  if (page.tickets > 0) {
    events_.emit(EventKind::Inadmissible, &page, page.bytes, 0);
  }
}

void Sources::spoil(Page& page, const at::Tensor& t) {
  spoil_anchor(page);
  forget_content(page);
  if (version_of(t) >= 0) {
    page.take_version(t.unsafeGetTensorImpl()->version_counter());
  }
}

void Sources::spoil_anchor(Page& page) {
  if (page.current->anchor &&
      page.current->anchor.unsafeGetStorageImpl() == page.weak._unsafe_get_target()) {
    page.current->spoiled = true;
    doubt_recipes();
  }
}

bool Sources::needs_clone(Page& page) {
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

void Sources::clone(const ToClone& sources) {
  for (const auto& value : sources) {
    c10::Storage copy;
    if (sabotage() != Sabotage::NoCloneOnWrite) {
      try {
        const c10::Storage old = storage_to_copy(*value);
        auto* allocator = c10::GetAllocator(old.device_type());
        c10::DataPtr data = memory_for(*allocator, old.nbytes());
        allocator->copy_data(data.get(), old.data(), old.nbytes());
        copy = c10::Storage(c10::Storage::use_byte_size_t(), old.nbytes(), std::move(data),
                            allocator, true);
      } catch (const std::exception&) {
        Guard guard(lock_);
        value->spoiled |= static_cast<bool>(value->anchor);
        doubt_recipes();
        continue;
      }
    }
    Guard guard(lock_);
    if (copy) {
      thread_trash().take(std::move(value->anchor));
      value->set_anchor(std::move(copy));
    }
    value->versions.clear();
    ++counters_.clones_on_write;
    now_.cloned_bytes += value->bytes;
  }
}

c10::DataPtr Sources::memory_for(c10::Allocator& allocator, size_t bytes) const {
  for (int attempt = 0;; ++attempt) {
    try {
      return allocator.allocate(bytes);
    } catch (const c10::OutOfMemoryError&) {
      if (!make_room_ || !make_room_(static_cast<int64_t>(bytes), attempt)) {
        throw;
      }
    }
  }
}

// Where a source lies, whether or not anything needs it yet.
c10::Storage Sources::storage_to_copy(const Value& value) {
  Guard guard(lock_);  // another thread may be about to copy it too
  if (value.anchor) {
    return value.anchor;
  }
  pages_.note_anchor();
  TORCH_CHECK(value.home != nullptr, "delta_runtime: the source is gone");
  auto alive = lock(value.home->weak);
  TORCH_CHECK(alive, "delta_runtime: the source's memory is gone");
  return c10::Storage(std::move(alive));
}

}  // namespace delta

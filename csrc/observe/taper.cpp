#include "observe/taper.h"

#include <algorithm>

#include "observe/operands.h"
#include "rebuild/replay_thread.h"

namespace delta {
namespace {

// Smaller sources that others can write to are copied when an op reads them, if they are so many
// times smaller than another input; else nothing is recomputed from them.
constexpr int64_t kMostCopiedBytes = 256 * 1024;
constexpr int64_t kWorthACopy = 8;

// Whether the tensor's elements are all of the storage, each once.
bool covers(const at::Tensor& t, const Page& page) {
  return t.storage_offset() == 0 &&
         (t.is_non_overlapping_and_dense() || sabotage() == Sabotage::CoverageByCount) &&
         page.bytes <= t.numel() * static_cast<int64_t>(t.itemsize());
}

}  // namespace

c10::intrusive_ptr<OpRecord> new_record(OpInfo* info, c10::ArrayRef<const c10::IValue> inputs,
                                        c10::Device device, bool grads, bool floats) {
  auto record = c10::make_intrusive<OpRecord>();
  record->info = info;
  record->grad_mode = grads;
  record->numbers = NumericContext::without_threads(
      device.type(), static_cast<uint8_t>((info->multiplies ? kNeedsPrecisions : 0) |
                                          (floats && info->certain ? 0 : kNeedsDefaultDtype)));
  record->thread = thread_serial();
  record->device = device;
  record->uncertain_behind = !info->certain;
  if (info->random || !info->certain) {  // what is not certain may draw without saying so
    record->draws = copy_generators(*info, inputs, device);
  }
  return record;
}

// The list with what was taken as a value left out.
template <class T>
c10::List<T> Taper::list(size_t argument, c10::ArrayRef<c10::IValue> elements) {
  c10::List<T> rest;
  rest.reserve(elements.size());
  for (size_t k = 0; k < elements.size(); ++k) {
    const bool given = elements[k].isTensor() && elements[k].toTensor().defined();
    if (given && tensor(argument, static_cast<int>(k), elements[k].toTensor())) {
      rest.push_back(at::Tensor());
    } else {
      rest.push_back(elements[k].to<T>());
    }
  }
  return rest;
}

// Of collectives, which are never run again: only what they write matters.
void Taper::list_of_lists(size_t argument, c10::ArrayRef<c10::IValue> lists) {
  for (const auto& each : lists) {
    for_each_tensor(each, [&](const at::Tensor& t, int) {
      if (t.defined()) {
        tensor(argument, -1, t);
      }
    });
  }
}

void Taper::tape(c10::ArrayRef<const c10::IValue> inputs) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& x = inputs[i];
    if (x.isTensor()) {
      if (tensor(i, -1, x.toTensor())) {
        record_.arguments.emplace_back();
      } else {
        record_.arguments.push_back(x);
      }
    } else if (x.isTensorList()) {
      record_.arguments.emplace_back(list<at::Tensor>(i, x.toListRef()));
    } else if (x.isOptionalTensorList()) {
      record_.arguments.emplace_back(list<std::optional<at::Tensor>>(i, x.toListRef()));
    } else {
      record_.arguments.push_back(x);
      if (record_.info->collective && x.isList()) {
        list_of_lists(i, x.toListRef());
      }
    }
  }
  open_.depth = depth_ + 1;
  for (auto& value : small_of_others_) {
    if (value->home != nullptr && value->bytes * kWorthACopy <= largest_) {
      to_clone_.push_back(value);  // a copy now is cheaper than an error later
    } else {
      value->spoiled = true;  // a copy would take what recomputing from it gives
    }
  }
  if (writes_through_two_storages()) {
    record_.repeats = false;
  }
}

// Whether it uses memory through a storage that it writes to through another. Replay would give
// it memory of its own for each.
bool Taper::writes_through_two_storages() const {
  for (const auto& w : open_.written) {
    const Page& page = *w.page;
    for (size_t i = 0; page.outside.has_aliases && i < open_.inputs.size(); ++i) {
      const Page& other = *open_.inputs[i];
      if (&other != &page && other.lies_over(page.data, page.bytes)) {
        return true;
      }
    }
  }
  return false;
}

// Returns false for a tensor that stays in the arguments itself.
bool Taper::tensor(size_t argument, int index, const at::Tensor& t) {
  if (!is_plain(t) || t.device() != device_) {
    keep(t);
    return false;
  }
  auto* impl = t.unsafeGetTensorImpl();
  if (impl->is_wrapped_number()) {
    record_.keeps_objects = true;
    if (sabotage() != Sabotage::WrappedNumberLost) {
      return false;
    }
  }
  Page* page = tensors_.page_of(t);
  const Write write = write_of(argument, t, *page);
  const bool reads = write != Write::Overwrite && write != Write::Scratch;
  if (reads && (page->current->watched || page->outside.unguarded)) {
    outside_.check_content(*page, t);
  }
  if (write != Write::No) {
    page->doubts.being_written = true;
    const bool inference = impl->is_inference();
    open_.written.push_back({page, inference ? c10::VariableVersion() : impl->version_counter(),
                             !inference, t.requires_grad(), static_cast<int16_t>(argument), index});
    if (sources_.needs_clone(*page)) {
      to_clone_.push_back(page->current);
    }
    outside_.before_write_of_others(*page, to_clone_);
  }
  Value& value = *page->current;
  if (page->outside.unguarded && value.watched && !value.producer && !value.anchor &&
      page->bytes <= kMostCopiedBytes) {
    small_of_others_.push_back(page->current);
  } else {
    largest_ = std::max(largest_, page->bytes);
  }
  if (reads && page->tickets == 0) {
    depth_ = std::max(depth_, value.depth);
  }
  record_.uncertain_behind |= value.producer && value.producer->uncertain_behind;
  open_.inputs.push_back(c10::intrusive_ptr<Page>::reclaim_copy(page));
  record_.inputs.push_back(
      {page->current, ViewSpec::of(t), static_cast<int16_t>(argument), index, write});
  return true;
}

// A tensor that stays among the arguments is not anchored: its version says whether it is the
// same.
void Taper::keep(const at::Tensor& t) {
  if (!t.defined()) {
    return;
  }
  record_.keeps_objects = true;
  if (version_of(t) >= 0) {
    record_.kept_versions.emplace_back().take(t.unsafeGetTensorImpl()->version_counter());
  }
}

Write Taper::write_of(size_t argument, const at::Tensor& t, const Page& page) const {
  const OpInfo& info = *record_.info;
  if (info.moves_storage) {
    return Write::No;
  }
  const Write write = info.write_of(argument);
  if (write == Write::Scratch && !side_writes_hold_) {
    return Write::No;
  }
  if (write == Write::Overwrite && !covers(t, page)) {
    return Write::InPlace;  // a part of the storage keeps its old content
  }
  if (info.collective && sabotage() == Sabotage::CollectivesUnseen) {
    return Write::No;
  }
  return write;
}

}  // namespace delta

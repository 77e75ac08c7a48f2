#include "observe/saved_tensors.h"

#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>

#include "util/errors.h"

namespace delta {

namespace {

void check_version(const Ticket& ticket) {
  if (ticket.version < 0) {
    return;
  }
  const auto now = static_cast<int64_t>(ticket.version_counter.current_version());
  if (now == ticket.version) {
    return;
  }
  std::ostringstream text;
  text << "one of the variables needed for gradient computation has been modified by an inplace "
          "operation: ";
  if (ticket.state == Ticket::State::Kept) {
    text << "[" << ticket.kept.toString() << " " << ticket.kept.sizes() << "]";
  } else {
    text << "[" << c10::toString(c10::typeMetaToScalarType(ticket.view.dtype)) << " "
         << ticket.view.geometry.sizes_arrayref() << "]";
  }
  text << " is at version " << now << "; expected version " << ticket.version
       << " instead. Hint: enable anomaly detection to find the operation that failed to compute "
          "its gradient, with "
          "torch.autograd.set_detect_anomaly(True).";
  throw InplaceModificationError(text.str());
}

const torch::autograd::Node* grad_fn_of(const at::Tensor& t) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(t);
  return meta != nullptr ? meta->grad_fn_.get() : nullptr;
}

// The saved tensor as autograd would find it now, if it has been pointed to other memory since.
at::Tensor as_pointed_elsewhere(const Ticket& ticket) {
  auto impl = ticket.original.lock();
  if (!impl || !impl->has_storage()) {
    return {};
  }
  at::Tensor original(std::move(impl));
  const auto* now = storage_of(original);
  const bool managed = ticket.state == Ticket::State::Managed;
  const auto* then = managed ? ticket.page->weak._unsafe_get_target() : storage_of(ticket.kept);
  if (now == then && ticket.view.is_of(original)) {
    return {};
  }
  if (ticket.was_leaf) {
    return original.tensor_data();
  }
  const auto* grad_fn = grad_fn_of(original);
  if (ticket.made_by_op && grad_fn != nullptr && grad_fn->sequence_nr() + 1 == ticket.node &&
      grad_fn->thread_id() == ticket.thread) {
    return {};  // saved by the node that made it, which holds the memory and not the tensor
  }
  throw InplaceModificationError(
      "delta_runtime: a tensor of sizes " + c10::str(original.sizes()) +
      " that backward needs was pointed to other memory since it was saved (`x.data = ...`). Which "
      "of the two autograd would use is not known here. Assign after backward, or leave the step "
      "out with delta_runtime.disable(). Gradients of this backward are incomplete; weights and "
      "optimizer state are as they were.");
}

}  // namespace

void SavedTensors::count_kept(const at::Tensor& t, Page* page, KeptReason reason) {
  if (page != nullptr) {
    if (page->reason_step == now_.step) {
      return;
    }
    page->reason_step = now_.step;
  }
  counters_.kept_bytes[static_cast<int>(reason)] +=
      t.has_storage() ? t.storage().sym_nbytes().maybe_as_int().value_or(0) : 0;
}

void SavedTensors::pack(const at::Tensor& t, Ticket& ticket) {
  const bool inference = t.unsafeGetTensorImpl()->is_inference();
  if (!inference) {
    ticket.version_counter = t.unsafeGetTensorImpl()->version_counter();
    ticket.version = static_cast<int64_t>(ticket.version_counter.current_version());
  }
  auto keep = [&](KeptReason reason, Page* page) {
    ticket.state = Ticket::State::Kept;
    ticket.reason = reason;
    count_kept(t, page, reason);
  };
  const bool plain = is_plain(t);
  if (!plain || inference) {
    ticket.kept = inference || !plain ? t.detach() : at::Tensor(t.tensor_data());
  } else {
    ticket.original =
        c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>(t.getIntrusivePtr());
    ticket.node = at::sequence_number::peek();
    ticket.thread = at::RecordFunction::currentThreadId();
    ticket.was_leaf = grad_fn_of(t) == nullptr;
    ticket.view = ViewSpec::of(t);
  }
  auto& ts = thread_state();
  Guard guard(lock_);
  ++counters_.packs;
  ++levels_.live_tickets;
  now_.saves = mix(now_.saves, plain ? static_cast<uint64_t>(t.numel()) : 1);
  ticket.counted = true;
  if (!plain || inference) {
    keep(KeptReason::Layout, nullptr);
    return;
  }
  if (t.device() != options_.device) {
    ticket.kept = at::Tensor(t.tensor_data());
    keep(KeptReason::Device, nullptr);
    return;
  }
  Page* page = pages_.find(storage_of(t));
  auto& open = ts.open;
  if (open.region) {
    ticket.kept = at::Tensor(t.tensor_data());
    keep(KeptReason::Opaque, page);
    return;
  }
  if (open.active && open.record) {
    bool written = false;
    for (auto& w : open.written) {
      written |= w.page == page;
    }
    if (page == nullptr || written) {
      ticket.kept = t;  // until the op ends
      ticket.state = Ticket::State::Pending;
      ticket.made_by_op = true;
      open.pending.push_back(&ticket);
      return;
    }
  } else if (page != nullptr) {
    page = tensors_.page_of(t);  // notices writes that nobody recorded
  }
  if (page == nullptr) {
    ticket.kept = at::Tensor(t.tensor_data());
    keep(KeptReason::Unknown, nullptr);
    return;
  }
  resolve(ticket, page, t);
}

void SavedTensors::resolve(Ticket& ticket, Page* page, const at::Tensor& t) {
  ticket.state = Ticket::State::Kept;
  KeptReason reason = KeptReason::Managed;
  if (page == nullptr) {
    reason = KeptReason::Unknown;
  } else if (!page->current->producer) {
    reason = page->current->input ? KeptReason::Source : KeptReason::Opaque;
  } else if (page->bytes < options_.min_bytes) {
    reason = KeptReason::Small;
  }
  ticket.reason = reason;
  if (reason != KeptReason::Managed) {
    ticket.kept = at::Tensor(t.tensor_data());
    count_kept(ticket.kept, page, reason);
    return;
  }
  ticket.state = Ticket::State::Managed;
  ticket.page = c10::intrusive_ptr<Page>::reclaim_copy(page);
  if (page->tickets++ == 0) {
    manage(*page, t);
  }
  page->last_use = now_.tick;
  ticket.kept = at::Tensor();  // of one that was pending, whose tensor the caller still holds
}

// The first ticket of a page.
void SavedTensors::manage(Page& page, const at::Tensor& t) {
  pages_.manage(page);
  page.strong = t.storage();
  page.packed_at = now_.tick;
  page.retry_tick = 0;
  page.next_use_cursor = 0;
  page.frees = 0;
  page.below.refused_at = -1;
  page.below.clean_at_once = true;
  page.below.prefetched = false;
  page.return_tick = -1;
  page.exit = plans_.default_exit(page, tiers_.none() ? 0 : tiers_.seconds_in_for(page.bytes));
  page.planned = false;
  counters_.packed_bytes += page.bytes;
  const auto& producer = *page.current->producer;
  page.weight = plans_.default_weight(page);
  if (plans_.attach(page)) {
    ++counters_.plan_hits;
  }
  events_.emit(EventKind::Packed, &page, page.bytes, static_cast<double>(producer.seconds),
               now_.key_of(*page.current), 1);
  for (const auto& ref : producer.inputs) {
    const Page* home = ref.value->home;
    if (home != nullptr && home->tickets > 0 && home != &page) {
      events_.emit(EventKind::Edge, &page, 0, 0, home->id);
    }
  }
  pages_.add_candidate(page);
  log_.note_held(page);
  tiers_.queue_write_back(page);
}

at::Tensor SavedTensors::unpack_resident(Ticket& ticket) {
  return evidence_.has_verdict() ? at::Tensor() : view_if_resident(ticket);
}

at::Tensor SavedTensors::view_if_resident(Ticket& ticket) {
  check_version(ticket);
  if (at::Tensor now = as_pointed_elsewhere(ticket); now.defined()) {
    Guard guard(lock_);
    ++counters_.unpacks;
    return now;
  }
  if (ticket.state != Ticket::State::Managed) {
    Guard guard(lock_);
    ++counters_.unpacks;
    return ticket.kept;
  }
  Page& page = *ticket.page;
  c10::Storage storage;
  {
    Guard guard(lock_);
    if (page.residency() != Residency::Resident || page.doubts.audit_pending ||
        page.below.prefetched || page.below.arrival) {
      return {};
    }
    note_used(page);
    tiers_.order_after_arrival(page, page.strong);
    storage = page.strong;
  }
  return view_for(ticket, storage);
}

// Whoever writes to it is counted with all others who hold the tensor that was saved.
at::Tensor SavedTensors::view_for(const Ticket& ticket, const c10::Storage& storage) const {
  at::Tensor t = ticket.view.over(storage, options_.device);
  if (ticket.version >= 0 && sabotage() != Sabotage::FreshVersionCounter) {
    t.unsafeGetTensorImpl()->set_version_counter(ticket.version_counter);
  }
  return t;
}

void SavedTensors::note_used(Page& page) {
  page.last_use = now_.tick;
  page.note_stream(options_.device);
  now_.frontier = page.packed_at;
  ++counters_.unpacks;
  ++counters_.managed_unpacks;
  events_.emit(EventKind::Used, &page, page.bytes, 0, now_.key_of(*page.current));
}

at::Tensor SavedTensors::unpack(Ticket& ticket) {
  if (evidence_.has_verdict()) {
    tell(evidence_
             .take_verdict());  // of a program that updates weights by hand: no optimizer was told
  }
  if (at::Tensor there = view_if_resident(ticket); there.defined()) {
    return there;
  }
  Page& page = *ticket.page;
  if (plans_.as_written()) {
    Guard guard(lock_);
    plans_.note_asked(page);
  }
  // The storage that rebuild returns pins the page until the view over it exists.
  c10::Storage storage = replay_.rebuild(page);
  if (on_device_.exists() && !entered_) {  // nobody judges it later
    tell(evidence_.judge());
  }
  bool audit_now = false;
  {
    Guard guard(lock_);
    audit_now = page.doubts.audit_pending;
    page.doubts.audit_pending = false;
    note_used(page);
  }
  if (audit_now) {
    replay_.audit(page);
  }
  return view_for(ticket, storage);
}

// The last ticket of a page is gone. Under the lock.
void SavedTensors::let_go(Page& page) {
  // Also of one that is on its way: a copy may still write to its storage.
  const bool without_content = page.residency() != Residency::Resident;
  if (page.residency() == Residency::Resident) {
    pages_.remove_candidate(page);
  } else if (page.residency() == Residency::Dropped) {
    levels_.dropped_now_bytes -= page.bytes;
  } else {
    tiers_.release(page);
  }
  tiers_.forget_copy(page);
  on_device_.forget(page.went.row);
  page.below.arrival.reset();
  events_.emit(EventKind::Released, &page, page.bytes, 0, now_.key_of(*page.current));
  pages_.unmanage(page);
  if (without_content) {
    pages_.erase(page);
    if (page.current->home == &page) {
      page.current->home = nullptr;
    }
  }
  thread_trash().take(std::move(page.strong));
  page.strong = c10::Storage();
}

bool SavedTensors::release(Ticket& ticket) {
  if (!ticket.counted) {
    return false;
  }
  if (ticket.state == Ticket::State::Pending) {
    auto& pending = thread_state().open.pending;
    for (auto& p : pending) {
      if (p == &ticket) {
        p = pending.back();
        pending.pop_back();
        break;
      }
    }
  }
  c10::intrusive_ptr<Page> page;
  bool last = false;
  {
    Guard guard(lock_);
    --levels_.live_tickets;
    page = std::move(ticket.page);
    if (page && --page->tickets == 0) {
      let_go(*page);
      last = pages_.managed().empty() && (!entered_ || now_.phase == Phase::Backward);
    }
    if (!tiers_.none()) {
      tiers_.reap();
    }
    // The last owner of a page may be this ticket; the chain of records behind it dies under the
    // lock.
    page.reset();
  }
  if (last) {
    pages_.forget_past();  // before the next step would, if one comes at all
  }
  return last && !entered_;
}

}  // namespace delta

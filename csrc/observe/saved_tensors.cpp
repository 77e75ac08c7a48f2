// Pack and unpack: what autograd saves becomes a ticket over a page, or is passed through.
//
// Note: what pack sees
//  1. Inputs are packed inside the op before the kernel ran, outputs after it but before the op's
//     end callback. A storage that the open op writes, or that nobody knows yet, stays pending and
//     is resolved at the op's end.
//  2. Identity is by storage. A Linear's weight arrives as a view, BatchNorm's statistics as plain
//     tensors.
//  3. Keeping the very tensor makes a cycle through its grad_fn; a shallow copy without history is
//     kept instead.
//  4. Without hooks autograd holds an input itself: one that is pointed to other memory before
//     backward (`x.data = y`) is used as it is then. So each ticket knows the tensor, too.
//  5. Hooks switch autograd's own check for in-place changes off, so each ticket makes it.
#include <ATen/Functions.h>
#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <sstream>

#include "rebuild/quiet.h"
#include "state/session.h"
#include "util/errors.h"

namespace delta {

namespace {

constexpr double kPlannedWeight = 1e-4;  // of what a plan moves, to that of all else: it goes first

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

Ticket::~Ticket() {
  if (session) {
    session->release(*this);
  }
}

void Session::count_kept(const at::Tensor& t, Page* page, KeptReason reason) {
  if (page != nullptr) {
    if (page->reason_step == step_) {
      return;
    }
    page->reason_step = step_;
  }
  counters_.kept_bytes[static_cast<int>(reason)] +=
      t.has_storage() ? static_cast<int64_t>(t.storage().nbytes()) : 0;
}

void Session::pack(const at::Tensor& t, Ticket& ticket) {
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
  Guard guard(*this);
  ++counters_.packs;
  ++live_tickets_;
  saves_ = mix(saves_, plain ? static_cast<uint64_t>(t.numel()) : 1);
  ticket.session = c10::intrusive_ptr<Session>::reclaim_copy(this);
  if (!plain || inference) {
    keep(KeptReason::Layout, nullptr);
    return;
  }
  if (t.device() != options_.device) {
    ticket.kept = at::Tensor(t.tensor_data());
    keep(KeptReason::Device, nullptr);
    return;
  }
  Page* page = find_page(storage_of(t));
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
    page = page_of(t);  // notices writes that nobody recorded
  }
  if (page == nullptr) {
    ticket.kept = at::Tensor(t.tensor_data());
    keep(KeptReason::Unknown, nullptr);
    return;
  }
  resolve(ticket, page, t);
}

// Gives a ticket its page, or leaves it with a copy of the tensor `t` that was saved. Under the
// lock.
void Session::resolve(Ticket& ticket, Page* page, const at::Tensor& t) {
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
    page->id = next_page_++;
    page->strong = t.storage();
    page->packed_at = tick_;
    page->retry_tick = 0;
    page->next_use_cursor = 0;
    page->below.refused_at = -1;
    page->below.clean_at_once = true;
    page->below.prefetched = false;
    page->frees = 0;
    page->exit = default_exit(*page);
    page->planned = false;
    page->below.prefetch_at = -1;
    managed_.emplace(page->id, page);
    counters_.packed_bytes += page->bytes;
    auto& producer = *page->current->producer;
    page->weight = default_weight(*page);
    if (attach_plan(*page)) {
      ++counters_.plan_hits;
    }
    emit(EventKind::Packed, page, page->bytes, producer.seconds, key_of(*page->current), 1);
    for (auto& ref : producer.inputs) {
      if (ref.value->home != nullptr && ref.value->home->tickets > 0 && ref.value->home != page) {
        emit(EventKind::Edge, page, 0, 0, ref.value->home->id);
      }
    }
    add_candidate(*page);
    if (logging_) {
      held_.push_back(page->id);
    }
    if (!tiers_.empty()) {
      to_write_.push_back(page->id);
    }
  }
  page->last_use = tick_;
  ticket.kept = at::Tensor();  // of one that was pending, whose tensor the caller still holds
}

// Most unpacked tensors are there. Returns an undefined tensor for what has to be brought back or
// waited for first, and where an error is to be told.
at::Tensor Session::unpack_resident(Ticket& ticket) {
  return has_verdict_.load(std::memory_order_relaxed) ? at::Tensor() : view_if_resident(ticket);
}

at::Tensor Session::view_if_resident(Ticket& ticket) {
  check_version(ticket);
  if (at::Tensor now = as_pointed_elsewhere(ticket); now.defined()) {
    Guard guard(*this);
    ++counters_.unpacks;
    return now;
  }
  if (ticket.state != Ticket::State::Managed) {
    Guard guard(*this);
    ++counters_.unpacks;
    return ticket.kept;
  }
  Page& page = *ticket.page;
  c10::Storage storage;
  {
    Guard guard(*this);
    if (page.residency() != Residency::Resident || page.doubts.audit_pending ||
        page.below.prefetched || page.below.arrival) {
      return {};
    }
    note_used(page);
    order_after_arrival(page, page.strong);
    storage = page.strong;
  }
  return view_for(ticket, storage);
}

// Whoever writes to it is counted with all others who hold the tensor that was saved.
at::Tensor Session::view_for(const Ticket& ticket, const c10::Storage& storage) const {
  at::Tensor t = ticket.view.over(storage, options_.device);
  if (ticket.version >= 0 && sabotage() != Sabotage::FreshVersionCounter) {
    t.unsafeGetTensorImpl()->set_version_counter(ticket.version_counter);
  }
  return t;
}

void Session::note_used(Page& page) {
  page.last_use = tick_;
  note_stream(page);
  frontier_ = page.packed_at;
  ++counters_.unpacks;
  ++counters_.managed_unpacks;
  emit(EventKind::Used, &page, page.bytes, 0, key_of(*page.current));
}

at::Tensor Session::unpack(Ticket& ticket) {
  if (has_verdict_.load(std::memory_order_relaxed)) {
    tell(take_verdict());  // of a program that updates weights by hand: no optimizer was told
  }
  if (at::Tensor there = view_if_resident(ticket); there.defined()) {
    return there;
  }
  Page& page = *ticket.page;
  // The storage that rebuild returns pins the page until the view over it exists.
  c10::Storage storage = rebuild(page);
  if (device_evidence_ && !entered_) {  // nobody judges it later
    tell(judge());
  }
  bool audit_now = false;
  {
    Guard guard(*this);
    audit_now = page.doubts.audit_pending;
    page.doubts.audit_pending = false;
    note_used(page);
  }
  if (audit_now) {
    audit(page);
  }
  return view_for(ticket, storage);
}

void Session::release(Ticket& ticket) {
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
    Guard guard(*this);
    --live_tickets_;
    page = std::move(ticket.page);
    if (page && --page->tickets == 0) {
      // Also of one that is on its way: a copy may still write to its storage.
      const bool without_content = page->residency() != Residency::Resident;
      switch (page->residency()) {
        case Residency::Resident:
          remove_candidate(*page);
          break;
        case Residency::Dropped:
          dropped_now_bytes_ -= page->bytes;
          break;
        case Residency::Swapped:
          swapped_now_bytes_ -= page->bytes;
          swapped_.erase({page->below.order, page->id});
          break;
        case Residency::SwappingIn:
          swapping_in_bytes_ -= page->bytes;
          page->below.incoming.reset();
          break;
        case Residency::Lost:
          break;
      }
      forget_copy(*page);
      if (page->went.row >= 0) {
        forget_hash(page->went.row);
      }
      page->below.arrival.reset();
      emit(EventKind::Released, page.get(), page->bytes, 0, key_of(*page->current));
      managed_.erase(page->id);
      last = managed_.empty() && (!entered_ || phase_ == Phase::Backward);
      if (without_content) {
        page_index_.clear();
        pages_.erase(page->strong.unsafeGetStorageImpl());
        if (page->current->home == page.get()) {
          page->current->home = nullptr;
        }
      }
      thread_trash().take(std::move(page->strong));
      page->strong = c10::Storage();
    }
    if (!tiers_.empty()) {
      reap();
    }
    // The last owner of a page may be this ticket; the chain of records behind it dies under the
    // lock.
    page.reset();
  }
  if (last) {
    forget_past();  // before the next step would, if one comes at all
    if (!entered_) {
      end_watch();
    }
  }
}

bool Session::attach_plan(Page& page) {
  const int64_t key = key_of(*page.current);
  if (plans_.empty() || key < 0) {
    return false;
  }
  const auto fits = [&](const Plan& plan) {
    return key < static_cast<int64_t>(plan.fingerprint.size()) &&
           plan.fingerprint[static_cast<size_t>(key)] == page.current->fingerprint;
  };
  if (plan_ == nullptr || !fits(*plan_)) {
    const bool first = plan_ == nullptr;
    plan_ = nullptr;
    for (auto& plan : plans_) {
      if (fits(*plan)) {
        plan_ = plan.get();
        break;
      }
    }
    if (plan_ != nullptr && !first) {
      // Two steps that begin alike: what was saved so far is in this plan too, and goes by it now.
      for (auto& [id, other] : managed_) {
        const auto row = static_cast<size_t>(other->current->key);
        if (other->packed_at >= step_begin_tick_ && row < plan_->fingerprint.size() &&
            plan_->fingerprint[row] == other->current->fingerprint) {
          follow(*plan_, *other);
        }
      }
    }
  }
  if (plan_ == nullptr) {
    ++counters_.plan_misses;
    return false;
  }
  follow(*plan_, page);
  return true;
}

void Session::follow(const Plan& plan, Page& page) {
  const auto row = static_cast<size_t>(page.current->key);
  const int64_t exit = plan.exit_of(row);
  page.planned = exit != kStays;
  if (page.planned) {
    page.exit = static_cast<Exit>(exit);
  }
  const bool goes = page.rebuilt ? plan.dropped_twice[row] != 0 : page.planned;
  page.weight = plan.weight[row] * (goes ? kPlannedWeight : 1);
  const int64_t at = plan.copy_back_of(row);
  page.below.prefetch_at = at == kNever ? -1 : at + step_begin_tick_;
}

// How a page leaves while no policy has said so: the way that takes less time.
Exit Session::default_exit(const Page& page) const {
  if (!options_.swap || !options_.drop) {
    return options_.swap ? Exit::Swap : Exit::Drop;
  }
  const double again_s = page.current->producer ? page.current->producer->seconds : 1;
  return again_s < seconds_in_for(page.bytes) ? Exit::Drop : Exit::Swap;
}

double Session::default_weight(const Page& page) const {
  const double bytes = static_cast<double>(std::max<int64_t>(1, page.bytes));
  switch (default_weight_) {
    case DefaultWeight::One:
      return 1;
    case DefaultWeight::PerByte:
      return 1 / bytes;
    default:
      return (page.current->producer ? page.current->producer->seconds : 1) / bytes;
  }
}

int64_t Session::next_use_of(Page& page, int64_t now) const {
  const int64_t key = key_of(*page.current);
  if (plan_ == nullptr || key < 0 || key >= static_cast<int64_t>(plan_->fingerprint.size()) ||
      plan_->fingerprint[static_cast<size_t>(key)] != page.current->fingerprint) {
    return -1;
  }
  const int64_t begin = plan_->use_offsets[static_cast<size_t>(key)];
  const int64_t end = plan_->use_offsets[static_cast<size_t>(key) + 1];
  const int64_t position = now - step_begin_tick_;
  while (begin + page.next_use_cursor < end &&
         plan_->uses[static_cast<size_t>(begin + page.next_use_cursor)] < position) {
    ++page.next_use_cursor;
  }
  if (begin + page.next_use_cursor >= end) {
    return -1;
  }
  return plan_->uses[static_cast<size_t>(begin + page.next_use_cursor)] + step_begin_tick_;
}

}  // namespace delta

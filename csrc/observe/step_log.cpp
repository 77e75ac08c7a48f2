// The rows of the step graph that is being logged: ops, what they read and make, and what nothing
// could be evicted from.
#include "observe/observer.h"
#include "observe/open_op.h"
#include "pool/cpu_pool.h"
#include "state/session.h"

namespace delta {

LoggedOp Session::new_row(const OpInfo& info) {
  LoggedOp row{};
  row.name_hash = info.name_hash;
  row.tick = tick_;
  row.live_bytes = live_bytes();
  row.away_bytes = dropped_now_bytes_ + swapped_now_bytes_;
  row.phase = static_cast<int64_t>(phase_);
  row.first_input = static_cast<int32_t>(log_inputs_.size());
  log_names_.emplace(info.name_hash, &info);
  return row;
}

void Session::log_inputs(LoggedOp& row, const OpRecord& record) {
  for (const auto& ref : record.inputs) {
    const int64_t key = ref.needs_content() ? key_of(*ref.value) : -1;
    if (key >= 0) {
      log_inputs_.push_back(key);
    }
  }
  row.n_inputs = static_cast<int32_t>(log_inputs_.size()) - row.first_input;
}

// A loop without backward has no steps: it saves nothing, or its graphs die unused.
bool Session::may_have_backward() const {
  const int64_t saved = counters_.packs - packs_before_step_;
  return counters_.unpacks > unpacks_before_step_ ||
         (saved > 0 && saved <= kSavedInVain * live_tickets_);
}

void Session::log_begin(OpenOp& open, c10::ArrayRef<const c10::IValue> inputs) {
  Guard guard(*this);
  if (log_ops_.size() >= kMostLoggedOpsWithoutSaves &&
      (log_ops_.size() >= kMostLoggedOps || !may_have_backward())) {
    logging_ = false;
    forget_log();
    return;
  }
  LoggedOp row = new_row(*open.info);
  if (open.record) {
    row.fingerprint = fingerprint_;
    log_inputs(row, *open.record);
  }
  c10::SmallVector<const Page*, 8> counted;
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      const Page* page = is_plain(t) ? find_page(storage_of(t)) : nullptr;
      if (page != nullptr && page->candidate >= 0 &&
          std::find(counted.begin(), counted.end(), page) == counted.end()) {
        counted.push_back(page);
        row.input_bytes += page->bytes;
      }
    });
  }
  open.managed_input_bytes = row.input_bytes;
  open.log_index = static_cast<int64_t>(log_ops_.size());
  log_ops_.push_back(row);
}

// ---------------------------------------------------------------- end

// What no eviction can lessen: what the op needs beside all that is managed and that it does not
// read. Copies that only some ways of evicting make are left out, so that no other way needs less.
void Session::note_stuck(const OpenOp& open, int64_t watermark_bytes) {
  int64_t stuck = open.live_bytes + watermark_bytes - open.managed_bytes + open.managed_input_bytes;
  if (options_.device.is_cpu() && cpu_pool::window_refused_bytes() > 0) {
    // All that could go is gone; what others hold is there for good.
    int64_t alone = 0;
    for (const Page* page : candidates_) {
      alone += is_alone(*page) ? page->bytes : 0;
    }
    stuck = std::max(stuck, cpu_pool::window_refused_bytes() + uncounted_bytes_ - alone);
  }
  stuck -= cloned_bytes_;
  if (stuck > counters_.stuck_bytes) {
    counters_.stuck_bytes = stuck;
    counters_.stuck_op = open.info->name.c_str();
  }
}

// Says of pages that were saved while somebody held their storage, when the last one let go.
void Session::note_alone() {
  size_t still_held = 0;
  for (const int64_t id : held_) {
    auto entry = managed_.find(id);
    if (entry == managed_.end()) {
      continue;
    }
    const Page& page = *entry->second;
    if (page.residency() != Residency::Resident || is_alone(page)) {
      emit(EventKind::Alone, &page, page.bytes, 0, page.current->key);
    } else {
      held_[still_held++] = id;
    }
  }
  held_.resize(still_held);
}

}  // namespace delta

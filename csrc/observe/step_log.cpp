#include "observe/step_log.h"

#include <algorithm>

#include "observe/open_op.h"
#include "observe/operands.h"
#include "pool/cpu_pool.h"

namespace delta {
namespace {

constexpr size_t kMostOps = 1 << 20;
constexpr size_t kMostOpsWithoutSaves = 1 << 14;
constexpr int64_t kSavedInVain = 16;  // times as much as is still there: no backward will need it

}  // namespace

void StepLog::begin_step() {
  held_.clear();
  forget();
}

void StepLog::forget() {
  ops_.clear();
  inputs_.clear();
  outputs_.clear();
}

// ---------------------------------------------------------------- rows

namespace {

// Bytes of what an op returned and wrote. One that returned parts of what it was given, and is not
// said to write, has done nothing: `read_bytes` are taken back.
int64_t written_bytes(const OpenOp& open, c10::ArrayRef<const c10::IValue> outputs,
                      int64_t read_bytes) {
  if (open.info->makes_unknown) {
    return 0;
  }
  int64_t bytes = 0;
  bool any = false;
  bool is_view = !open.info->any_write;
  for (const auto& x : outputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      if (!t.defined() || !t.has_storage()) {
        return;
      }
      any = true;
      const auto& given = open.logged_inputs;
      is_view &= std::find(given.begin(), given.end(), storage_of(t)) != given.end();
      bytes += touched_bytes(t);
    });
  }
  return any && is_view ? -read_bytes : bytes;
}

}  // namespace

LoggedOp StepLog::new_row(const OpInfo& info) {
  LoggedOp row{};
  row.name_hash = info.name_hash;
  row.tick = now_.tick;
  row.live_bytes = account_.live_bytes();
  row.away_bytes = levels_.dropped_now_bytes + levels_.swapped_now_bytes;
  row.phase = static_cast<int32_t>(now_.phase);
  row.dtype = -1;
  row.first_input = static_cast<int32_t>(inputs_.size());
  note_name(info);
  return row;
}

void StepLog::add_inputs(LoggedOp& row, const OpRecord& record) {
  for (const auto& ref : record.inputs) {
    const int64_t key = ref.needs_content() ? now_.key_of(*ref.value) : -1;
    if (key >= 0) {
      inputs_.push_back(key);
    }
  }
  row.n_inputs = static_cast<int32_t>(inputs_.size()) - row.first_input;
}

// A loop without backward has no steps: it saves nothing, or its graphs die unused.
bool StepLog::may_have_backward() const {
  const int64_t saved = counters_.packs - now_.packs_before;
  return counters_.unpacks > now_.unpacks_before ||
         (saved > 0 && saved <= kSavedInVain * levels_.live_tickets);
}

void StepLog::begin(OpenOp& open, c10::ArrayRef<const c10::IValue> inputs) {
  Guard guard(lock_);
  if (ops_.size() >= kMostOpsWithoutSaves && (ops_.size() >= kMostOps || !may_have_backward())) {
    logging_ = false;
    forget();
    return;
  }
  LoggedOp row = new_row(*open.info);
  if (open.record) {
    row.fingerprint = now_.fingerprint;
    add_inputs(row, *open.record);
  }
  c10::SmallVector<const Page*, 8> counted;
  open.logged_inputs.clear();
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      if (t.defined() && t.has_storage()) {
        open.logged_inputs.push_back(storage_of(t));
      }
      const Page* page = is_plain(t) ? pages_.find(storage_of(t)) : nullptr;
      if (page != nullptr && page->candidate >= 0 &&
          std::find(counted.begin(), counted.end(), page) == counted.end()) {
        counted.push_back(page);
        row.input_bytes += page->bytes;
      }
    });
  }
  open.managed_input_bytes = row.input_bytes;
  const OpWork work = work_of(*open.info, inputs);
  row.flops = work.flops;
  row.moved_bytes = work.moved_bytes;
  row.dtype = work.dtype;
  open.log_index = static_cast<int64_t>(ops_.size());
  ops_.push_back(row);
}

// The row of the open op; null where it has none, or where the log was forgotten under it.
LoggedOp* StepLog::row_of(const OpenOp& open) {
  const bool known = open.log_index >= 0 && open.log_index < static_cast<int64_t>(ops_.size());
  return known ? &ops_[static_cast<size_t>(open.log_index)] : nullptr;
}

void StepLog::end(OpenOp& open, c10::ArrayRef<const c10::IValue> outputs, double seconds,
                  int64_t watermark_bytes) {
  if (LoggedOp* row = row_of(open); row != nullptr) {
    row->moved_bytes += written_bytes(open, outputs, row->moved_bytes);
    row->seconds = seconds;
    row->watermark_bytes = watermark_bytes;
    row->first_output = static_cast<int32_t>(outputs_.size());
  }
}

void StepLog::note_made(const Value& value, bool repeats) {
  outputs_.push_back({value.key, value.bytes, repeats ? 1 : 0});
}

void StepLog::end_outputs(const OpenOp& open) {
  if (LoggedOp* row = row_of(open); row != nullptr) {
    row->n_outputs = static_cast<int32_t>(outputs_.size()) - row->first_output;
  }
}

void StepLog::note_clone(const OpenOp& open, const OpRecord& clone, const Value& made) {
  if (!logging_) {
    return;
  }
  LoggedOp row = new_row(*clone.info);
  row.fingerprint = made.fingerprint;
  row.live_bytes = open.live_bytes;
  row.seconds = static_cast<double>(clone.seconds);
  row.watermark_bytes = made.bytes;
  row.moved_bytes = 2 * made.bytes;
  add_inputs(row, clone);
  row.first_output = static_cast<int32_t>(outputs_.size());
  row.n_outputs = 1;
  note_made(made, /*repeats=*/true);
  ops_.push_back(row);
}

// ---------------------------------------------------------------- what cannot go

void StepLog::note_stuck(const OpenOp& open, int64_t watermark_bytes) {
  int64_t stuck = open.live_bytes + watermark_bytes - open.managed_bytes + open.managed_input_bytes;
  if (options_.device.is_cpu() && cpu_pool::window_refused_bytes() > 0) {
    // All that could go is gone; what others hold is there for good.
    int64_t alone = 0;
    for (const Page* page : pages_.candidates()) {
      alone += page->is_alone() ? page->bytes : 0;
    }
    stuck = std::max(stuck, cpu_pool::window_refused_bytes() + account_.uncounted_bytes() - alone);
  }
  stuck -= now_.cloned_bytes;
  if (stuck > counters_.stuck_bytes) {
    counters_.stuck_bytes = stuck;
    counters_.stuck_op = open.info->name.c_str();
  }
}

void StepLog::note_held(const Page& page) {
  if (logging_) {
    held_.push_back(page.id);
  }
}

void StepLog::note_alone() {
  size_t still_held = 0;
  for (const int64_t id : held_) {
    const Page* page = pages_.managed(id);
    if (page == nullptr) {
      continue;
    }
    if (page->residency() != Residency::Resident || page->is_alone()) {
      events_.emit(EventKind::Alone, page, page->bytes, 0, page->current->key);
    } else {
      held_[still_held++] = id;
    }
  }
  held_.resize(still_held);
}

}  // namespace delta

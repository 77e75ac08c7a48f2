// One op from its begin to its end: what it reads, writes, draws and makes.
#include "observe/open_op.h"

#include <ATen/Context.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>
#include <algorithm>
#include <cstring>
#include <exception>
#include "observe/observer.h"
#include "observe/taper.h"
#include "pool/cpu_pool.h"
#include "state/session.h"

namespace delta {
namespace {

constexpr int32_t kMostBackwards = 100;  // that keep their graph, in one step

uint64_t mix_geometry(uint64_t h, const at::Tensor& t) {
  if (!t.defined() || !t.has_storage()) {
    return mix(h, 7);
  }
  h = mix(h, static_cast<uint64_t>(t.scalar_type()) + 31 * static_cast<uint64_t>(t.dim()));
  for (auto n : t.sizes()) {
    h = mix(h, static_cast<uint64_t>(n));
  }
  return h;
}

bool is_training(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  if (info.training_argument < 0) {
    return true;
  }
  const auto& x = inputs[static_cast<size_t>(info.training_argument)];
  return !x.isBool() || x.toBool();
}

bool any_needs_grad(c10::ArrayRef<const c10::IValue> inputs) {
  bool found = false;
  for (const auto& x : inputs) {
    for_each_tensor(x,
                    [&](const at::Tensor& t, int) { found |= t.defined() && t.requires_grad(); });
  }
  return found;
}

}  // namespace

void OpenOp::clear() {
  for (auto* ticket : std::exchange(pending, {})) {
    if (ticket->state != Ticket::State::Pending) {
      continue;  // resolved, before something else raised
    }
    ticket->state = Ticket::State::Kept;
    at::Tensor saved = std::exchange(ticket->kept, at::Tensor(ticket->kept.tensor_data()));
    thread_trash().take(c10::IValue(std::move(saved)));
  }
  for (auto& w : written) {
    w.page->doubts.being_written = false;
  }
  written.clear();
  record.reset();
  inputs.clear();
  if (!input_set_.empty()) {
    input_set_.clear();
  }
  active = false;
  region = false;
  info = nullptr;
  log_index = -1;
  managed_input_bytes = 0;
}

bool OpenOp::reads(const Page& page) {
  constexpr size_t few = 16;
  if (inputs.size() <= few) {
    return std::any_of(inputs.begin(), inputs.end(),
                       [&](const auto& input) { return input.get() == &page; });
  }
  if (input_set_.empty()) {
    for (const auto& input : inputs) {
      input_set_.insert(input.get());
    }
  }
  return input_set_.count(&page) > 0;
}

// ---------------------------------------------------------------- begin

void Session::begin_op(ThreadState& ts, OpInfo* info, c10::ArrayRef<const c10::IValue> inputs) {
  auto& open = ts.open;
  if (open.active || open.region) {  // of an op that never ended
    Guard guard(*this);
    open.clear();
  }
  open.info = info;
  open.active = true;
  if (info->n_returns == 0) {  // of others it shows in what they returned whether they threw
    open.exceptions = std::uncaught_exceptions();
  }
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  const bool grads = at::GradMode::is_enabled();
  if (!taping_ && !in_backward && grads && any_needs_grad(inputs)) {
    taping_ = true;  // a forward: the optimizer that was stepping raised
  }
  const bool taping = taping_ && (!in_backward || grads);
  if (in_backward) {
    graph_gone_ |= !torch::autograd::get_current_graph_task_keep_graph();
  } else if (phase_ == Phase::Backward && boundary_ && taping_) {
    phase_ = Phase::Forward;
    // A graph that is kept is for another backward of the same step: of a gradient, of another
    // loss.
    if (graph_gone_ || ++backwards_ >= kMostBackwards) {
      boundary_(0);
    }
  }
  if (events_.size() >= kMostEvents && drain_) {
    drain_(0);
  }
  phase_ = in_backward ? Phase::Backward : Phase::Forward;
  ++tick_;
  ++counters_.ops;

  uint64_t signature = mix(info->name_hash, in_backward ? 2 : 1);
  uint64_t wanted_grads = grads ? 1 : 0;
  int64_t input_bytes = 0;
  bool floats = false;
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int index) {
      signature = mix_geometry(signature, t);
      if (grads) {
        wanted_grads = 2 * wanted_grads + (t.defined() && t.requires_grad() ? 1 : 0);
      }
      if (t.defined() && t.has_storage()) {
        input_bytes += t.numel() * static_cast<int64_t>(t.itemsize());
        // Ops on lists (foreach) may treat each element by itself.
        floats |= index < 0 && t.dim() > 0 && (t.is_floating_point() || t.is_complex());
      }
    });
  }
  c10::intrusive_ptr<OpRecord> record;
  if (taping) {
    open.strangers = stranger_draws().mark();
    record = new_record(info, inputs, options_.device, grads, floats);
    record->tick = tick_;
  }

  ToClone to_clone;
  {
    Guard guard(*this);
    const auto [entry, unknown] = facts_of_.emplace(signature, op_facts_.size());
    if (unknown) {
      op_facts_.emplace_back();
    }
    open.facts = entry->second;
    const OpFacts facts = op_facts_[open.facts];
    open.timed = logging_ || (tracing_ && options_.device.is_cpu()) || facts.seconds < 0;
    open.traced = tracing_;
    if (!held_.empty()) {
      note_alone();
    }
    if (!charged_lately_.empty()) {
      uncharge_gone();
    }
    const int64_t need = facts.watermark_bytes >= 0 ? facts.watermark_bytes : input_bytes;
    const bool tight = options_.budget_bytes > 0 && live_bytes() + need > limit_bytes();
    if (tight || !tiers_.empty() || options_.stress != Stress::None) {
      guard.unlock();
      if (!tiers_.empty()) {
        tend_lanes(need);
      }
      if (tight) {
        look_ahead(need);
      }
      if (options_.stress != Stress::None) {
        stress_boundary();
      }
      guard.lock();
    }
    if (record) {
      // The same ops are another step where other tensors are saved: a model that only generates, a
      // frozen part, a part inside of a checkpoint.
      fingerprint_ = mix(mix(fingerprint_, saves_), mix(signature, wanted_grads));
      saves_ = 0;
      sequence_ = mix(sequence_, info->name_hash);
      if (!info->certain) {  // an audit at p=0 says nothing of p=0.1
        fingerprint_ = mix_numbers(fingerprint_, inputs);
      }
      take_arguments(*this, open, *record, is_training(*info, inputs), inputs, to_clone);
    } else if (info->any_write && !info->moves_storage) {
      // Backward and optimizers write what we do not manage. A page that we do manage is kept from
      // here on: its content is not known any more.
      note_writes(*info, inputs, to_clone);
    }
    take_newly_shared(to_clone);
  }
  open.record = std::move(record);
  if (!to_clone.empty()) {
    clone_sources(to_clone);
  }
  if (logging_) {
    log_begin(open, inputs);
  }
  if (options_.device.is_cpu()) {
    open.live_bytes = live_bytes();
    cpu_pool::open_window();
  } else {
    const DeviceBytes now = device_bytes(options_.device);
    open.live_bytes = now.live;
    open.peak_bytes = now.peak;
    boundary_peak_bytes_ = std::max(boundary_peak_bytes_, now.live);
  }
  open.managed_bytes = managed_resident_bytes_ + swapping_in_bytes_;
  if (tick_ == step_begin_tick_ + 1) {
    counters_.begin_bytes = open.live_bytes;
  }
  if (open.timed) {
    await_device();
  }
  if (open.timed || open.traced) {
    open.begin = std::chrono::steady_clock::now();
  }
}

// An op that the recorder does not follow is about to write.
void Session::note_foreign_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  ToClone to_clone;
  {
    Guard guard(*this);
    sweep_if_due();
    note_writes(info, inputs, to_clone);
    take_newly_shared(to_clone);
  }
  if (!to_clone.empty()) {
    clone_sources(to_clone);
  }
}

// An op that is not taped is about to write. Under the lock.
void Session::note_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                          ToClone& to_clone) {
  const auto note = [&](const at::Tensor& t, int) {
    if (Page* page = page_to_write(t)) {
      before_write(*page, t, to_clone);
    }
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (info.write_of(i) == Write::No || info.write_of(i) == Write::Scratch ||
        (info.collective && sabotage() == Sabotage::CollectivesUnseen)) {
      continue;
    }
    for_each_tensor(inputs[i], note);
    if (info.collective && inputs[i].isList()) {
      for (const auto& each : inputs[i].toListRef()) {
        if (each.isList()) {
          for_each_tensor(each, note);
        }
      }
    }
  }
}

void Session::end_op(ThreadState& ts, c10::ArrayRef<const c10::IValue> outputs) {
  auto& open = ts.open;
  const OpInfo& info = *open.info;
  double seconds = -1;
  if (open.timed) {
    await_device();
  }
  if (open.timed || open.traced) {
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - open.begin).count();
  }
  int64_t watermark = 0;
  if (options_.device.is_cpu()) {
    watermark = cpu_pool::window_peak_bytes() + uncounted_bytes_ - open.live_bytes;
  } else {
    // What it left behind; what it needed meanwhile shows where it set a record.
    const DeviceBytes now = device_bytes(options_.device);
    const int64_t most = now.peak > open.peak_bytes ? now.peak : now.live;
    watermark = std::max<int64_t>(0, most - open.live_bytes);
    boundary_peak_bytes_ = std::max(boundary_peak_bytes_, most);
  }
  const bool threw =
      info.n_returns > 0 ? outputs.empty() : std::uncaught_exceptions() > open.exceptions;
  const int32_t threads = open.record ? omp_threads() : 0;
  if (open.record && !open.record->draws.empty()) {
    note_draws(open);
  }

  Guard guard(*this);
  if (open.facts < op_facts_.size()) {  // else the table was cleared under the op
    auto& facts = op_facts_[open.facts];
    if (!threw) {
      facts.watermark_bytes = std::max(facts.watermark_bytes, watermark);
      if (open.timed && (facts.seconds < 0 || seconds < facts.seconds)) {
        facts.seconds = seconds;
      }
    }
  }
  if (open.traced && trace_.size() < kMostTraceRows) {
    const double begin_s = seconds_of(open.begin);
    trace_.push_back({static_cast<int64_t>(TraceKind::Op), static_cast<int64_t>(info.name_hash),
                      live_bytes(), dropped_now_bytes_, swapped_now_bytes_, begin_s,
                      begin_s + seconds});
    log_names_.emplace(info.name_hash, &info);
  }
  if (!open.timed && open.facts < op_facts_.size()) {
    seconds = op_facts_[open.facts].seconds;
  }
  LoggedOp* row = nullptr;
  if (open.log_index >= 0 && open.log_index < static_cast<int64_t>(log_ops_.size())) {
    row = &log_ops_[static_cast<size_t>(open.log_index)];
    row->seconds = seconds;
    row->watermark_bytes = watermark;
    row->first_output = static_cast<int32_t>(log_outputs_.size());
  }
  note_stuck(open, watermark);
  if (open.record) {
    OpRecord& record = *open.record;
    record.seconds = static_cast<float>(seconds);
    record.watermark_bytes = watermark;
    record.numbers.threads = threads;
    const bool unknown =
        (info.makes_unknown && sabotage() != Sabotage::EmptyAsOp) || info.never_replay || threw;
    if (!open.written.empty()) {
      take_written(open, unknown);
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      for_each_tensor(outputs[i], [&](const at::Tensor& t, int index) {
        take_returned(open, unknown, static_cast<int>(i), index, t);
      });
    }
    if (row != nullptr) {
      row->n_outputs = static_cast<int32_t>(log_outputs_.size()) - row->first_output;
    }
    if (info.moves_storage) {
      for (auto& page : open.inputs) {
        page->versions.clear();
        page->current->versions.clear();
      }
    }
    if (!open.pending.empty()) {
      resolve_pending(open);
    }
    sweep_if_due();
  }
  ToClone to_clone;
  take_newly_shared(to_clone);
  open.clear();  // under the lock: records may die here
  guard.unlock();
  if (!to_clone.empty()) {
    clone_sources(to_clone);
  }
}

// What the op drew, and whether another thread may have drawn from the same generator meanwhile.
void Session::note_draws(OpenOp& open) {
  OpRecord& record = *open.record;
  note_drawn(*record.info, record.draws);
  const auto& strangers = stranger_draws();
  const bool disturbed =
      strangers.since(open.strangers) ||
      (!record.info->takes_generator() && strangers.from_default() != stranger_draws_before_);
  if (!record.draws.empty() && disturbed && sabotage() != Sabotage::SharedGenerator) {
    record.repeats = false;
  }
}

// The value that the open op made at this place; without a recipe where the op cannot repeat it.
c10::intrusive_ptr<Value> Session::new_value(OpenOp& open, bool unknown, int64_t bytes,
                                             bool is_argument, int position, int index) {
  auto value = c10::make_intrusive<Value>();
  value->bytes = bytes;
  if (unknown) {
    return value;
  }
  auto& outputs = open.record->outputs;
  value->key = next_key_++;
  value->step = step_;
  value->fingerprint = fingerprint_;
  value->sequence = sequence_;
  value->depth = open.depth;
  value->producer = open.record;
  value->output = static_cast<int32_t>(outputs.size());
  outputs.push_back({value.get(), bytes, static_cast<int16_t>(position), index, is_argument});
  if (open.log_index >= 0) {
    const bool repeats = open.record->repeats && open.record->info->unrepeatable_return != position;
    log_outputs_.push_back({value->key, bytes, repeats ? 1 : 0});
  }
  return value;
}

// Written arguments: one new value per storage.
void Session::take_written(OpenOp& open, bool unknown) {
  ska::flat_hash_set<const Page*> seen;
  const bool single = open.written.size() == 1;
  for (auto& w : open.written) {
    if (!single && !seen.insert(w.page).second) {
      continue;
    }
    Page& page = *w.page;
    auto storage = lock(page.weak);
    if (!storage) {
      continue;
    }
    look_again(page, *storage);
    if (open.info->write_of(static_cast<size_t>(w.argument)) == Write::Scratch) {
      // Statistics written on the side are never made again: a source from here on.
      auto value = c10::make_intrusive<Value>();
      value->bytes = page.bytes;
      value->input = true;
      page.set_current(std::move(value));
    } else {
      const bool too_deep = open.depth > kMostDepth && !w.requires_grad;
      open.depth = w.requires_grad ? 0 : open.depth;
      const bool unseen = page.outside.unguarded && !can_watch(page);  // by the next op that reads
      page.set_current(
          new_value(open, unknown || too_deep || unseen, page.bytes, true, w.argument, w.index));
    }
    if (w.has_counter) {
      page.take_version(w.counter);
    }
    if (page.outside.unguarded && can_watch(page)) {
      watch(*page.current, page.data, page.bytes);
    }
    if (page.tickets > 0) {
      attach_plan(page);
    }
  }
}

// Returned tensors: fresh storages are new values; aliases of arguments are views.
void Session::take_returned(OpenOp& open, bool unknown, int position, int index,
                            const at::Tensor& t) {
  if (!is_plain(t) || t.device() != options_.device) {
    return;
  }
  auto* storage = storage_of(t);
  auto [entry, fresh] = pages_.emplace(storage, nullptr);
  if (!fresh) {  // an alias of an argument, or a second output over the same fresh storage
    Page& page = *entry->second;
    if (version_of(t) >= 0 && open.reads(page)) {  // without annotation it counts its own writes
      page.take_version(t.unsafeGetTensorImpl()->version_counter());
    }
    return;
  }
  entry->second = c10::make_intrusive<Page>(t.storage().getWeakStorageImpl());
  Page& page = *entry->second;
  note_stream(page);
  look(page, *storage);
  if (open.info->dtype_argument >= 0) {
    open.record->result_dtype = t.scalar_type();
  }
  if (t.requires_grad()) {
    open.depth = 0;  // autograd's own graph holds more than the records of it
  }
  page.set_current(
      new_value(open, unknown || open.depth > kMostDepth, page.bytes, false, position, index));
  if (open.info->factory && sabotage() != Sabotage::FactoryContentTrusted) {
    watch(*page.current, page.data, page.bytes);
  }
  if (is_foreign(t.storage().data_ptr())) {
    find_owners(page, t.storage().data_ptr());
  }
  if (version_of(t) >= 0) {
    page.take_version(t.unsafeGetTensorImpl()->version_counter());
  }
}

// What was packed while the op was open and could not be placed then.
void Session::resolve_pending(OpenOp& open) {
  for (size_t i = 0; i < open.pending.size(); ++i) {
    Ticket& ticket = *open.pending[i];
    at::Tensor saved = ticket.kept;
    Page* page = find_page(storage_of(saved));
    if (page == nullptr && saves_clone(open, saved)) {
      page = take_saved_clone(open, saved);
    }
    resolve(ticket, page, saved);
    thread_trash().take(c10::IValue(std::move(saved)));
  }
  open.pending.clear();
}

// Whether autograd saved `self.clone()` that it took before the in-place op.
bool Session::saves_clone(const OpenOp& open, const at::Tensor& saved) const {
  const auto& inputs = open.record->inputs;
  return open.info->may_save_clone && !inputs.empty() && inputs[0].write != Write::No &&
         inputs[0].argument == 0 && inputs[0].view.dtype == saved.dtype() &&
         inputs[0].view.geometry.sizes_arrayref() == saved.sizes();
}

// Records the clone as the op that it was.
Page* Session::take_saved_clone(OpenOp& open, const at::Tensor& saved) {
  const OpRecord& record = *open.record;
  const auto& storage = saved.storage();
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  auto clone = c10::make_intrusive<OpRecord>();
  clone->info = clone_op_info();
  clone->arguments.emplace_back();
  clone->arguments.emplace_back();
  clone->inputs.push_back(record.inputs[0]);
  clone->inputs[0].write = Write::No;
  clone->numbers = record.numbers;
  clone->thread = record.thread;
  clone->uncertain_behind = record.uncertain_behind;
  clone->device = record.device;
  clone->seconds = record.seconds;
  clone->watermark_bytes = bytes;
  clone->tick = record.tick;
  auto value = c10::make_intrusive<Value>();
  value->bytes = bytes;
  value->key = next_key_++;
  value->step = step_;
  value->fingerprint = mix(fingerprint_, 77);
  value->sequence = mix(sequence_, 77);
  value->depth = open.depth;
  value->producer = clone;
  value->output = 0;
  clone->outputs.push_back({value.get(), bytes, 0, -1, false});
  if (logging_) {
    LoggedOp row = new_row(*clone->info);
    row.fingerprint = value->fingerprint;
    row.live_bytes = open.live_bytes;
    row.seconds = record.seconds;
    row.watermark_bytes = bytes;
    log_inputs(row, *clone);
    row.first_output = static_cast<int32_t>(log_outputs_.size());
    row.n_outputs = 1;
    log_outputs_.push_back({value->key, bytes, 1});
    log_ops_.push_back(row);
  }
  auto page = c10::make_intrusive<Page>(storage.getWeakStorageImpl());
  note_stream(*page);
  look(*page, *storage.unsafeGetStorageImpl());
  page->set_current(std::move(value));
  return pages_.emplace(storage_of(saved), std::move(page)).first->second.get();
}

}  // namespace delta

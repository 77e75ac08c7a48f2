#include "observe/op_observer.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>

#include "observe/op_rescue.h"
#include "observe/operands.h"
#include "observe/taper.h"
#include "pool/cpu_pool.h"
#include "util/gil.h"

namespace delta {
namespace {

constexpr int32_t kMostBackwards = 100;  // that keep their graph, in one step
constexpr size_t kMostFacts = 1 << 18;
// Ops behind a value, without gradients, since something that autograd saved. A longer recipe is
// not kept: a rollout or an evaluation would else hold the records of all it has done.
constexpr int32_t kMostDepth = 512;

bool is_training(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  if (info.training_argument < 0) {
    return true;
  }
  const auto& x = inputs[static_cast<size_t>(info.training_argument)];
  return !x.isBool() || x.toBool();
}

}  // namespace

OpObserver::OpObserver(SessionState& state, Sources& sources, OutsideMemory& outside,
                       TensorPages& tensors, PlanTable& plans, SwapTiers& tiers, Eviction& eviction,
                       SwapIn& swap_in, StressEviction& stress, PlanActions& plan_actions,
                       SavedTensors& saved, StepLog& log)
    : Part(state),
      sources_(sources),
      outside_(outside),
      tensors_(tensors),
      plans_(plans),
      tiers_(tiers),
      eviction_(eviction),
      swap_in_(swap_in),
      stress_(stress),
      plan_actions_(plan_actions),
      saved_(saved),
      log_(log),
      stranger_draws_before_(stranger_draws().from_default()) {}

void OpObserver::begin_step() {
  if (facts_.size() > kMostFacts ||
      growth_of_.size() > kMostFacts) {  // shapes, or ops, never repeat
    facts_.clear();
    facts_of_.clear();
    growth_of_.clear();
  }
}

// ---------------------------------------------------------------- begin

void OpObserver::begin(ThreadState& ts, OpInfo* info, c10::ArrayRef<const c10::IValue> inputs) {
  auto& open = ts.open;
  if (open.active || open.region) {  // of an op that never ended
    Guard guard(lock_);
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
  note_phase(in_backward);
  if (plans_.as_written()) {
    plan_actions_.after_op();
  }
  ++now_.tick;
  ++counters_.ops;

  const Signature signature = signature_of(*info, inputs, in_backward, grads);
  now_.place = mix(now_.place, signature.op);
  c10::intrusive_ptr<OpRecord> record;
  if (taping) {
    open.strangers = stranger_draws().mark();
    record = new_record(info, inputs, options_.device, grads, signature.floats);
    record->tick = now_.tick;
  }

  ToClone to_clone;
  {
    Guard guard(lock_);
    const Facts facts = facts_for(open, signature);
    open.timed =
        log_.logging() || (events_.tracing() && options_.device.is_cpu()) || facts.seconds < 0;
    open.traced = events_.tracing();
    log_.note_alone();
    account_.uncharge_gone();
    at_boundary(expected_bytes(facts, signature), guard);
    if (record) {
      // The same ops are another step where other tensors are saved: a model that only generates, a
      // frozen part, a part inside of a checkpoint.
      now_.fingerprint =
          mix(mix(now_.fingerprint, now_.saves), mix(signature.hash, signature.wanted_grads));
      now_.saves = 0;
      now_.sequence = mix(now_.sequence, info->name_hash);
      if (!info->certain) {  // an audit at p=0 says nothing of p=0.1
        now_.fingerprint = mix_numbers(now_.fingerprint, inputs);
      }
      Taper(options_.device, sources_, outside_, tensors_, open, *record,
            is_training(*info, inputs), to_clone)
          .tape(inputs);
    } else if (info->any_write && !info->moves_storage) {
      // Backward and optimizers write what we do not manage. A page that we do manage is kept from
      // here on: its content is not known any more.
      note_writes(*info, inputs, to_clone);
    }
    outside_.take_newly_shared(to_clone);
  }
  open.record = std::move(record);
  if (!to_clone.empty()) {
    sources_.clone(to_clone);
  }
  if (log_.logging()) {
    log_.begin(open, inputs);
  }
  open_window(open);
}

// Tells of the boundary where backward is over and something else begins.
void OpObserver::note_phase(bool in_backward) {
  if (in_backward) {
    now_.graph_gone |= !torch::autograd::get_current_graph_task_keep_graph();
  } else if (now_.phase == Phase::Backward && step_over_ && taping_) {
    now_.phase = Phase::Forward;
    // A graph that is kept is for another backward of the same step: of a gradient, of another
    // loss.
    if (now_.graph_gone || ++now_.backwards >= kMostBackwards) {
      step_over_(0);
    }
  }
  if (events_.is_full() && drain_) {
    drain_(0);
  }
  now_.phase = in_backward ? Phase::Backward : Phase::Forward;
}

OpObserver::Signature OpObserver::signature_of(const OpInfo& info,
                                               c10::ArrayRef<const c10::IValue> inputs,
                                               bool in_backward, bool grads) const {
  Signature signature;
  signature.op = signature.hash = mix(info.name_hash, in_backward ? 2 : 1);
  signature.wanted_grads = grads ? 1 : 0;
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int index) {
      signature.hash = mix_geometry(signature.hash, t);
      if (grads) {
        signature.wanted_grads =
            2 * signature.wanted_grads + (t.defined() && t.requires_grad() ? 1 : 0);
      }
      if (t.defined() && t.has_storage()) {
        signature.input_bytes += t.numel() * static_cast<int64_t>(t.itemsize());
        // Ops on lists (foreach) may treat each element by itself.
        signature.floats |= index < 0 && t.dim() > 0 && (t.is_floating_point() || t.is_complex());
      }
    });
  }
  return signature;
}

// Under the lock.
OpObserver::Facts OpObserver::facts_for(OpenOp& open, const Signature& signature) {
  const auto [entry, unknown] = facts_of_.emplace(signature.hash, facts_.size());
  if (unknown) {
    facts_.emplace_back();
  }
  open.facts = entry->second;
  open.op = signature.op;
  open.place = now_.place;
  open.input_bytes = signature.input_bytes;
  return facts_[open.facts];
}

// What the op will hold above what is live now: what it held before; on other shapes, as much for
// each byte of its inputs; nothing known: as much as its inputs.
int64_t OpObserver::expected_bytes(const Facts& facts, const Signature& signature) const {
  if (facts.watermark_bytes >= 0) {
    return facts.watermark_bytes;
  }
  auto growth = growth_of_.find(now_.place);
  if (growth == growth_of_.end()) {
    growth = growth_of_.find(signature.op);
  }
  const double share = growth == growth_of_.end() ? 1.0 : growth->second;
  return static_cast<int64_t>(share * static_cast<double>(signature.input_bytes));
}

// Carries out what a plan says, makes room for the op, and keeps the lanes busy. Lets go of the
// lock meanwhile.
void OpObserver::at_boundary(int64_t need_bytes, Guard& guard) {
  const bool tight =
      options_.budget_bytes > 0 && account_.live_bytes() + need_bytes > account_.limit_bytes();
  const bool stressed = options_.stress != Stress::None;
  const bool as_written = plans_.as_written();
  if (!tight && tiers_.none() && !stressed && !as_written) {
    return;
  }
  guard.unlock();
  if (as_written) {
    plan_actions_.before_op();
  }
  if (!tiers_.none()) {
    swap_in_.tend_lanes(need_bytes);
  }
  if (tight) {
    eviction_.look_ahead(need_bytes);
    if (!options_.device.is_cpu()) {
      now_.was_tight = true;
      rescue_ops(true);
    }
  }
  if (stressed) {
    stress_.at_boundary();
  }
  guard.lock();
}

// From here on what the op takes is measured.
void OpObserver::open_window(OpenOp& open) {
  if (options_.device.is_cpu()) {
    open.live_bytes = account_.live_bytes();
    cpu_pool::open_window();
  } else {
    const DeviceBytes now = device_bytes(options_.device);
    open.live_bytes = now.live;
    open.peak_bytes = now.peak;
    account_.note_device_bytes(now.live);
  }
  open.managed_bytes = pages_.managed_resident_bytes() + levels_.swapping_in_bytes;
  if (now_.tick == now_.begin_tick + 1) {
    counters_.begin_bytes = open.live_bytes;
  }
  if (open.timed) {
    await_device(options_.device);
  }
  if (open.timed || open.traced) {
    open.begin = std::chrono::steady_clock::now();
  }
}

void OpObserver::note_foreign_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  ToClone to_clone;
  {
    Guard guard(lock_);
    pages_.sweep_if_due();
    note_writes(info, inputs, to_clone);
    outside_.take_newly_shared(to_clone);
  }
  if (!to_clone.empty()) {
    sources_.clone(to_clone);
  }
}

// An op that is not taped is about to write. Under the lock.
void OpObserver::note_writes(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs,
                             ToClone& to_clone) {
  const auto note = [&](const at::Tensor& t, int) {
    if (Page* page = tensors_.page_to_write(t)) {
      tensors_.before_write(*page, t, to_clone);
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

// ---------------------------------------------------------------- end

void OpObserver::end(ThreadState& ts, c10::ArrayRef<const c10::IValue> outputs) {
  auto& open = ts.open;
  const OpInfo& info = *open.info;
  double seconds = -1;
  if (open.timed) {
    await_device(options_.device);
  }
  if (open.timed || open.traced) {
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - open.begin).count();
  }
  const int64_t watermark_bytes = watermark_of(open);
  const bool threw =
      info.n_returns > 0 ? outputs.empty() : std::uncaught_exceptions() > open.exceptions;
  const int32_t threads = open.record ? omp_threads() : 0;
  if (open.record && !open.record->draws.empty()) {
    note_draws(open);
  }

  Guard guard(lock_);
  if (open.traced) {
    trace(open, seconds);
  }
  profile_.note(now_.tick - now_.begin_tick - 1, open.live_bytes + watermark_bytes);
  seconds = note_facts(open, watermark_bytes, seconds, threw);
  log_.end(open, outputs, seconds, watermark_bytes);
  log_.note_stuck(open, watermark_bytes);
  if (open.record) {
    open.record->seconds = static_cast<float>(seconds);
    open.record->watermark_bytes = watermark_bytes;
    open.record->numbers.threads = threads;
    take_results(open, outputs, threw);
    pages_.sweep_if_due();
  }
  ToClone to_clone;
  outside_.take_newly_shared(to_clone);
  open.clear();  // under the lock: records may die here
  guard.unlock();
  if (!to_clone.empty()) {
    sources_.clone(to_clone);
  }
}

int64_t OpObserver::watermark_of(const OpenOp& open) {
  if (options_.device.is_cpu()) {
    return cpu_pool::window_peak_bytes() + account_.uncounted_bytes() - open.live_bytes;
  }
  // What it left behind; what it needed meanwhile shows where it set a record.
  const DeviceBytes now = device_bytes(options_.device);
  const int64_t most = now.peak > open.peak_bytes ? now.peak : now.live;
  account_.note_device_bytes(most);
  return std::max<int64_t>(0, most - open.live_bytes);
}

// Returns the seconds of the op: what was measured, or the least that ever was.
double OpObserver::note_facts(const OpenOp& open, int64_t watermark_bytes, double seconds,
                              bool threw) {
  if (open.facts >= facts_.size()) {
    return seconds;  // the table was cleared under the op
  }
  Facts& facts = facts_[open.facts];
  if (!threw) {
    if (facts.watermark_bytes < 0 && open.input_bytes > 0) {
      const double growth =
          static_cast<double>(watermark_bytes) / static_cast<double>(open.input_bytes);
      growth_of_[open.op] = growth;
      double& at_place = growth_of_[open.place];
      at_place = std::max(at_place, growth);
    }
    facts.watermark_bytes = std::max(facts.watermark_bytes, watermark_bytes);
    if (open.timed && (facts.seconds < 0 || seconds < facts.seconds)) {
      facts.seconds = seconds;
    }
  }
  return open.timed ? seconds : facts.seconds;
}

void OpObserver::trace(const OpenOp& open, double seconds) {
  const double begin_s = seconds_of(open.begin);
  events_.trace({static_cast<int64_t>(TraceKind::Op), static_cast<int64_t>(open.info->name_hash),
                 account_.live_bytes(), levels_.dropped_now_bytes, levels_.swapped_now_bytes,
                 begin_s, begin_s + seconds});
  log_.note_name(*open.info);
}

void OpObserver::take_results(OpenOp& open, c10::ArrayRef<const c10::IValue> outputs, bool threw) {
  const OpInfo& info = *open.info;
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
  log_.end_outputs(open);
  if (info.moves_storage) {
    for (auto& page : open.inputs) {
      page->versions.clear();
      page->current->versions.clear();
    }
  }
  if (!open.pending.empty()) {
    resolve_pending(open);
  }
}

// What the op drew, and whether another thread may have drawn from the same generator meanwhile.
void OpObserver::note_draws(OpenOp& open) {
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
c10::intrusive_ptr<Value> OpObserver::new_value(OpenOp& open, bool unknown, int64_t bytes,
                                                bool is_argument, int position, int index) {
  auto value = c10::make_intrusive<Value>();
  value->bytes = bytes;
  if (unknown) {
    return value;
  }
  auto& outputs = open.record->outputs;
  value->key = now_.next_key++;
  value->step = now_.step;
  value->fingerprint = now_.fingerprint;
  value->sequence = now_.sequence;
  value->depth = open.depth;
  value->producer = open.record;
  value->output = static_cast<int32_t>(outputs.size());
  outputs.push_back({value.get(), bytes, static_cast<int16_t>(position), index, is_argument});
  if (open.log_index >= 0) {
    const bool repeats = open.record->repeats && open.record->info->unrepeatable_return != position;
    log_.note_made(*value, repeats);
  }
  return value;
}

// Written arguments: one new value per storage.
void OpObserver::take_written(OpenOp& open, bool unknown) {
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
    pages_.look_again(page, *storage);
    if (open.info->write_of(static_cast<size_t>(w.argument)) == Write::Scratch) {
      // Statistics written on the side are never made again: a source from here on.
      auto value = c10::make_intrusive<Value>();
      value->bytes = page.bytes;
      value->input = true;
      page.set_current(std::move(value));
    } else {
      const bool too_deep = open.depth > kMostDepth && !w.requires_grad;
      open.depth = w.requires_grad ? 0 : open.depth;
      const bool unseen =
          page.outside.unguarded && !outside_.can_watch(page);  // by the next op that reads
      page.set_current(
          new_value(open, unknown || too_deep || unseen, page.bytes, true, w.argument, w.index));
    }
    if (w.has_counter) {
      page.take_version(w.counter);
    }
    if (page.outside.unguarded && outside_.can_watch(page)) {
      outside_.watch(*page.current, page.data, page.bytes);
    }
    if (page.tickets > 0) {
      plans_.attach(page);
    }
  }
}

// Returned tensors: fresh storages are new values; aliases of arguments are views.
void OpObserver::take_returned(OpenOp& open, bool unknown, int position, int index,
                               const at::Tensor& t) {
  if (!is_plain(t) || t.device() != options_.device) {
    return;
  }
  auto* storage = storage_of(t);
  const AddedPage added = pages_.find_or_add(t.storage());
  Page& page = *added;
  if (!added.is_new()) {  // an alias of an argument, or a second output over the same fresh storage
    if (version_of(t) >= 0 && open.reads(page)) {  // without annotation it counts its own writes
      page.take_version(t.unsafeGetTensorImpl()->version_counter());
    }
    return;
  }
  page.note_stream(options_.device);
  pages_.look(page, *storage);
  if (open.info->dtype_argument >= 0) {
    open.record->result_dtype = t.scalar_type();
  }
  if (t.requires_grad()) {
    open.depth = 0;  // autograd's own graph holds more than the records of it
  }
  page.set_current(
      new_value(open, unknown || open.depth > kMostDepth, page.bytes, false, position, index));
  if (open.info->factory && sabotage() != Sabotage::FactoryContentTrusted) {
    outside_.watch(*page.current, page.data, page.bytes);
  }
  if (outside_.is_foreign(t.storage().data_ptr())) {
    outside_.find_owners(page, t.storage().data_ptr());
  }
  if (version_of(t) >= 0) {
    page.take_version(t.unsafeGetTensorImpl()->version_counter());
  }
}

// What was packed while the op was open and could not be placed then.
void OpObserver::resolve_pending(OpenOp& open) {
  for (size_t i = 0; i < open.pending.size(); ++i) {
    Ticket& ticket = *open.pending[i];
    at::Tensor saved = ticket.kept;
    Page* page = pages_.find(storage_of(saved));
    if (page == nullptr && saves_clone(open, saved)) {
      page = take_saved_clone(open, saved);
    }
    saved_.resolve(ticket, page, saved);
    thread_trash().take(c10::IValue(std::move(saved)));
  }
  open.pending.clear();
}

// Whether autograd saved `self.clone()` that it took before the in-place op.
bool OpObserver::saves_clone(const OpenOp& open, const at::Tensor& saved) const {
  const auto& inputs = open.record->inputs;
  return open.info->may_save_clone && !inputs.empty() && inputs[0].write != Write::No &&
         inputs[0].argument == 0 && inputs[0].view.dtype == saved.dtype() &&
         inputs[0].view.geometry.sizes_arrayref() == saved.sizes();
}

// Records the clone as the op that it was.
Page* OpObserver::take_saved_clone(OpenOp& open, const at::Tensor& saved) {
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
  value->key = now_.next_key++;
  value->step = now_.step;
  value->fingerprint = mix(now_.fingerprint, 77);
  value->sequence = mix(now_.sequence, 77);
  value->depth = open.depth;
  value->producer = clone;
  value->output = 0;
  clone->outputs.push_back({value.get(), bytes, 0, -1, false});
  log_.note_clone(open, *clone, *value);
  const AddedPage added = pages_.find_or_add(storage);
  Page& page = *added;
  page.note_stream(options_.device);
  pages_.look(page, *storage.unsafeGetStorageImpl());
  page.set_current(std::move(value));
  return &page;
}

}  // namespace delta

// The observer of atomic ops: boundaries, watermarks and seconds always; values, versions and
// recipes while taping (forward, or backward with grad mode on).
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>

#include "cpu_pool.h"
#include "session.h"

namespace delta {
namespace {

struct Observed : at::ObserverContext, Pooled<Observed> {
  explicit Observed(bool is_region) : region(is_region) {}
  bool region;
};

// Only one session is entered at a time in a process. Backward may run on a thread of the autograd
// engine, which inherits the callback but not our thread-local session.
std::mutex g_entered_mutex;
c10::intrusive_ptr<Session> g_entered;

c10::intrusive_ptr<Session> entered_session() {
  std::lock_guard<std::mutex> guard(g_entered_mutex);
  return g_entered;
}

int64_t rescue(int64_t bytes) {
  if (thread_trash().locked) {
    return 0;
  }
  auto session = entered_session();
  return session ? session->make_room(bytes, /*inside_allocation=*/true) : 0;
}

bool opaque_region(const char* name) {
  return std::strncmp(name, "Torch-Compiled Region", 21) == 0 ||
         std::strcmp(name, "CompiledFunction") == 0;
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& fn) {
  auto& ts = thread_state();
  if (ts.depth > 0 || ts.replaying) {
    return nullptr;
  }
  c10::intrusive_ptr<Session> visited;
  Session* session = ts.session;
  if (session == nullptr) {
    visited = entered_session();
    session = visited.get();
    if (session == nullptr) {
      return nullptr;
    }
  }
  OpInfo* info = op_info(fn);
  if (info == nullptr) {
    if (opaque_region(fn.name())) {
      session->open_region();
      ts.depth = 1;
      ts.visited = std::move(visited);
      return std::make_unique<Observed>(true);
    }
    return nullptr;
  }
  auto inputs = fn.inputs();
  if (info->view_only || is_transparent(*info, inputs, session->options_.device.is_cpu())) {
    return nullptr;
  }
  bool opened = false;
  try {
    opened = session->begin_op(info, inputs);
  } catch (const std::exception&) {
    // A callback must not throw. What the op writes is found by its version counters later.
    ts.open.clear();
  }
  if (!opened) {
    return nullptr;
  }
  ts.depth = 1;
  ts.visited = std::move(visited);
  return std::make_unique<Observed>(false);
}

void on_end(const at::RecordFunction& fn, at::ObserverContext* context) {
  if (context == nullptr) {
    return;
  }
  auto& ts = thread_state();
  ts.depth = 0;
  auto visited = std::move(ts.visited);
  Session* session = ts.session != nullptr ? ts.session : visited.get();
  if (session == nullptr) {
    ts.open.clear();
    return;
  }
  if (static_cast<Observed*>(context)->region) {
    session->close_region();
    return;
  }
  try {
    const auto& outputs = fn.outputs();
    session->end_op(c10::ArrayRef<const c10::IValue>(outputs.data(), outputs.size()));
  } catch (const std::exception&) {
    ts.open.clear();
  }
}

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

template <class F>
void for_each_tensor(const c10::IValue& x, const F& f) {
  if (x.isTensor()) {
    f(x.toTensor(), -1);
  } else if (x.isTensorList()) {
    int i = 0;
    for (const at::Tensor& t : x.toTensorVector()) {
      f(t, i++);
    }
  } else if (x.isOptionalTensorList()) {
    int i = 0;
    for (const auto& t : x.toOptionalTensorVector()) {
      f(t.has_value() ? *t : at::Tensor(), i++);
    }
  }
}

bool is_training(const OpInfo& info, c10::ArrayRef<const c10::IValue> inputs) {
  if (info.training_argument < 0) {
    return true;
  }
  const auto& x = inputs[static_cast<size_t>(info.training_argument)];
  return !x.isBool() || x.toBool();
}

}  // namespace

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

void OpenOp::clear() {
  for (auto* ticket : pending) {
    ticket->state = Ticket::State::Kept;
  }
  pending.clear();
  record.reset();
  inputs.clear();
  written.clear();
  active = false;
  region = false;
  info = nullptr;
  log_index = -1;
}

// ---------------------------------------------------------------- the floor, for measurements

namespace {
at::CallbackHandle g_bare = 0;
std::unique_ptr<at::ObserverContext> bare_start(const at::RecordFunction&) { return nullptr; }
void bare_end(const at::RecordFunction&, at::ObserverContext*) {}
}  // namespace

void enter_bare_observer() {
  TORCH_CHECK(g_bare == 0, "the bare observer is entered already");
  g_bare = at::addThreadLocalCallback(at::RecordFunctionCallback(bare_start, bare_end)
                                          .needsInputs(true)
                                          .needsOutputs(true)
                                          .scopes({at::RecordScope::FUNCTION}));
}

void leave_bare_observer() {
  if (g_bare != 0) {
    at::removeCallback(g_bare);
    g_bare = 0;
  }
}

// ---------------------------------------------------------------- session: entering, steps

Session::Session(SessionOptions options) : options_(options), random_(options.seed) {}

Session::~Session() = default;

void Session::enter() {
  TORCH_CHECK(!entered_, "this runtime is entered already");
  {
    std::lock_guard<std::mutex> guard(g_entered_mutex);
    TORCH_CHECK(!g_entered, "another runtime is entered already");
    g_entered = c10::intrusive_ptr<Session>::reclaim_copy(this);
  }
  entered_ = true;
  auto& ts = thread_state();
  ts.session = this;
  ts.depth = 0;
  ts.open.clear();
  callback_ = at::addThreadLocalCallback(at::RecordFunctionCallback(on_start, on_end)
                                             .needsInputs(true)
                                             .needsOutputs(true)
                                             .scopes({at::RecordScope::FUNCTION}));
  if (options_.device.is_cpu()) {
    cpu_pool::set_rescue(&rescue);
    set_budget(options_.budget_bytes);
  }
}

void Session::leave() {
  if (!entered_) {
    return;
  }
  at::removeCallback(callback_);
  entered_ = false;
  auto& ts = thread_state();
  ts.session = nullptr;
  ts.depth = 0;
  ts.open.clear();
  if (options_.device.is_cpu()) {
    cpu_pool::set_rescue(nullptr);
    cpu_pool::set_soft_limit(0);
  }
  c10::intrusive_ptr<Session> last;
  std::lock_guard<std::mutex> guard(g_entered_mutex);
  last = std::move(g_entered);
}

void Session::begin_step() {
  forget_past();
  Guard guard(*this);
  ++step_;
  step_begin_tick_ = tick_;
  next_key_ = 0;
  fingerprint_ = 0;
  phase_ = Phase::Forward;
  plan_ = plans_.empty() ? nullptr : plans_.front().get();
  log_ops_.clear();
  log_inputs_.clear();
  log_outputs_.clear();
}

void Session::end_step() {
  forget_past();
  Guard guard(*this);
  emit(EventKind::Step, nullptr, 0, 0);
}

// ---------------------------------------------------------------- one op

bool Session::begin_op(OpInfo* info, c10::ArrayRef<const c10::IValue> inputs) {
  auto& open = thread_state().open;
  open.clear();
  open.info = info;
  open.active = true;
  last_op_ = info->name.c_str();
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  const bool taping = taping_ && (!in_backward || at::GradMode::is_enabled());
  if (phase_ == Phase::Backward && !in_backward && boundary_ && taping_) {
    phase_ = Phase::Forward;
    boundary_(0);
  }
  phase_ = in_backward ? Phase::Backward : Phase::Forward;
  ++tick_;
  ++counters_.ops;
  open.tick = tick_;

  uint64_t signature = mix(info->name_hash, in_backward ? 2 : 1);
  int64_t input_bytes = 0;
  for (const auto& x : inputs) {
    for_each_tensor(x, [&](const at::Tensor& t, int) {
      signature = mix_geometry(signature, t);
      if (t.defined() && t.has_storage()) {
        input_bytes += t.numel() * static_cast<int64_t>(t.itemsize());
      }
    });
  }
  open.signature = signature;

  if (options_.budget_bytes > 0) {
    const int64_t known = watermarks_.find(signature);
    const int64_t need = known >= 0 ? known : input_bytes;
    if (live_bytes() + need > options_.budget_bytes) {
      look_ahead(need);
    }
  }
  if (options_.stress != Stress::None) {
    stress_boundary();
  }

  std::vector<c10::intrusive_ptr<Value>> to_clone;
  if (taping) {
    // States of the generators are read before the lock: they allocate.
    auto record = c10::make_intrusive<OpRecord>();
    record->info = info;
    record->grad_mode = at::GradMode::is_enabled();
    record->threads = at::get_num_threads();
    record->default_dtype = c10::get_default_dtype_as_scalartype();
    record->device = options_.device;
    if (info->random) {
      bool given = false;
      for (const auto& x : inputs) {
        if (x.isGenerator()) {
          auto generator = x.toGenerator();
          std::lock_guard<std::mutex> lock(generator.mutex());
          record->random_states.emplace_back(generator, generator.get_state());
          given = true;
        }
      }
      if (!given) {
        auto generator = at::globalContext().defaultGenerator(options_.device);
        std::lock_guard<std::mutex> lock(generator.mutex());
        record->random_states.emplace_back(generator, generator.get_state());
      }
    }
    const bool side_writes_hold = is_training(*info, inputs);

    Guard guard(*this);
    fingerprint_ = mix(fingerprint_, signature);
    auto add = [&](size_t argument, int index, const at::Tensor& t) -> bool {
      if (!is_plain(t) || t.device() != options_.device) {
        record->keeps_objects |= t.defined();
        return false;
      }
      if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
        record->keeps_objects = true;
        if (sabotage() != Sabotage::WrappedNumberLost) {
          return false;
        }
      }
      Page* page = page_of(t);
      Write write = info->moves_storage ? Write::No : info->write_of(argument);
      if (write == Write::Scratch && !side_writes_hold) {
        write = Write::No;
      }
      if (write == Write::Overwrite &&
          !(t.storage_offset() == 0 &&
            page->bytes <= t.numel() * static_cast<int64_t>(t.itemsize()))) {
        write = Write::InPlace;  // a part of the storage keeps its old content
      }
      if (write != Write::No) {
        const bool inference = t.unsafeGetTensorImpl()->is_inference();
        open.written.push_back(
            {page, inference ? c10::VariableVersion() : t.unsafeGetTensorImpl()->version_counter(),
             version_of(t), !inference, static_cast<int16_t>(argument),
             static_cast<int16_t>(index)});
        if (needs_clone(*page)) {
          to_clone.push_back(page->current);
        }
      }
      open.inputs.push_back(c10::intrusive_ptr<Page>::reclaim_copy(page));
      record->inputs.push_back({page->current, ViewSpec::of(t), static_cast<int16_t>(argument),
                                static_cast<int16_t>(index), write});
      return true;
    };
    for (size_t i = 0; i < inputs.size(); ++i) {
      const auto& x = inputs[i];
      if (x.isTensor()) {
        if (add(i, -1, x.toTensor())) {
          record->arguments.emplace_back();
        } else {
          record->arguments.push_back(x);
        }
      } else if (x.isTensorList()) {
        std::vector<at::Tensor> rest;
        int k = 0;
        for (const auto& t : x.toTensorVector()) {
          rest.push_back(t.defined() && !add(i, k, t) ? t : at::Tensor());
          ++k;
        }
        record->arguments.emplace_back(c10::List<at::Tensor>(std::move(rest)));
      } else if (x.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> rest;
        int k = 0;
        for (const auto& t : x.toOptionalTensorVector()) {
          if (t.has_value() && t->defined() && add(i, k, *t)) {
            rest.push_back(at::Tensor());
          } else {
            rest.push_back(t);
          }
          ++k;
        }
        record->arguments.emplace_back(std::move(rest));
      } else {
        record->arguments.push_back(x);
      }
    }
    open.record = std::move(record);
  } else if (info->any_write && !info->moves_storage) {
    // Backward writes gradients, which we do not manage. A write to a page that we do manage makes
    // its content unknown: it is kept from here on.
    Guard guard(*this);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (info->write_of(i) == Write::No || info->write_of(i) == Write::Scratch) {
        continue;
      }
      for_each_tensor(inputs[i], [&](const at::Tensor& t, int index) {
        if (!is_plain(t)) {
          return;
        }
        Page* page = find_page(storage_of(t));
        if (page != nullptr) {
          if (needs_clone(*page)) {
            to_clone.push_back(page->current);
          }
          set_unknown_content(*page, t);
        }
      });
    }
  }

  // Note: a source that some dropped page needs is cloned before it is overwritten.
  if (!to_clone.empty() && sabotage() != Sabotage::NoCloneOnWrite) {
    for (auto& value : to_clone) {
      c10::Storage old = value->anchor;
      auto* allocator = c10::GetAllocator(old.device_type());
      c10::DataPtr data = allocator->allocate(old.nbytes());
      allocator->copy_data(data.get(), old.data(), old.nbytes());
      c10::Storage copy(c10::Storage::use_byte_size_t(), old.nbytes(), std::move(data), allocator,
                        true);
      Guard guard(*this);
      value->anchor = std::move(copy);
      value->version = -1;
      ++counters_.clones_on_write;
    }
  } else {
    for (auto& value : to_clone) {
      value->version = -1;
    }
  }

  if (logging_) {
    Guard guard(*this);
    open.log_index = static_cast<int64_t>(log_ops_.size());
    LoggedOp row{};
    row.fingerprint = taping ? fingerprint_ : 0;
    row.signature = signature;
    row.name_hash = info->name_hash;
    row.tick = tick_;
    row.live_bytes = live_bytes();
    row.dropped_bytes = dropped_now_bytes_;
    row.managed_bytes = managed_resident_bytes_;
    row.phase = static_cast<int32_t>(phase_);
    row.first_input = static_cast<int32_t>(log_inputs_.size());
    if (open.record) {
      for (auto& ref : open.record->inputs) {
        if (ref.write != Write::Overwrite && ref.write != Write::Scratch && ref.value->key >= 0) {
          log_inputs_.push_back(ref.value->key);
        }
      }
    }
    for (const auto& x : inputs) {
      for_each_tensor(x, [&](const at::Tensor& t, int) {
        if (is_plain(t)) {
          Page* page = find_page(storage_of(t));
          if (page != nullptr && page->candidate >= 0) {
            row.input_bytes += page->bytes;
          }
        }
      });
    }
    row.n_inputs = static_cast<int32_t>(log_inputs_.size()) - row.first_input;
    log_names_.emplace(info->name_hash, info);
    log_ops_.push_back(row);
  }
  open.live_bytes = live_bytes();
  if (options_.device.is_cpu()) {
    cpu_pool::open_window();
  }
  open.begin = std::chrono::steady_clock::now();
  return true;
}

void Session::end_op(c10::ArrayRef<const c10::IValue> outputs) {
  auto now = std::chrono::steady_clock::now();
  auto& open = thread_state().open;
  if (!open.active) {
    return;
  }
  OpInfo* info = open.info;
  const double seconds = std::chrono::duration<double>(now - open.begin).count();
  int64_t watermark = 0;
  if (options_.device.is_cpu()) {
    watermark = cpu_pool::window_peak_bytes() + uncounted_bytes_ - open.live_bytes +
                cpu_pool::window_rescued_bytes();
  }
  const bool threw = outputs.empty() && info->n_returns > 0;

  Guard guard(*this);
  if (!threw) {
    watermarks_.learn(open.signature, watermark);
  }
  if (open.log_index >= 0 && open.log_index < static_cast<int64_t>(log_ops_.size())) {
    auto& row = log_ops_[static_cast<size_t>(open.log_index)];
    row.seconds = seconds;
    row.watermark_bytes = watermark;
    row.first_output = static_cast<int32_t>(log_outputs_.size());
  }
  if (options_.budget_bytes > 0) {
    int64_t stuck = open.live_bytes - managed_resident_bytes_ + watermark;
    if (threw && options_.device.is_cpu()) {
      stuck = std::max(stuck, cpu_pool::take_refused_bytes() + uncounted_bytes_);
    }
    if (stuck > counters_.floor_bytes) {
      counters_.floor_bytes = stuck;
      counters_.floor_op = info->name.c_str();
    }
  }
  if (!open.record) {
    open.clear();
    return;
  }

  auto record = open.record;
  record->seconds = static_cast<float>(seconds);
  record->watermark_bytes = watermark;
  const bool unknown =
      (info->makes_unknown && sabotage() != Sabotage::EmptyAsOp) || info->never_replay || threw;

  auto make_value = [&](int64_t bytes, bool is_argument, int position, int index) {
    auto value = c10::make_intrusive<Value>();
    value->bytes = bytes;
    if (!unknown) {
      value->key = next_key_++;
      value->fingerprint = fingerprint_;
      value->producer = record;
      value->output = static_cast<int32_t>(record->outputs.size());
      record->outputs.push_back({value.get(), bytes, static_cast<int16_t>(position),
                                 static_cast<int16_t>(index), is_argument});
      if (open.log_index >= 0) {
        log_outputs_.push_back({value->key, bytes});
      }
    }
    return value;
  };

  // Written arguments: one new value per storage.
  for (size_t k = 0; k < open.written.size(); ++k) {
    auto& w = open.written[k];
    bool done = false;
    for (size_t j = 0; j < k; ++j) {
      done |= open.written[j].page == w.page;
    }
    if (done) {
      continue;
    }
    auto storage = w.page->weak.lock();
    if (!storage) {
      continue;
    }
    if (static_cast<int64_t>(storage->nbytes()) != w.page->bytes) {
      w.page->bytes = static_cast<int64_t>(storage->nbytes());
    }
    if (info->write_of(static_cast<size_t>(w.argument)) == Write::Scratch) {
      // Statistics written on the side are never made again: a source from here on.
      auto value = c10::make_intrusive<Value>();
      value->bytes = w.page->bytes;
      value->input = true;
      w.page->set_current(std::move(value));
    } else {
      w.page->set_current(make_value(w.page->bytes, true, w.argument, w.index));
    }
    if (w.has_counter) {
      w.page->version_counter = w.counter;
      w.page->version = static_cast<int64_t>(w.counter.current_version());
      w.page->version_known = true;
      if (!w.page->current->producer) {
        w.page->current->version_counter = w.counter;
        w.page->current->version = w.page->version;
      }
    } else {
      w.page->version_known = false;
    }
    if (w.page->tickets > 0) {
      attach_plan(*w.page);
    }
  }

  // Returned tensors: fresh storages are new values; aliases of arguments are views.
  auto returned = [&](int position, int index, const at::Tensor& t) {
    if (!is_plain(t) || t.device() != options_.device) {
      return;
    }
    auto* storage = storage_of(t);
    for (auto& page : open.inputs) {
      if (page->weak._unsafe_get_target() == storage) {
        if (!info->any_write) {
          page->many_counters =
              true;  // an alias without annotation has a version counter of its own
        }
        return;
      }
    }
    if (find_page(storage) != nullptr) {
      return;  // a second output over the same fresh storage
    }
    auto page = c10::make_intrusive<Page>(t.storage().getWeakStorageImpl());
    page->bytes = static_cast<int64_t>(storage->nbytes());
    page->set_current(make_value(page->bytes, false, position, index));
    const int64_t version = version_of(t);
    if (version >= 0) {
      page->version_counter = t.unsafeGetTensorImpl()->version_counter();
      page->version = version;
      page->version_known = true;
      if (!page->current->producer) {
        page->current->version_counter = page->version_counter;
        page->current->version = version;
      }
    }
    pages_.emplace(storage, std::move(page));
  };
  for (size_t i = 0; i < outputs.size(); ++i) {
    for_each_tensor(outputs[i], [&](const at::Tensor& t, int index) {
      returned(static_cast<int>(i), index, t);
    });
  }
  if (open.log_index >= 0 && open.log_index < static_cast<int64_t>(log_ops_.size())) {
    auto& row = log_ops_[static_cast<size_t>(open.log_index)];
    row.n_outputs = static_cast<int32_t>(log_outputs_.size()) - row.first_output;
  }
  if (info->moves_storage) {
    for (auto& page : open.inputs) {
      page->version_known = false;
      page->current->version = -1;
    }
  }

  // What was packed while the op was open and could not be placed then.
  auto pending = std::move(open.pending);
  open.pending.clear();
  for (auto* ticket : pending) {
    Page* page = find_page(storage_of(ticket->kept));
    const bool saves_clone =
        page == nullptr && info->may_save_clone && !record->inputs.empty() &&
        record->inputs[0].write != Write::No && record->inputs[0].argument == 0 &&
        record->inputs[0].view.dtype == ticket->kept.dtype() &&
        record->inputs[0].view.geometry.sizes_arrayref() == ticket->kept.sizes();
    if (saves_clone) {
      // Autograd saved `self.clone()` that it took before the in-place op: recorded as that clone.
      auto clone = c10::make_intrusive<OpRecord>();
      clone->info = clone_op_info();
      clone->arguments.emplace_back();
      clone->arguments.emplace_back();
      auto ref = record->inputs[0];
      ref.write = Write::No;
      clone->inputs.push_back(std::move(ref));
      clone->threads = record->threads;
      clone->default_dtype = record->default_dtype;
      clone->device = record->device;
      clone->seconds = record->seconds;
      auto value = c10::make_intrusive<Value>();
      value->bytes = static_cast<int64_t>(ticket->kept.storage().nbytes());
      value->key = next_key_++;
      value->fingerprint = mix(fingerprint_, 77);
      value->producer = clone;
      value->output = 0;
      clone->outputs.push_back({value.get(), value->bytes, 0, -1, false});
      clone->watermark_bytes = value->bytes;
      auto made = c10::make_intrusive<Page>(ticket->kept.storage().getWeakStorageImpl());
      made->bytes = value->bytes;
      if (logging_) {
        LoggedOp row{};
        row.fingerprint = value->fingerprint;
        row.name_hash = clone->info->name_hash;
        row.tick = tick_;
        row.live_bytes = open.live_bytes;
        row.dropped_bytes = dropped_now_bytes_;
        row.managed_bytes = managed_resident_bytes_;
        row.seconds = seconds;
        row.watermark_bytes = value->bytes;
        row.first_input = static_cast<int32_t>(log_inputs_.size());
        if (clone->inputs[0].value->key >= 0) {
          log_inputs_.push_back(clone->inputs[0].value->key);
        }
        row.n_inputs = static_cast<int32_t>(log_inputs_.size()) - row.first_input;
        row.first_output = static_cast<int32_t>(log_outputs_.size());
        row.n_outputs = 1;
        row.flags = 1;
        log_outputs_.push_back({value->key, value->bytes});
        log_names_.emplace(row.name_hash, clone->info);
        log_ops_.push_back(row);
      }
      made->set_current(std::move(value));
      page = made.get();
      pages_.emplace(storage_of(ticket->kept), std::move(made));
    }
    resolve(*ticket, page);
  }
  if (pages_.size() >= sweep_at_) {
    sweep();
    sweep_at_ = std::max<size_t>(512, 2 * pages_.size());
  }
  open.clear();
}

void Session::open_region() {
  auto& open = thread_state().open;
  open.clear();
  open.region = true;
}

void Session::close_region() { thread_state().open.clear(); }

void Session::mark_written(const at::Tensor& t) {
  if (!is_plain(t)) {
    return;
  }
  Guard guard(*this);
  Page* page = find_page(storage_of(t));
  if (page != nullptr) {
    set_unknown_content(*page, t);
  }
}

// ---------------------------------------------------------------- pages

Session::Guard::Guard(Session& s) : session(s) {
  s.mutex_.lock();
  thread_trash().locked = true;
}

Session::Guard::~Guard() {
  auto& trash = thread_trash();
  std::vector<c10::Storage> storages;
  std::vector<c10::IValue> values;
  if (!trash.storages.empty() || !trash.values.empty()) {
    storages.swap(trash.storages);
    values.swap(trash.values);
  }
  trash.locked = false;
  session.mutex_.unlock();
}

Page* Session::find_page(const c10::StorageImpl* storage) {
  auto it = pages_.find(storage);
  return it == pages_.end() ? nullptr : it->second.get();
}

Page* Session::page_of(const at::Tensor& t) {
  auto* storage = storage_of(t);
  const int64_t version = version_of(t);
  if (Page* page = find_page(storage)) {
    if (page->many_counters || version < 0) {
      return page;
    }
    if (!page->version_known) {
      page->version = version;
      page->version_counter = t.unsafeGetTensorImpl()->version_counter();
      page->version_known = true;
      if (!page->current->producer) {
        page->current->version_counter = page->version_counter;
        page->current->version = version;
      }
    } else if (version > page->version) {
      set_unknown_content(*page, t);  // something that we did not see wrote to it
    }
    return page;
  }
  auto page = c10::make_intrusive<Page>(t.storage().getWeakStorageImpl());
  page->bytes = static_cast<int64_t>(storage->nbytes());
  auto value = c10::make_intrusive<Value>();
  value->bytes = page->bytes;
  value->input = true;
  if (version >= 0) {
    value->version_counter = t.unsafeGetTensorImpl()->version_counter();
    value->version = version;
    page->version_counter = value->version_counter;
    page->version = version;
    page->version_known = true;
  }
  page->set_current(std::move(value));
  if (options_.device.is_cpu() && page->bytes > 0 &&
      !cpu_pool::owns(storage->_mutable_data_ptr_no_checks())) {
    charge_uncounted(*page, page->bytes);
  }
  return pages_.emplace(storage, std::move(page)).first->second.get();
}

// The budget is about all that the device holds; what the pool cannot see is charged to it here.
void Session::charge_uncounted(Page& page, int64_t bytes) {
  uncounted_bytes_ += bytes - page.uncounted_bytes;
  page.uncounted_bytes = bytes;
  if (entered_ && options_.budget_bytes > 0) {
    cpu_pool::set_soft_limit(std::max<int64_t>(1, options_.budget_bytes - uncounted_bytes_));
  }
}

void Session::set_budget(int64_t bytes) {
  options_.budget_bytes = bytes;
  if (entered_ && options_.device.is_cpu()) {
    cpu_pool::set_soft_limit(bytes > 0 ? std::max<int64_t>(1, bytes - uncounted_bytes_) : 0);
  }
}

void Session::set_unknown_content(Page& page, const at::Tensor& t) {
  auto value = c10::make_intrusive<Value>();
  value->bytes = page.bytes;
  value->input = true;
  const int64_t version = version_of(t);
  if (version >= 0) {
    value->version_counter = t.unsafeGetTensorImpl()->version_counter();
    value->version = version;
    page.version_counter = value->version_counter;
    page.version = version;
    page.version_known = true;
  }
  page.set_current(std::move(value));
  if (page.tickets > 0) {
    emit(EventKind::Inadmissible, &page, page.bytes, 0);
  }
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

bool Session::storage_alive(const Value& v) const {
  return v.home != nullptr && v.home->residency == Residency::Resident &&
         (v.home->strong || !v.home->weak.expired());
}

bool Session::content_unchanged(const Page& page) const {
  return page.many_counters || !page.version_known || page.version < 0 ||
         static_cast<int64_t>(page.version_counter.current_version()) <= page.version;
}

// Between steps: what no ticket needs is a source from here on, so that a loss that is kept does
// not keep the records of its whole step, and with them the anchors of the weights.
void Session::forget_past() {
  Guard guard(*this);
  for (int pass = 0; pass < 2;
       ++pass) {  // the first may free what the second then finds unreachable
    for (auto& [storage, page] : pages_) {
      if (page->tickets == 0 && page->current->producer && page->current.use_count() == 1) {
        auto source = c10::make_intrusive<Value>();
        source->bytes = page->bytes;
        source->input = true;
        if (page->version_known && !page->many_counters) {
          source->version_counter = page->version_counter;
          source->version = page->version;
        }
        page->set_current(std::move(source));
      }
    }
  }
  sweep();
}

void Session::sweep() {
  for (auto it = pages_.begin(); it != pages_.end();) {
    Page& page = *it->second;
    if (page.tickets == 0 && page.weak.expired()) {
      if (page.uncounted_bytes > 0) {
        charge_uncounted(page, 0);
      }
      it = pages_.erase(it);
    } else {
      ++it;
    }
  }  // Only now: the pages that went may have been the last to reach these.
  for (auto& [storage, page] : pages_) {
    if (page->current->anchor && page->current.use_count() == 1) {
      thread_trash().take(std::move(page->current->anchor));
      page->current->anchor = c10::Storage();
    }
  }
}

void Session::emit(EventKind kind, const Page* page, int64_t bytes, double seconds, int64_t key,
                   int reason) {
  if (!events_on_) {
    return;
  }
  events_.push_back({static_cast<int32_t>(kind), reason, page != nullptr ? page->id : -1, tick_,
                     bytes, key, seconds});
}

int64_t Session::live_bytes() const {
  if (options_.device.is_cpu()) {
    return cpu_pool::live_bytes() + uncounted_bytes_;
  }
  auto stats =
      c10::getDeviceAllocator(options_.device.type())->getDeviceStats(options_.device.index());
  return stats.allocated_bytes[0].current;
}

}  // namespace delta

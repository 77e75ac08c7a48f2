// Entering and leaving a session, steps, and the table of pages.
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <mutex>
#include <new>

#include "observe/observer.h"
#include "pool/cpu_pool.h"
#include "rebuild/replay_thread.h"
#include "rebuild/shortcuts.h"
#include "rebuild/vector_math.h"
#include "state/session.h"
#include "tiers/stream_lane.h"

namespace delta {

namespace {

constexpr size_t kMostFacts = 1 << 18;

// Only one session is entered at a time in a process. Backward may run on a thread of the autograd
// engine, which has no thread-local session.
std::mutex g_entered_mutex;
c10::intrusive_ptr<Session> g_entered;

// Sessions that are entered, or have tensors saved, and the one watcher for all of them.
struct Watch {
  std::mutex mutex;
  std::vector<c10::intrusive_ptr<Session>> sessions;
  std::atomic<size_t> n_sessions{0};
  at::CallbackHandle handle = 0;
};
Watch& the_watch() {
  static auto* watch = new Watch();  // outlives all that saved tensors
  return *watch;
}

int64_t rescue(int64_t bytes) {
  if (thread_trash().locked) {
    return 0;
  }
  const InsideAllocation inside;
  auto session = entered_session();
  return session ? session->make_room(bytes, /*inside_allocation=*/true) : 0;
}

}  // namespace

c10::intrusive_ptr<Session> entered_session() {
  std::lock_guard<std::mutex> guard(g_entered_mutex);
  return g_entered;
}

std::vector<c10::intrusive_ptr<Session>> watching_sessions() {
  auto& watch = the_watch();
  std::lock_guard<std::mutex> guard(watch.mutex);
  return watch.sessions;
}

bool several_watch() { return the_watch().n_sessions.load(std::memory_order_relaxed) > 1; }

void Session::watch_threads() {
  auto& watch = the_watch();
  std::lock_guard<std::mutex> guard(watch.mutex);
  const auto self = [this](const auto& each) { return each.get() == this; };
  if (std::none_of(watch.sessions.begin(), watch.sessions.end(), self)) {
    watch.sessions.push_back(c10::intrusive_ptr<Session>::reclaim_copy(this));
    watch.n_sessions = watch.sessions.size();
  }
  if (watch.handle == 0) {
    watch.handle = at::addGlobalCallback(observer_callback());
  }
}

void Session::end_watch() {
  auto& watch = the_watch();
  c10::intrusive_ptr<Session> last;
  std::lock_guard<std::mutex> guard(watch.mutex);
  const auto self = [this](const auto& each) { return each.get() == this; };
  const auto place = std::find_if(watch.sessions.begin(), watch.sessions.end(), self);
  if (place == watch.sessions.end()) {
    return;
  }
  last = std::move(*place);
  watch.sessions.erase(place);
  watch.n_sessions = watch.sessions.size();
  if (watch.sessions.empty()) {
    at::removeCallback(watch.handle);
    watch.handle = 0;
  }
}

Session::Session(SessionOptions options)
    : options_(options), evidence_random_(options.seed + 1), random_(options.seed) {
  settle_vector_math();
  if (!options_.device.is_cpu()) {
    const c10::OptionalDeviceGuard guard(options_.device);
    own_deleter_ = c10::GetAllocator(options_.device.type())->allocate(1).get_deleter();
    device_evidence_ = std::make_unique<DeviceEvidence>(options_.device, options_.budget_bytes);
  }
  if (options_.swap) {
    open_tiers();
  }
}

Session::~Session() { stop_lanes(); }

void Session::enter() {
  TORCH_CHECK(!entered_, "this runtime is entered already");
  {
    std::lock_guard<std::mutex> guard(g_entered_mutex);
    TORCH_CHECK(!g_entered, "another runtime is entered already");
    g_entered = c10::intrusive_ptr<Session>::reclaim_copy(this);
  }
  entered_ = true;
  resting_ = false;
  auto& ts = thread_state();
  ts.session = this;
  ts.depth = 0;
  ts.open.clear();
  watch_threads();
  if (options_.device.is_cpu()) {
    cpu_pool::set_rescue(&rescue);
    cpu_pool::reset_passed();
    set_budget(options_.budget_bytes);
  }
}

void Session::leave() {
  if (!entered_) {
    return;
  }
  entered_ = false;
  auto& ts = thread_state();
  if (ts.session == this) {  // else the thread that entered it is gone
    ts.session = nullptr;
    ts.depth = 0;
    ts.open.clear();
  }
  if (!tiers_.empty()) {
    Guard guard(*this);
    reap();
  }
  if (options_.device.is_cpu()) {
    cpu_pool::set_rescue(nullptr);
    cpu_pool::set_soft_limit(0);
  }
  bool over = false;
  {
    Guard guard(*this);
    over = managed_.empty();
  }
  if (over) {
    end_watch();
  }
  c10::intrusive_ptr<Session> last;
  std::lock_guard<std::mutex> guard(g_entered_mutex);
  last = std::move(g_entered);
}

void Session::rest() { resting_ = true; }

void forget_locks() {
  auto& watch = the_watch();
  new (&watch.mutex) std::mutex();
  new (&g_entered_mutex) std::mutex();
  forget_replay_lock();
  forget_op_table_lock();
  forget_shortcuts_lock();
  for (const auto& session : watch.sessions) {  // the one that is entered is among them
    session->mutex_.unlock();
  }
}

void Session::begin_step() {
  forget_past();
  if (device_evidence_ && options_.verify != Verify::Off) {
    device_evidence_->hashes.reserve(current_stream_id(options_.device));
  }
  Guard guard(*this);
  end_loans();
  ++step_;
  step_begin_tick_ = tick_;
  charged_lately_.clear();
  uncharge_tick_ = tick_;
  uncounted_peak_bytes_ = 0;
  if (options_.device.is_cpu()) {
    cpu_pool::reset_step_peak();
  }
  next_key_ = 0;
  fingerprint_ = 0;
  sequence_ = 0;
  packs_before_step_ = counters_.packs;
  unpacks_before_step_ = counters_.unpacks;
  saves_ = 0;
  held_.clear();
  cloned_bytes_ = 0;
  hopeless_ = false;
  cpu_pool::reset_passed();
  counters_.stuck_bytes = 0;
  counters_.stuck_op = "";
  phase_ = Phase::Forward;
  graph_gone_ = false;
  backwards_ = 0;
  boundary_peak_bytes_ = 0;
  plan_ = plans_.empty() ? nullptr : plans_.front().get();
  if (op_facts_.size() > kMostFacts) {  // of a program whose shapes never repeat
    op_facts_.clear();
    facts_of_.clear();
  }
  forget_log();
  to_write_.clear();  // what a graph that is kept still waits for is copied when it has to go
}

void Session::end_step() {
  forget_past();
  Guard guard(*this);
  reap();
  emit(EventKind::Step, nullptr, 0, 0);
}

void Session::forget_log() {
  log_ops_.clear();
  log_inputs_.clear();
  log_outputs_.clear();
}

void Session::Guard::lock() {
  session_.mutex_.lock();
  thread_trash().locked = true;
  held_ = true;
}

bool Session::Guard::lock_with_gil() {
  if (!holds_gil()) {
    lock();
  } else if (session_.mutex_.try_lock_for(gil_patience())) {
    thread_trash().locked = true;
    held_ = true;
  }
  return held_;
}

void Session::Guard::unlock() {
  auto& trash = thread_trash();
  trash.locked = false;
  held_ = false;
  if (trash.storages.empty() && trash.values.empty()) {
    session_.mutex_.unlock();
    return;
  }
  std::vector<c10::Storage> storages;
  std::vector<c10::IValue> values;
  storages.swap(trash.storages);
  values.swap(trash.values);
  session_.mutex_.unlock();
}

// Memory goes back to the stream that it was allocated on, at once. Nobody knows how far another
// stream is that uses it too, so such a page stays until autograd lets it go.
void Session::note_stream(Page& page) const {
  if (options_.device.is_cpu()) {
    return;
  }
  const c10::StreamId stream = current_stream_id(options_.device);
  page.many_streams |= page.stream != kNoStream && page.stream != stream;
  page.stream = stream;
}

// Of a source that no op has used before, or that lies elsewhere now.
void Session::note_first_use(Page& page, const c10::Storage& storage) {
  page.outside.unread = false;
  const int64_t bytes =
      options_.device.is_cpu() && !cpu_pool::owns(storage.data_ptr()) ? page.bytes : 0;
  if (bytes != page.uncounted_bytes) {
    charge_uncounted(page, bytes);
  }
}

// The budget is about all that the device holds; what the pool cannot see is charged to it here.
void Session::charge_uncounted(Page& page, int64_t bytes) {
  if (entered_ && options_.device.is_cpu() && bytes < page.uncounted_bytes) {
    uncounted_peak_bytes_ = step_peak_bytes();  // until now it was there
    cpu_pool::reset_step_peak();
  }
  uncounted_bytes_ += bytes - page.uncounted_bytes;
  page.uncounted_bytes = bytes;
  if (bytes > 0) {
    charged_lately_.push_back(c10::intrusive_ptr<Page>::reclaim_copy(&page));
  }
  if (entered_ && options_.budget_bytes > 0) {
    cpu_pool::set_soft_limit(std::max<int64_t>(1, options_.budget_bytes - uncounted_bytes_));
  }
}

// What was charged in this step and is gone again; the rest waits for a sweep. With many of them
// not at every op.
void Session::uncharge_gone() {
  if (tick_ < uncharge_tick_) {
    return;
  }
  const auto is_over = [this](const c10::intrusive_ptr<Page>& page) {
    if (page->uncounted_bytes > 0 && page->tickets == 0 && page->weak.expired()) {
      charge_uncounted(*page, 0);
    }
    return page->uncounted_bytes == 0;
  };
  charged_lately_.erase(std::remove_if(charged_lately_.begin(), charged_lately_.end(), is_over),
                        charged_lately_.end());
  uncharge_tick_ = tick_ + static_cast<int64_t>(charged_lately_.size() / 32);
}

Levels Session::levels() const {
  const auto count = [](const auto& all) { return static_cast<int64_t>(all.size()); };
  Levels now;
  now.live_tickets = live_tickets_;
  now.pages = count(pages_);
  now.managed_pages = count(managed_);
  now.managed_resident_bytes = managed_resident_bytes_;
  now.dropped_now_bytes = dropped_now_bytes_;
  now.swapped_now_bytes = swapped_now_bytes_;
  now.uncounted_bytes = uncounted_bytes_;
  now.step_peak_bytes = step_peak_bytes();
  return now;
}

int64_t Session::step_peak_bytes() const {
  if (!options_.device.is_cpu()) {
    return boundary_peak_bytes_;
  }
  return std::max(uncounted_peak_bytes_, cpu_pool::step_peak_bytes() + uncounted_bytes_);
}

void Session::set_budget(int64_t bytes) {
  options_.budget_bytes = bytes;
  if (entered_ && options_.device.is_cpu()) {
    cpu_pool::set_soft_limit(bytes > 0 ? std::max<int64_t>(1, bytes - uncounted_bytes_) : 0);
  }
}

// Between steps: what no ticket needs is a source from here on, so that a loss that is kept does
// not keep the records of its whole step, and with them the anchors of the weights.
void Session::forget_past() {
  Guard guard(*this);
  const auto past = [](const Page& page) {
    return page.tickets == 0 && page.current->producer && page.current.use_count() == 1;
  };
  std::vector<Page*> waiting;
  for (auto& [storage, page] : pages_) {
    if (past(*page)) {
      waiting.push_back(page.get());
    }
  }
  while (!waiting.empty()) {
    Page& page = *waiting.back();
    waiting.pop_back();
    if (!past(page)) {
      continue;
    }
    auto record = page.current->producer;
    auto source = make_source(page.bytes);
    source->versions = page.versions;
    source->watched = page.current->watched;
    source->hash = page.current->hash;
    page.set_current(std::move(source));
    if (record.use_count() > 1) {
      continue;  // another output needs it
    }
    // With this record go the last uses of what it read, perhaps.
    std::vector<Page*> homes;
    for (auto& ref : record->inputs) {
      if (ref.value->home != nullptr) {
        homes.push_back(ref.value->home);
      }
    }
    record.reset();
    for (Page* home : homes) {
      if (past(*home)) {
        waiting.push_back(home);
      }
    }
  }
  sweep();
}

void Session::emit(EventKind kind, const Page* page, int64_t bytes, double seconds, int64_t key,
                   int reason) {
  events_.push_back({static_cast<int32_t>(kind), reason, page != nullptr ? page->id : -1, tick_,
                     bytes, key, seconds});
}

int64_t Session::live_bytes() const {
  if (options_.device.is_cpu()) {
    return cpu_pool::live_bytes() + uncounted_bytes_;
  }
  return device_bytes(options_.device).live;
}

int64_t Session::limit_bytes() const {
  const int64_t passed =
      options_.device.is_cpu() ? cpu_pool::passed_bytes() + uncounted_bytes_ : boundary_peak_bytes_;
  return std::max(options_.budget_bytes, passed);
}

DeviceBytes device_bytes(c10::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return {stats.allocated_bytes[0].current, stats.allocated_bytes[0].peak};
}

void Session::await_device() const {
  if (!options_.device.is_cpu()) {
    c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device).synchronize();
  }
}

}  // namespace delta

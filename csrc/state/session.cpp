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

int64_t most_watched_bytes = int64_t{1} << 30;

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

// A source: a value that no recorded op made.
c10::intrusive_ptr<Value> make_source(int64_t bytes) {
  auto value = c10::make_intrusive<Value>();
  value->bytes = bytes;
  value->input = true;
  return value;
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

// ---------------------------------------------------------------- pages

bool SpinLock::try_lock_for(std::chrono::microseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (held_.exchange(true, std::memory_order_acquire)) {
    while (held_.load(std::memory_order_relaxed)) {
      if (std::chrono::steady_clock::now() >= until) {
        return false;
      }
      std::this_thread::yield();
    }
  }
  return true;
}

void SpinLock::wait_to_lock() {
  while (!try_lock_for(gil_patience())) {
    const WithoutGil no_gil;
    while (held_.load(std::memory_order_relaxed)) {
      std::this_thread::yield();  // an eviction may take a while
    }
  }
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

Page* Session::find_page(const c10::StorageImpl* storage) {
  auto it = pages_.find(storage);
  return it == pages_.end() ? nullptr : it->second.get();
}

Page* Session::page_of(const at::Tensor& t) {
  auto* storage = storage_of(t);
  const bool counts = version_of(t) >= 0;
  auto [entry, unknown] = pages_.emplace(storage, nullptr);
  if (!unknown) {
    Page* page = entry->second.get();
    note_stream(*page);
    if (page->residency() == Residency::Resident && was_moved(*page, *storage)) {
      move_page(*page, t.storage());
      if (counts) {
        page->take_version(t.unsafeGetTensorImpl()->version_counter());
      }
    } else if (counts && page->versions.moved(t.unsafeGetTensorImpl()->version_counter()) &&
               sabotage() != Sabotage::AliasVersionsUnseen) {
      spoil(*page, t);
    }
    if (page->outside.unread) {
      note_first_use(*page, t.storage());
    }
    return page;
  }
  pages_.erase(entry);
  Page& page = new_source(t.storage());
  note_first_use(page, t.storage());
  if (counts) {
    page.take_version(t.unsafeGetTensorImpl()->version_counter());
  }
  return &page;
}

// The page of a storage that is seen for the first time.
Page& Session::new_source(const c10::Storage& storage) {
  auto fresh = c10::make_intrusive<Page>(storage.getWeakStorageImpl());
  Page& page = *fresh;
  pages_.emplace(storage.unsafeGetStorageImpl(), std::move(fresh));
  page.many_streams = !options_.device.is_cpu();  // whose memory it is was not seen
  look(page, *storage.unsafeGetStorageImpl());
  page.set_current(make_source(page.bytes));
  page.outside.unread = true;
  find_owners(page, storage.data_ptr());
  return page;
}

Page& Session::page_for(const c10::Storage& storage) {
  auto* impl = storage.unsafeGetStorageImpl();
  Page* page = find_page(impl);
  if (page == nullptr) {
    return new_source(storage);
  }
  if (page->residency() == Residency::Resident && was_moved(*page, *impl)) {
    move_page(*page, storage);
  }
  return *page;
}

// The page of what is about to be written to; null where no page can lie over that memory.
Page* Session::page_to_write(const at::Tensor& t) {
  if (!is_plain(t)) {
    return nullptr;
  }
  const c10::Storage& storage = t.storage();
  if (find_page(storage.unsafeGetStorageImpl()) != nullptr) {
    return &page_for(storage);
  }
  if (t.device() != options_.device || storage.nbytes() == 0) {
    return nullptr;
  }
  const bool shared = is_foreign(storage.data_ptr()) ||
                      foreign_ranges_.meets(storage.data(), static_cast<int64_t>(storage.nbytes()));
  return shared ? &new_source(storage) : nullptr;
}

// ---------------------------------------------------------------- memory that others can write to

// Whether the memory is not the allocator's own.
bool Session::is_foreign(const c10::DataPtr& data) const {
  if (options_.device.is_cpu()) {
    return cpu_pool::is_foreign(data);
  }
  return own_deleter_ != nullptr && data.get() != nullptr && data.get_deleter() != own_deleter_;
}

void Session::add_foreign(Page& page) {
  if (!page.outside.listed) {
    page.outside.listed = true;
    foreign_.push_back(c10::intrusive_ptr<Page>::reclaim_copy(&page));
  }
  if (page.data != nullptr) {
    foreign_ranges_.add(page.data, page.bytes);
  }
}

void Session::set_unguarded(Page& page, int64_t loan) {
  if (loan == kForGood) {
    page.outside.loans = 0;
  } else if (!page.outside.unguarded || page.outside.loans > 0) {
    ++page.outside.loans;
    lent_[loan] = c10::intrusive_ptr<Page>::reclaim_copy(&page);
  }
  page.outside.unguarded = true;
}

// The arrays of these loans are gone.
void Session::take_back(const std::vector<int64_t>& loans) {
  Guard guard(*this);
  for (const int64_t loan : loans) {
    auto entry = lent_.find(loan);
    if (entry != lent_.end()) {
      returned_.push_back(std::move(entry->second));
      lent_.erase(entry);
    }
  }
  end_loans();
}

// A page whose last array is gone is guarded again, as soon as no recipe starts from what it holds.
void Session::end_loans() {
  const auto has_ended = [](const c10::intrusive_ptr<Page>& page) {
    if (page->outside.loans > 1) {
      --page->outside.loans;
      return true;
    }
    if (page->outside.loans == 0 || page->weak.expired()) {
      return true;
    }
    const Value& value = *page->current;
    if (page->tickets > 0 || value.producer || page->current.use_count() > 1) {
      return false;
    }
    page->outside.loans = 0;
    page->outside.unguarded = false;
    page->set_current(make_source(page->bytes));
    return true;
  };
  returned_.erase(std::remove_if(returned_.begin(), returned_.end(), has_ended), returned_.end());
}

// Of a storage that is new here, or lies elsewhere now: do others hold its memory, or storages over
// the same memory?
void Session::find_owners(Page& page, const c10::DataPtr& data) {
  if (page.bytes == 0 || sabotage() == Sabotage::ForeignMemoryTrusted) {
    return;
  }
  if (is_foreign(data)) {
    add_foreign(page);
    share_with_others(page);
    page_index_.for_each_over(pages_, page.data, page.bytes,
                              [&](Page& other) { link_if_aliases(page, other); });
  } else if (page.data != nullptr && foreign_ranges_.meets(page.data, page.bytes)) {
    for_each_foreign_over(page, [&](Page& other) { link_if_aliases(page, other); });
  }
}

// Notes it if both lie over the same memory.
void Session::link_if_aliases(Page& page, Page& other) {
  if (&page == &other || !other.lies_over(page.data, page.bytes)) {
    return;
  }
  auto alive = lock(other.weak);
  if (!alive) {
    return;
  }
  const bool moved = was_moved(other, *alive);
  thread_trash().take(c10::Storage(std::move(alive)));
  if (moved) {
    return;  // when it is used next its owners are looked for where it lies now
  }
  for (Page* each : {&page, &other}) {
    each->outside.has_aliases = true;
    add_foreign(*each);
    share_with_others(*each);
  }
}

// Whether contents are compared here: what is never recomputed needs no evidence, and the bytes of
// an accelerator cannot be looked at without waiting for it.
bool Session::watches() const {
  return options_.drop && options_.device.is_cpu() && options_.verify != Verify::Off;
}

// Whether somebody can look at the page's content: not on an accelerator, and not at too much.
bool Session::can_watch(const Page& page) const {
  return options_.device.is_cpu() && page.bytes <= most_watched_bytes &&
         !page.outside.dear_to_watch;
}

void Session::watch(Value& value, const void* data, int64_t bytes) const {
  if (watches() && data != nullptr && bytes <= most_watched_bytes) {
    value.hash = hash_of(data, bytes);
    value.watched = true;
  }
}

// From here on the content of the page is looked at whenever an op reads it. What dropped pages
// need of it is to be copied now. Where nobody can look it is unknown; who found that it is shared
// takes what is to be copied before the lock is let go.
void Session::share_with_others(Page& page, int64_t loan, ToClone* to_clone) {
  ++page.epoch;  // copies that were made so far are no longer good
  if (options_.device.is_cpu() && !watches()) {
    return;
  }
  set_unguarded(page, loan);
  if (to_clone != nullptr) {
    const auto keep = [&](Page& each) {
      if (needs_clone(each)) {
        to_clone->push_back(each.current);
      }
    };
    keep(page);
    for_each_alias(page, keep);
  }
  if (!can_watch(page)) {
    if (to_clone != nullptr) {
      forget_content(page);
    } else {
      forget_shared(page);
    }
  } else if (!page.current->watched && !page.outside.unread &&
             page.residency() == Residency::Resident && !nothing_is_saved_at_rest()) {
    watch(*page.current, page.data, page.bytes);
  }
}

void Session::take_newly_shared(ToClone& to_clone) {
  to_clone.insert(to_clone.end(), newly_shared_.begin(), newly_shared_.end());
  newly_shared_.clear();
}

// What a step finds when it begins is taken as it is.
bool Session::nothing_is_saved_at_rest() const { return resting_ && managed_.empty(); }

// From here on the page holds something that no recorded op made.
void Session::forget_content(Page& page) {
  page.set_current(make_source(page.bytes));
  if (page.tickets > 0) {
    emit(EventKind::Inadmissible, &page, page.bytes, 0);
  }
}

// The same, where somebody else can write to it: what dropped pages need of it is copied before.
void Session::forget_shared(Page& page) {
  if (needs_clone(page)) {
    newly_shared_.push_back(page.current);
  }
  forget_content(page);
}

// Others over the same memory are about to be written to through this page.
void Session::before_write_of_others(Page& page, ToClone& to_clone) {
  for_each_alias(page, [&](Page& other) {
    if (needs_clone(other)) {
      to_clone.push_back(other.current);
    }
    forget_content(other);
  });
}

// They were written to through this page, and what lay there is gone.
void Session::spoil_others(Page& page) {
  for_each_alias(page, [&](Page& other) {
    spoil_anchor(other);
    forget_content(other);
  });
}

// Calls `act` with each page of `foreign_` over the memory of this one. Few are looked through;
// many are found among all pages, which are in order then.
template <class Act>
void Session::for_each_foreign_over(Page& page, const Act& act) {
  if (foreign_.size() > kFewForeign) {
    page_index_.for_each_over(pages_, page.data, page.bytes, [&](Page& other) {
      if (other.outside.listed) {
        act(other);
      }
    });
    return;
  }
  for (size_t i = 0, n = foreign_.size(); i < n; ++i) {  // `act` may add to them
    if (foreign_[i]->lies_over(page.data, page.bytes)) {
      act(*foreign_[i]);
    }
  }
}

// Calls `act` with each other page over the same memory.
template <class Act>
void Session::for_each_alias(Page& page, const Act& act) {
  if (!page.outside.has_aliases) {
    return;
  }
  for_each_foreign_over(page, [&](Page& other) {
    if (&other != &page) {
      act(other);
    }
  });
}

// Whether the bytes are those that the value was watched with; they are if it is not watched.
bool Session::holds(const Value& value, const c10::StorageImpl& storage) const {
  return !value.watched ||
         hash_of(storage.data(),
                 std::min<int64_t>(value.bytes, static_cast<int64_t>(storage.nbytes()))) ==
             value.hash;
}

// All of the page was looked at for an op that reads this tensor. Where ops read small parts of it
// again and again, as rows of a data set, that gets too dear.
void Session::note_look(Page& page, const at::Tensor& t) {
  if (!page.outside.unguarded || page.bytes <= kCheapToWatchBytes) {
    return;
  }
  const int64_t worth = kMostTimesRead * static_cast<int64_t>(t.numel() * t.element_size());
  page.outside.looked_in_vain_bytes =
      std::max<int64_t>(0, page.outside.looked_in_vain_bytes + page.bytes - worth);
  page.outside.dear_to_watch |= page.outside.looked_in_vain_bytes > kMostLooksInVain * page.bytes;
}

// An op is about to read the page: is what lies there what we think? On an accelerator nobody can
// look.
void Session::check_content(Page& page, const at::Tensor& t) {
  if (!options_.device.is_cpu()) {
    return;
  }
  auto* storage = storage_of(t);
  if (!page.current->watched) {
    if (page.outside.unguarded && watches()) {
      // It was handed out while nobody looked. What is copied lazily moves before it is written to.
      if (page.current->producer && page.data != nullptr) {
        forget_shared(page);
      }
      if (can_watch(page)) {
        watch(*page.current, storage->data(), page.bytes);
      }
    }
    return;
  }
  if (holds(*page.current, *storage)) {
    note_look(page, t);
    if (page.outside.dear_to_watch) {
      forget_shared(page);
    }
    return;
  }
  set_unguarded(page);  // who wrote once may write again
  spoil(page, t);
  watch(*page.current, storage->data(), page.bytes);
}

// Whether the storage's bytes lie elsewhere than they did, or are more or fewer.
bool Session::was_moved(const Page& page, const c10::StorageImpl& storage) const {
  const bool unknown = page.data == nullptr && page.bytes > 0;  // see look_at
  if (unknown ||
      (storage.data() == page.data && static_cast<int64_t>(storage.nbytes()) == page.bytes)) {
    return false;
  }
  return sabotage() != Sabotage::ResizesUnseen;
}

void Session::look(Page& page, const c10::StorageImpl& storage) {
  page.look_at(storage);
  page_index_.note(page);
}

// Of a page that may be managed.
void Session::look_again(Page& page, const c10::StorageImpl& storage) {
  const int64_t before = page.bytes;
  look(page, storage);
  if (page.candidate >= 0) {
    managed_resident_bytes_ += page.bytes - before;
  }
}

// Code that the dispatcher does not see gave the storage other memory: it is another storage.
void Session::move_page(Page& page, const c10::Storage& storage) {
  look_again(page, *storage.unsafeGetStorageImpl());
  page.doubts.resized = true;
  spoil_anchor(page);
  page.versions.clear();
  forget_content(page);
  if (!page.outside.unread) {
    note_first_use(page, storage);
  }
  find_owners(page, storage.data_ptr());
}

// Python code is about to get hold of a storage's memory, or to write to it past the dispatcher.
// `loan` names the array that it gets; kForGood: what it gets is not an array, and may be kept.
void Session::before_raw_access(const c10::Storage& storage, bool writes, int64_t loan) {
  if (storage.device() != options_.device || sabotage() == Sabotage::RawWritesUnseen) {
    return;
  }
  ToClone to_clone;
  {
    Guard guard(*this);
    if (writes && nothing_is_saved_at_rest()) {
      return;
    }
    sweep_if_due();  // where ops of a step do not
    Page& page = page_for(storage);
    if (writes) {
      before_write_unseen(page, to_clone);
    } else {
      share_with_others(page, loan, &to_clone);
    }
    take_newly_shared(to_clone);
  }
  if (!to_clone.empty()) {
    clone_sources(to_clone);
  }
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

// Something wrote to the page that we did not see. Recipes that start from its former content are
// lost: rebuilding them raises, and what is still there is not dropped any more.
void Session::spoil(Page& page, const at::Tensor& t) {
  spoil_anchor(page);
  forget_content(page);
  if (version_of(t) >= 0) {
    page.take_version(t.unsafeGetTensorImpl()->version_counter());
  }
}

void Session::spoil_anchor(Page& page) {
  if (page.current->anchor &&
      page.current->anchor.unsafeGetStorageImpl() == page.weak._unsafe_get_target()) {
    page.current->spoiled = true;
    ++anchor_epoch_;
  }
}

void Session::mark_written(const at::Tensor& t) {
  Guard guard(*this);
  if (Page* page = page_to_write(t)) {
    spoil(*page, t);
    spoil_others(*page);
  }
  for (const auto& value : newly_shared_) {
    value->spoiled = true;
    ++anchor_epoch_;
  }
  newly_shared_.clear();
}

// Something that we shall not see is about to write to this tensor.
void Session::prepare_write(const at::Tensor& t) {
  ToClone to_clone;
  {
    Guard guard(*this);
    if (Page* page = page_to_write(t)) {
      before_write(*page, t, to_clone);
    }
    take_newly_shared(to_clone);
  }
  clone_sources(to_clone);
}

// Something that is not taped is about to write to the page.
void Session::before_write(Page& page, const at::Tensor& t, ToClone& to_clone) {
  if (version_of(t) >= 0 && page.versions.moved(t.unsafeGetTensorImpl()->version_counter())) {
    spoil(page, t);
    before_write_of_others(page, to_clone);
    return;
  }
  before_write_unseen(page, to_clone);
}

void Session::before_write_unseen(Page& page, ToClone& to_clone) {
  if (needs_clone(page)) {
    to_clone.push_back(page.current);
  }
  page.versions
      .clear();  // whose counter will count this write is not known: `.data` has one of its own
  forget_content(page);
  before_write_of_others(page, to_clone);
}

// A source that some dropped page needs gets a copy of its own before it is overwritten. Where
// there is no room for that, what needs it raises when it is rebuilt.
void Session::clone_sources(const ToClone& sources) {
  for (const auto& value : sources) {
    c10::Storage copy;
    if (sabotage() != Sabotage::NoCloneOnWrite) {
      try {
        const c10::Storage old = storage_to_copy(*value);
        auto* allocator = c10::GetAllocator(old.device_type());
        c10::DataPtr data = allocator->allocate(old.nbytes());
        allocator->copy_data(data.get(), old.data(), old.nbytes());
        copy = c10::Storage(c10::Storage::use_byte_size_t(), old.nbytes(), std::move(data),
                            allocator, true);
      } catch (const std::exception&) {
        Guard guard(*this);
        value->spoiled |= static_cast<bool>(value->anchor);
        ++anchor_epoch_;
        continue;
      }
    }
    Guard guard(*this);
    if (copy) {
      thread_trash().take(std::move(value->anchor));
      value->set_anchor(std::move(copy));
    }
    value->versions.clear();
    ++counters_.clones_on_write;
    cloned_bytes_ += value->bytes;
  }
}

// Where a source lies, whether or not anything needs it yet.
c10::Storage Session::storage_to_copy(const Value& value) {
  Guard guard(*this);  // another thread may be about to copy it too
  if (value.anchor) {
    return value.anchor;
  }
  has_anchors_ = true;
  TORCH_CHECK(value.home != nullptr, "delta_runtime: the source is gone");
  auto alive = lock(value.home->weak);
  TORCH_CHECK(alive, "delta_runtime: the source's memory is gone");
  return c10::Storage(std::move(alive));
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
  return v.home != nullptr && v.home->residency() == Residency::Resident &&
         (v.home->strong || !v.home->weak.expired());
}

c10::Storage Session::storage_there(const Value& v) const {
  if (!storage_alive(v) || !content_unchanged(*v.home) || !v.readable()) {
    return {};
  }
  c10::Storage storage = v.home->strong;
  if (!storage) {
    auto alive = lock(v.home->weak);
    storage = alive ? c10::Storage(std::move(alive)) : c10::Storage();
  }
  if (storage && (was_moved(*v.home, *storage.unsafeGetStorageImpl()) ||
                  !holds(v, *storage.unsafeGetStorageImpl()))) {
    thread_trash().take(std::move(storage));
    return {};
  }
  order_after_arrival(*v.home, storage);
  return storage;
}

bool Session::content_unchanged(const Page& page) const {
  return page.versions.unchanged() || sabotage() == Sabotage::AliasVersionsUnseen;
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

void Session::sweep_if_due() {
  if (pages_.size() >= sweep_at_) {
    sweep();
    sweep_at_ = std::max<size_t>(512, 2 * pages_.size());
  }
}

void Session::sweep() {
  page_index_.clear();
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
  }
  const auto is_over = [](const auto& page) { return page->tickets == 0 && page->weak.expired(); };
  const auto rest = std::remove_if(foreign_.begin(), foreign_.end(), is_over);
  if (rest != foreign_.end()) {
    foreign_.erase(rest, foreign_.end());
    foreign_ranges_.clear();
    for (const auto& page : foreign_) {
      add_foreign(*page);
    }
  }
  // Only now: the pages that went may have been the last to reach these.
  if (!has_anchors_) {
    return;
  }
  has_anchors_ = false;
  for (auto& [storage, page] : pages_) {
    if (!page->current->anchor) {
      continue;
    }
    if (page->current.use_count() == 1) {
      thread_trash().take(std::move(page->current->anchor));
      page->current->anchor = c10::Storage();
    } else {
      has_anchors_ = true;
    }
  }
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

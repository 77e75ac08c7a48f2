#include "state/session.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "observe/observer.h"
#include "observe/op_rescue.h"
#include "pool/cpu_pool.h"
#include "pool/limited_allocator.h"
#include "rebuild/quiet.h"
#include "rebuild/replay_thread.h"
#include "rebuild/shortcuts.h"
#include "rebuild/vector_math.h"
#include "state/entered.h"
#include "state/fork_guard.h"
#include "util/gil.h"

namespace delta {
namespace {

// The pool asks for bytes that an allocation is short of.
int64_t rescue(int64_t bytes) {
  if (thread_trash().locked) {
    return 0;
  }
  const InsideAllocation inside;
  auto session = entered_session();
  return session ? session->eviction.make_room(bytes, /*inside_allocation=*/true) : 0;
}

// An accelerator's allocator asks for an allocation that would pass the limit, or for which the
// device has no more. What making room itself allocates gets none.
Room make_room_on_device(int64_t bytes, int attempt) {
  if (rescue_guards().fails_at_limit > 0) {
    return Room::Refused;
  }
  if (rescue_guards().without_rescue > 0 || thread_trash().locked) {
    return Room::NoneLeft;
  }
  const InsideAllocation inside;
  const WithoutRescue making;
  try {
    const auto session = entered_session();
    if (!session || bytes > session->state.options.budget_bytes) {
      return Room::NoneLeft;  // such as a probe for memory: nothing leaves for what cannot fit
    }
    // The device is waited for each time, and what is freed does not lie in one piece: rather more.
    const int64_t need_bytes = 3 * bytes + session->state.options.budget_bytes / 16;
    return session->eviction.rescue(need_bytes, attempt, /*inside_allocation=*/true)
               ? Room::Made
               : Room::NoneLeft;
  } catch (const std::exception&) {  // where that fails the allocation itself says what is wrong
    return Room::NoneLeft;
  }
}

void give_cache_back(c10::Device device) {
  try {
    c10::getDeviceAllocator(device.type())->emptyCache();
  } catch (const c10::Error&) {  // while a graph is captured
  }
}

void forget_thread(ThreadState& ts, Session* session) {
  ts.session = session;
  ts.depth = 0;
  ts.open.clear();
}

// Whether ops may run out of an accelerator's memory, as far as it can be seen before they do:
// until some steps went as they were known to go, with room to spare.
bool may_run_short(const Session& session) {
  constexpr int64_t kQuietSteps = 8;
  const Progress& now = session.state.now;
  return now.was_tight || now.step - session.surprised_step < kQuietSteps;
}

SessionOptions with_vector_math_settled(SessionOptions options) {
  settle_vector_math();
  return options;
}

}  // namespace

Session::Session(SessionOptions options)
    : state(with_vector_math_settled(std::move(options))),
      allocator_(state.options.reserved_bytes > 0 ? limited_allocator(device()) : nullptr),
      process_(getpid()) {
  take_at_forks(state.lock);
  if (allocator_ != nullptr) {
    allocator_->forget_past();
  }
  if (!device().is_cpu()) {
    sources.set_make_room(
        [this](int64_t bytes, int attempt) { return eviction.rescue(bytes, attempt); });
  }
}

Session::~Session() { take_no_more(state.lock); }

bool Session::begin_idle(int64_t most_bytes) {
  TORCH_CHECK(!state.entered, "this runtime is entered already");
  {
    Guard guard(state.lock);
    if (!state.pages.managed().empty()) {
      return false;
    }
  }
  watch(c10::intrusive_ptr<Session>::reclaim_copy(this), &observer_callback);
  idle.begin(*this, most_bytes);
  return true;
}

void Session::enter() {
  TORCH_CHECK(!state.entered, "this runtime is entered already");
  const auto self = c10::intrusive_ptr<Session>::reclaim_copy(this);
  TORCH_CHECK(set_entered(self), "another runtime is entered already");
  state.entered = true;
  state.resting = false;
  forget_thread(thread_state(), this);
  watch(self, &observer_callback);
  if (device().is_cpu()) {
    cpu_pool::set_rescue(&rescue);
    cpu_pool::reset_passed();
  } else {
    rescue_ops(may_run_short(*this));
  }
  set_budget(state.options.budget_bytes);
}

void Session::set_budget(int64_t bytes) {
  state.account.set_budget(bytes);
  if (state.entered) {
    keep_reserved_to(std::max(bytes, state.options.reserved_bytes));
  }
}

void Session::keep_reserved_to(int64_t bytes) {
  // In a forked child the device is nobody's, and whoever held the allocator's lock is not there.
  if (allocator_ != nullptr && getpid() == process_) {
    allocator_->keep_to(bytes, &make_room_on_device);
  }
}

void Session::count_excesses() {
  if (allocator_ != nullptr) {
    state.counters.over_limit += allocator_->take_excesses();
  }
}

void Session::leave() {
  if (!state.entered) {
    return;
  }
  state.entered = false;
  auto& ts = thread_state();
  if (ts.session == this) {  // else the thread that entered it is gone
    forget_thread(ts, nullptr);
    rescue_ops(false);
  }
  if (device().is_cpu()) {
    cpu_pool::set_rescue(nullptr);
    cpu_pool::set_soft_limit(0);
  } else {
    keep_reserved_to(0);
  }
  if (!tiers.none()) {
    Guard guard(state.lock);
    tiers.reap();
  }
  end_watch_if_over();
  clear_entered();
}

void Session::end_watch_if_over() {
  {
    Guard guard(state.lock);
    if (!state.pages.managed().empty()) {
      return;
    }
  }
  if (!state.entered && !idle.first_ops.comparing()) {
    end_watch(*this);
  }
}

void Session::rest() { state.resting = true; }

void Session::begin_step() {
  state.pages.forget_past();
  on_device.begin_step();
  if (allocator_ != nullptr && allocator_->begin_step()) {
    give_cache_back(device());
  }
  Guard guard(state.lock);
  outside.end_loans();
  const bool was_tight = state.now.was_tight;
  state.now.begin_step(state.counters.packs, state.counters.unpacks);
  if (!device().is_cpu()) {
    const int64_t before =
        std::exchange(surprises, state.counters.rescues + state.counters.plan_misses +
                                     device_bytes(device()).retries);
    if (was_tight || surprises != before || surprised_step == 0) {
      surprised_step = state.now.step;
    }
    rescue_ops(may_run_short(*this));
  }
  state.account.begin_step();
  state.profile.begin_step();
  state.counters.stuck_bytes = 0;
  state.counters.stuck_op = "";
  plan_actions.forget();
  plans.begin_step();
  ops.begin_step();
  log.begin_step();
  tiers.begin_step();
  idle.first_ops.begin_learning();
}

void Session::end_step() {
  state.pages.forget_past();
  Guard guard(state.lock);
  tiers.end_step();
  plan_actions.forget();
  state.profile.end_step();
  count_excesses();
  state.events.emit(EventKind::Step, nullptr, 0, 0);
}

Levels Session::levels() const {
  const auto count = [](const auto& all) { return static_cast<int64_t>(all.size()); };
  Levels now = state.levels;
  now.pages = count(state.pages);
  now.managed_pages = count(state.pages.managed());
  now.managed_resident_bytes = state.pages.managed_resident_bytes();
  now.uncounted_bytes = state.account.uncounted_bytes();
  now.step_peak_bytes = state.account.step_peak_bytes();
  return now;
}

void forget_locks() {
  forget_entered_locks();
  forget_idle_step();
  forget_replay_lock();
  forget_op_table_lock();
  forget_shortcuts_lock();
}

}  // namespace delta

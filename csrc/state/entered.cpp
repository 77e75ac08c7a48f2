#include "state/entered.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <new>

#include "state/session.h"

namespace delta {
namespace {

std::mutex g_entered_mutex;
c10::intrusive_ptr<Session> g_entered;

struct Watch {
  std::mutex mutex;
  std::vector<c10::intrusive_ptr<Session>> sessions;
  std::atomic<size_t> n_sessions{0};
  at::CallbackHandle handle = 0;
  // PyTorch's list of callbacks has a lock, which every node of a backward takes. In a forked child
  // it may be held by a thread that does not exist there: the callback stays, and finds no session.
  bool in_forked_child = false;
};
Watch& the_watch() {
  static auto* watch = new Watch();  // outlives all that saved tensors
  return *watch;
}

}  // namespace

c10::intrusive_ptr<Session> entered_session() {
  std::lock_guard<std::mutex> guard(g_entered_mutex);
  return g_entered;
}

bool set_entered(c10::intrusive_ptr<Session> session) {
  std::lock_guard<std::mutex> guard(g_entered_mutex);
  if (g_entered) {
    return false;
  }
  g_entered = std::move(session);
  return true;
}

void clear_entered() {
  c10::intrusive_ptr<Session> last;
  std::lock_guard<std::mutex> guard(g_entered_mutex);
  last = std::move(g_entered);
}

std::vector<c10::intrusive_ptr<Session>> watching_sessions() {
  auto& watch = the_watch();
  std::lock_guard<std::mutex> guard(watch.mutex);
  return watch.sessions;
}

bool several_watch() { return the_watch().n_sessions.load(std::memory_order_relaxed) > 1; }

void watch(c10::intrusive_ptr<Session> session, at::RecordFunctionCallback (*callback)()) {
  auto& watch = the_watch();
  std::lock_guard<std::mutex> guard(watch.mutex);
  if (std::find(watch.sessions.begin(), watch.sessions.end(), session) == watch.sessions.end()) {
    watch.sessions.push_back(std::move(session));
    watch.n_sessions = watch.sessions.size();
  }
  if (watch.handle == 0) {
    watch.handle = at::addGlobalCallback(callback());
  }
}

void end_watch(const Session& session) {
  auto& watch = the_watch();
  c10::intrusive_ptr<Session> last;
  std::lock_guard<std::mutex> guard(watch.mutex);
  const auto is_it = [&](const auto& each) { return each.get() == &session; };
  const auto place = std::find_if(watch.sessions.begin(), watch.sessions.end(), is_it);
  if (place == watch.sessions.end()) {
    return;
  }
  last = std::move(*place);
  watch.sessions.erase(place);
  watch.n_sessions = watch.sessions.size();
  if (watch.sessions.empty() && !watch.in_forked_child) {
    at::removeCallback(watch.handle);
    watch.handle = 0;
  }
}

void forget_entered_locks() {
  auto& watch = the_watch();
  new (&watch.mutex) std::mutex();
  new (&g_entered_mutex) std::mutex();
  watch.in_forked_child = true;
}

bool try_lock_entered() {
  if (!the_watch().mutex.try_lock()) {
    return false;
  }
  if (!g_entered_mutex.try_lock()) {
    the_watch().mutex.unlock();
    return false;
  }
  return true;
}

void unlock_entered() {
  g_entered_mutex.unlock();
  the_watch().mutex.unlock();
}

}  // namespace delta

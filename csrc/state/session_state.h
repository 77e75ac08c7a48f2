// What all parts of a session share, and their common base.
#pragma once

#include <atomic>
#include <utility>

#include "state/account.h"
#include "state/counters.h"
#include "state/event_log.h"
#include "state/memory_profile.h"
#include "state/options.h"
#include "state/page_table.h"
#include "state/progress.h"
#include "state/session_lock.h"

namespace delta {

struct SessionState {
  explicit SessionState(SessionOptions o) : options(std::move(o)) {}

  SessionOptions options;
  SessionLock lock;
  std::atomic<bool> entered = false;
  std::atomic<bool> resting = false;  // nobody is in the runtime: not even under delta.disable()
  Progress now;
  Counters counters;
  Levels levels;  // as far as they are kept up to date; see Session::levels
  EventLog events{now};
  MemoryProfile profile;
  Account account{options, now, entered};
  PageTable pages{options, lock, now, account};
};

// A part of a session. It refers to the shared state and to the parts below it, never to one above.
class Part {
 public:
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

 protected:
  explicit Part(SessionState& state)
      : options_(state.options),
        lock_(state.lock),
        entered_(state.entered),
        resting_(state.resting),
        now_(state.now),
        counters_(state.counters),
        levels_(state.levels),
        events_(state.events),
        profile_(state.profile),
        account_(state.account),
        pages_(state.pages) {}
  ~Part() = default;

  SessionOptions& options_;
  SessionLock& lock_;
  std::atomic<bool>& entered_;
  std::atomic<bool>& resting_;
  Progress& now_;
  Counters& counters_;
  Levels& levels_;
  EventLog& events_;
  MemoryProfile& profile_;
  Account& account_;
  PageTable& pages_;
};

}  // namespace delta

// A process forks only where no session is in the middle of a change.
//
// Note: forks and locks
//  A forked child has the thread that forked and no other. A lock that another thread held stays
//  held there, over tables that nobody will finish. So the thread that forks takes the locks of all
//  sessions, and of who watches (entered.h), before; parent and child let them go. It lets the GIL
//  go while it waits, and waits for a second at most: whoever holds one that long may be waiting
//  for what the fork holds. The child then gets such a lock as if it were new.
#pragma once

#include "state/session_lock.h"

namespace delta {

// The lock of a session, from when the session is made until it ends.
void take_at_forks(SessionLock& lock);
void take_no_more(SessionLock& lock);

}  // namespace delta

// The session that is entered in this process, and all that watch what its threads do.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

namespace delta {

struct Session;

// The session that is entered, on whatever thread; null if none is. One at a time in a process:
// backward may run on a thread of the autograd engine, which has no thread-local session.
c10::intrusive_ptr<Session> entered_session();
bool set_entered(c10::intrusive_ptr<Session> session);  // false: another one is entered
void clear_entered();

// Sessions that are entered, or have tensors saved whose sources anybody may write to. There is one
// callback for all of them.
std::vector<c10::intrusive_ptr<Session>> watching_sessions();
bool several_watch();
void watch(c10::intrusive_ptr<Session> session, at::RecordFunctionCallback (*callback)());
void end_watch(const Session& session);

// Around a fork (fork_guard.h).
bool try_lock_entered();
void unlock_entered();
void forget_entered_locks();  // in a forked child: whoever held them does not exist there

}  // namespace delta

// The RecordFunction callbacks: what sees each op of a thread.
#pragma once

#include <ATen/record_function.h>

#include "session.h"

namespace delta {

// Announces each op of this thread to the session that is entered, if it is one that we observe.
at::RecordFunctionCallback observer_callback();

// Announces the writes and draws of all threads, and of code under delta.disable(), to the sessions
// that still have saved tensors to bring back.
at::RecordFunctionCallback watcher_callback();

// The session that is entered in this process, on whatever thread; null if none is.
c10::intrusive_ptr<Session> entered_session();

// An observer of the same kind that does nothing: what boxing and callbacks cost at the least.
void enter_bare_observer();
void leave_bare_observer();

// Calls f(tensor, index in a list or -1) for each tensor of an argument or result.
template <class F>
void for_each_tensor(const c10::IValue& x, const F& f) {
  if (x.isTensor()) {
    f(x.toTensor(), -1);
  } else if (x.isList()) {
    const auto elements = x.toListRef();
    for (size_t i = 0; i < elements.size(); ++i) {
      if (elements[i].isTensor()) {
        f(elements[i].toTensor(), static_cast<int>(i));
      }
    }
  }
}

}  // namespace delta

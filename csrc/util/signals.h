// Python's signals, and what their handlers raise.
//
// Note: an interrupt always arrives
//  1. Python runs signal handlers on the main thread, between any two bytecodes: of our own Python
//     code too. While a Shield lives there, signals that have a handler in Python are held back,
//     and given to Python when it ends: the handler then runs in the program's code, as if the
//     signal had come a moment later.
//  2. What is raised in our code all the same (by a handler of a signal that came just before, or
//     because another thread asked for it), and cannot go through our caller (a callback of an op),
//     is kept, and raised by a pending call as soon as Python code of the program runs again.
//  3. What takes long ends early: planning asks whether a SIGINT or a SIGTERM waits and gives up,
//     rebuilding and waiting for a lane on behalf of an unpack let handlers run now and then.
//     Handlers never run in the midst of planning: numpy, for one, swallows what is raised while it
//     looks up attributes.
//  4. An error of ours may meet a signal that came while autograd ran: see prefer_signals().
#pragma once

#include <Python.h>

namespace delta {

// Holds signals back, on the main thread; does nothing on others. May be nested, and made with or
// without the GIL.
class Shield {
 public:
  Shield();
  ~Shield();
  Shield(const Shield&) = delete;
  Shield& operator=(const Shield&) = delete;

 private:
  bool held_;
};

// Takes the error that is set, and raises it in this thread as soon as no Shield lives. With the
// GIL.
void raise_later();

// Raises what a signal handler raises now, as a C++ exception, if the last look was some time ago.
// Without the GIL; does nothing under a Shield and off the main thread.
void let_signals_in();

// An error of ours is set and about to go through autograd, which asks for its text and swallows
// what a signal handler raises meanwhile. So handlers of signals that have come run now, and what
// they raise takes the error's place; those of signals that come from now on wait until Python runs
// again. With the GIL.
void prefer_signals();

// Adds Shielded and what belongs to it to the module. Sets a Python error and returns false if it
// cannot.
bool bind_signals(PyObject* module);

}  // namespace delta

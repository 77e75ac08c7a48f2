"""Plans that are made beside training, on a thread that ends with the plan.

Note: planning beside training
  1. The thread is given all that it plans for, none of which changes any more, and hands a plan back. It touches
     nothing of the runtime; whoever takes the plan does so between two steps, on the thread that trains.
  2. It is asked to stop by `give_way` alone, which planners call every few milliseconds. Signals do not stop it:
     nobody waits for it.
  3. It lets others have Python's lock twice a millisecond, for as long as it takes one of them to wake up. What runs
     long in C++ runs without that lock.
  4. It is asked to stop, and waited for, when the runtime is closed and when the interpreter ends: a thread that
     is in C++ by then would bring the process down.
  5. In a forked child it does not exist: what it was making is not made there, and planned for anew.
  6. A runtime that nobody holds any more goes anywhere in the program, and what Python runs then swallows what a
     signal handler raises. So the thread looks whether its owner is there still, and nobody's end runs Python: no
     __del__, no callback of a weak reference (a `Thread` has one, so that it goes on its own thread).

Covers one runtime's thread. Does not cover what is planned, or when (plan_cache).
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from delta_runtime.core.interrupts import Interrupted, asking, give_way
from delta_runtime.core.plan import Plan

PLANNING_THREAD = "delta_runtime plans"
"""The name of the thread that plans."""
_TURN_S = 5e-4
_PAUSE_S = 5e-5
_LOOK_S = 0.05  # between two looks whether a signal came, for who waits

MakePlan = Callable[[], Plan]


@dataclass(frozen=True, slots=True)
class Made:
    """What came of it.

    Args:
        plan: None where it was not made: there was an error, or the thread is of another process.
        error: that ended it.
        seconds: of a core that it took.
    """

    plan: Plan | None = None
    error: Exception | None = None
    seconds: float = 0.0


class _Making:
    """One plan that is being made."""

    def __init__(self, make: MakePlan, owner: PlansBeside) -> None:
        self.made = Made()
        self._owner = weakref.ref(owner)
        self._make = make
        self._stops = False
        self._began_s = time.perf_counter()
        self._over = threading.Event()
        self._process = os.getpid()
        thread = threading.Thread(target=self._run, name=PLANNING_THREAD, daemon=True)
        self._thread: threading.Thread | None = thread
        _all.add(self)
        thread.start()

    def _run(self) -> None:
        plan, error = None, None
        try:
            with asking(self._is_to_stop):
                plan = self._make()
        except Interrupted:
            pass
        except Exception as raised:
            error = raised
        finally:
            self.made = Made(plan, error, time.thread_time())
            self._over.set()
            self._thread = None  # rule 6
            _all.discard(self)

    def _is_to_stop(self) -> bool:
        if time.perf_counter() - self._began_s > _TURN_S:
            time.sleep(_PAUSE_S)
            self._began_s = time.perf_counter()
        return self._stops or self._owner() is None

    def ask_to_stop(self) -> None:
        self._stops = True

    @property
    def is_over(self) -> bool:
        return os.getpid() != self._process or self._over.is_set()

    def wait(self, timeout_s: float) -> None:
        """Wait until it is over; may be interrupted, which `Thread.join` takes for its end."""
        if not self.is_over:
            self._over.wait(timeout_s)

    def join(self) -> None:
        """Wait for the end of the thread, if it is of this process."""
        thread = self._thread
        if thread is not None and os.getpid() == self._process:
            thread.join()


_all: set[_Making] = set()


@atexit.register
def _stop_all() -> None:
    for each in list(_all):
        each.ask_to_stop()
    for each in list(_all):
        each.join()


class PlansBeside:
    """Makes plans beside training, one at a time."""

    def __init__(self) -> None:
        self._making: _Making | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no plan is being made, and none waits to be taken."""
        return self._making is None

    def begin(self, make: MakePlan) -> None:
        """Begin to make a plan.

        Args:
            make: makes it; must not touch what another thread may change.
        """
        assert self._making is None, "one at a time"
        self._making = _Making(make, self)

    def take(self) -> Made | None:
        """Return what came of it; None as long as it goes on, or if nothing was begun."""
        making = self._making
        if making is None or not making.is_over:
            return None
        self._making = None
        making.join()
        return making.made

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until there is something to take, if anything was begun.

        Args:
            timeout_s: seconds after which to give up waiting.

        Returns:
            Whether nothing is being made any more.

        Raises:
            Interrupted: the program was asked to stop while signals are held back.
        """
        ends_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        making = self._making
        while making is not None and not making.is_over:
            left_s = ends_s - time.monotonic()
            if left_s <= 0:
                return False
            making.wait(min(left_s, _LOOK_S))
            give_way()
        return True

    def stop(self) -> None:
        """Stop what is being made, and forget it; waits for its thread. Idempotent."""
        making, self._making = self._making, None
        if making is not None:
            making.ask_to_stop()
            making.join()

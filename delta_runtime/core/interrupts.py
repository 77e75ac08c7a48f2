"""Long computations ask here, now and then, whether they are still to be finished.

Signals are held back while the runtime's own code runs (csrc/util/signals.h), so that nothing stops half-way.
What takes long and leaves nothing half-done behind gives up instead, when somebody presses Ctrl-C.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Interrupted(BaseException):
    """Somebody wants the program to stop: what was being computed is not wanted any more."""


_asked_to_stop: Callable[[], bool] | None = None
_of_thread = threading.local()


def ask_with(asked_to_stop: Callable[[], bool]) -> None:
    """Say how `give_way` finds out; without that it never gives up."""
    global _asked_to_stop
    _asked_to_stop = asked_to_stop


@contextlib.contextmanager
def asking(asked_to_stop: Callable[[], bool]) -> Iterator[None]:
    """Have `give_way` find out in another way on this thread, which signals do not concern."""
    _of_thread.asked_to_stop = asked_to_stop
    try:
        yield
    finally:
        del _of_thread.asked_to_stop


def unhurried(items: Iterable[Item]) -> Iterator[Item]:
    """Yield items, and give way in front of each."""
    for item in items:
        give_way()
        yield item


def give_way() -> None:
    """Raise `Interrupted` if the program, or this thread, was asked to stop; costs a tenth of a microsecond."""
    asked_to_stop = getattr(_of_thread, "asked_to_stop", _asked_to_stop)
    if asked_to_stop is not None and asked_to_stop():
        raise Interrupted

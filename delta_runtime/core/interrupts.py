"""Long computations ask here, now and then, whether they are still to be finished.

Signals are held back while the runtime's own code runs (csrc/util/signals.h), so that nothing stops half-way.
What takes long and leaves nothing half-done behind gives up instead, when somebody presses Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable


class Interrupted(BaseException):
    """Somebody wants the program to stop: what was being computed is not wanted any more."""


_asked_to_stop: Callable[[], bool] | None = None


def ask_with(asked_to_stop: Callable[[], bool]) -> None:
    """Say how `give_way` finds out; without that it never gives up."""
    global _asked_to_stop
    _asked_to_stop = asked_to_stop


def give_way() -> None:
    """Raise `Interrupted` if the program was asked to stop; costs a tenth of a microsecond."""
    if _asked_to_stop is not None and _asked_to_stop():
        raise Interrupted

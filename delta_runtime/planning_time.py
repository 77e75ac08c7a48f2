"""How long planning has taken, and how much longer it may take.

A plan has to pay for itself. The first plan of a step that comes again is always made; whatever else is
thought about has one second in all, and 5 % of the time trained so far. That holds for planning beside
training too (plans_beside), which takes from training what it takes. Where training leaves a core idle it
takes little, and has half of the time trained so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

ALLOWANCE_S = 1.0
"""Seconds of planning, beyond first plans, that nothing has to be trained for."""
MOST_SHARE = 0.05
"""Of the time trained so far."""
SHARE_OF_IDLE = 0.5
"""Of the time trained with a core idle: for plans that are made on it, beside training."""


class PlanningTime:
    """Counts the seconds of planning and of training.

    Args:
        clock: seconds; another one for tests.
        limited: whether there is a limit at all.
        core_idles: tells whether plans are made beside training, on a core that it leaves idle.

    Example:
        >>> planning = PlanningTime()
        >>> with planning.planning():
        ...     pass
        >>> planning.left_s < 1.0
        True
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        limited: bool = True,
        core_idles: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock = clock
        self._limited = limited
        self.core_idles = core_idles
        """Whether plans are made beside training, on a core that it leaves idle."""
        self._idle_s = 0.0  # of such a core that plans may take
        self._trained_s = 0.0
        self._ended_s = 0.0
        self._free_s = 0.0
        self.beside_s = 0.0
        """Seconds of a core that plans took which were made beside training."""
        self._limited_beside_s = 0.0  # of them, those that are not free
        self._begin_s: float | None = None

    @property
    def spent_s(self) -> float:
        """Seconds of planning between steps so far, first plans included."""
        running_s = 0.0 if self._begin_s is None else self._clock() - self._begin_s
        return self._ended_s + running_s

    @property
    def left_s(self) -> float:
        """Seconds that planning may take now beyond first plans; below 0 where it took too long."""
        if not self._limited:
            return float("inf")
        spent_s = self.spent_s - self._free_s + max(self._limited_beside_s - self._idle_s, 0.0)
        return ALLOWANCE_S + MOST_SHARE * self._trained_s - spent_s

    @property
    def left_beside_s(self) -> float:
        """The same for a plan that is made beside training."""
        return self.left_s + max(self._idle_s - self._limited_beside_s, 0.0)

    def trained(self, seconds: float) -> None:
        """Take in that a step has ended that took so long."""
        self._trained_s += seconds
        self._idle_s += (SHARE_OF_IDLE - MOST_SHARE) * seconds if self.core_idles() else 0.0

    def planned_beside(self, seconds: float, *, free: bool = False) -> None:
        """Take in that a plan took so long which was made beside training; `free` as for `planning`."""
        self.beside_s += seconds
        self._limited_beside_s += 0.0 if free else seconds

    @contextlib.contextmanager
    def planning(self, *, free: bool = False) -> Iterator[None]:
        """Count what is done inside, once where these are nested.

        Args:
            free: whether it may take what it takes, without being held against what comes later.
        """
        begin_s = self._clock()
        outermost = self._begin_s is None
        if outermost:
            self._begin_s = begin_s
        try:
            yield
        finally:
            took_s = self._clock() - begin_s
            if free:
                self._free_s += took_s
            if outermost:
                self._ended_s += took_s
                self._begin_s = None

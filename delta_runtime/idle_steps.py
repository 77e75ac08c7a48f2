"""Which steps are idle: known to fit the budget with room to spare, so that nothing needs to be observed in them.

Observing takes microseconds for each op, which a step of small ops feels, and whoever fits the budget anyway gets
nothing for them. So, once some steps in a row had nothing to do, the coming ones are run as without a runtime, but
for two things (csrc/observe/idle_step.h). Their first ops are compared with those of steps that fitted. And the live
bytes are compared with the highest peak of those steps. What is different wakes the runtime up. From time to time a
step is observed all the same.

Covers which of the coming steps may be idle, where their beginning and end are told (`runtime.step()`). Does not cover
what is done in one (runtime), nor steps that are left alone because the budget cannot be met (standing_aside).
"""

from __future__ import annotations

from delta_runtime.known_step import StepCost

QUIET_STEPS = 8
"""Observed steps in a row that had nothing to do, before the first idle one."""
IDLE_STEPS = 100
"""Idle ones in a row; then one is observed."""
_SEEN = 2  # times that steps of one kind had nothing to do, before one may be idle
_SPARE = 0.2
"""Of what a step adds, has to be free beside it: one that wakes up late cannot evict all."""
_MORE = 0.01  # of the highest growth; whose live bytes grow by more than that is another step
_TIMES_MORE = 8
"""Quiet steps are asked for, once a step that began as an idle one has passed the budget."""
_MOST_KINDS = 1 << 10  # of a program whose shapes never repeat


class IdleSteps:
    """Takes in what steps came to, one after the other, and says whether the next may be idle.

    Args:
        budget_bytes: that steps have to fit.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._limit_bytes = budget_bytes
        self._needed = QUIET_STEPS
        self.forget()

    def keep_to(self, limit_bytes: int) -> None:
        """Have steps fit that instead of the budget."""
        self._limit_bytes = limit_bytes

    def forget(self) -> None:
        """Have none idle until enough steps in a row were quiet again; the last one was not."""
        self._quiet = 0
        self._left = 0  # idle steps before one is observed again
        self._growth_bytes = 0  # of a step from its begin to its peak, the most of all quiet ones
        self._times: dict[int, int] = {}  # that steps with this fingerprint were quiet

    def may_begin(self, live_bytes: int) -> bool:
        """Return whether the next step may be idle, with so much live at its begin."""
        room_bytes = self._limit_bytes - live_bytes
        return self._left > 0 and self._growth_bytes * (1 + _SPARE) <= room_bytes

    def most_bytes(self, live_bytes: int) -> int:
        """Return the most that may be live in the next step before it is another than those before."""
        return live_bytes + int(self._growth_bytes * (1 + _MORE))

    def saw_quiet(self, cost: StepCost) -> bool:
        """Take in an observed step that fitted, and had nothing for the runtime to do or to learn.

        Returns:
            Whether steps that begin as it did may be idle.
        """
        self._quiet += 1
        self._growth_bytes = max(self._growth_bytes, cost.peak_bytes - cost.begin_bytes)
        if self._quiet >= self._needed:
            self._left = IDLE_STEPS
        if len(self._times) >= _MOST_KINDS:
            self._times.clear()
        times = self._times[cost.fingerprint] = self._times.get(cost.fingerprint, 0) + 1
        return times >= _SEEN

    def was_idle(self) -> None:
        """Take in that a step was idle to its end."""
        self._left -= 1

    def passed(self) -> None:
        """Take in that a step which began as an idle one has passed the budget: none is idle for long."""
        self._needed *= _TIMES_MORE
        self.forget()

"""Whether steps are better left alone: below the least budget, where observing alone costs half a step.

In a model of very small ops the observer takes as long as the ops do. Where the budget cannot be met anyway,
keeping to some peak below the ordinary one is not worth that price: the steps are run as without a runtime,
and one is observed from time to time.

Covers which of the coming steps are left alone. What is kept to in the others is `affordable_peak`'s concern.
"""

from __future__ import annotations

import statistics
from collections import deque

from delta_runtime.affordable_peak import OBSERVING_S
from delta_runtime.known_step import StepCost

MOST_TIMES = 1.5
"""Of an ordinary step: what one may take that keeps to a relief."""
_SUSPECT = 0.35
"""Share of an ordinary step that observing seems to add, before a step is left alone to see what it takes then."""
_ALIKE = 2  # steps in a row before that, and steps that are left alone then
_BETWEEN = 16  # steps that are left alone, then one is observed


class StandingAside:
    """Takes in what steps came to, one after the other, and says what to do with the next."""

    def __init__(self) -> None:
        self._observed: deque[StepCost] = deque(maxlen=_ALIKE)
        self._alone_s: deque[float] = deque(maxlen=5)
        self._left = 0  # steps to leave alone before one is observed again
        # Fingerprint and ops of a step that is not too dear.
        self._bearable: tuple[int, int] | None = None

    @property
    def leaves_next(self) -> bool:
        """Whether the next step is left alone."""
        return self._left > 0

    def saw(self, cost: StepCost, *, settled: bool) -> None:
        """Take in a step that was observed.

        Args:
            cost: what it came to.
            settled: whether the budget was given up, and what is kept to instead is found.
        """
        kind = (cost.fingerprint, cost.ops)
        if self._observed and kind != (self._observed[-1].fingerprint, self._observed[-1].ops):
            self._observed.clear()
            self._alone_s.clear()
        self._observed.append(cost)
        if not settled or not cost.whole or kind == self._bearable:
            return
        if len(self._observed) < _ALIKE or not self._is_suspect(cost):
            return
        if len(self._alone_s) < _ALIKE:
            self._left = _ALIKE
            return
        if self._is_too_dear():
            self._left = _BETWEEN
        else:
            self._bearable = kind

    def was_alone(self, seconds: float) -> None:
        """Take in a step that was left alone."""
        self._left -= 1
        self._alone_s.append(seconds)
        if self._left == 0 and len(self._alone_s) == _ALIKE:  # of those that try it
            if self._is_too_dear():
                self._left = _BETWEEN
            else:
                last = self._observed[-1]
                self._bearable = (last.fingerprint, last.ops)

    def _is_too_dear(self) -> bool:
        least_s = min(each.all_s for each in self._observed)
        return least_s > MOST_TIMES * statistics.median(self._alone_s)

    def _is_suspect(self, cost: StepCost) -> bool:
        observing_s = OBSERVING_S * cost.ops
        ordinary_s = max(cost.seconds - cost.rebuild_s - observing_s, cost.seconds / 4)
        return observing_s + cost.around_s > _SUSPECT * ordinary_s

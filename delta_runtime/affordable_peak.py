"""What is kept to where the budget cannot be met: the least peak at a bounded price.

Below the least budget everything is evicted all the time and made again all the time, and the budget is
passed all the same. There a higher peak is kept to instead: the least one at which recomputing adds no more
than about a third of an ordinary step: with what evicting costs that makes half of one.

Covers what is affordable, and the search for that peak over one recorded step. When it begins is
`budget_relief`'s concern.
"""

from __future__ import annotations

from collections.abc import Callable

from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.planning_time import PlanningTime

MOST_MORE = 0.33
"""Of the seconds of a step's ops: what recomputing may add to them, observing included."""
_LEAST_MORE = 0.1  # however dear observing is
OBSERVING_S = 1e-5
"""An op, with what it saves."""
_SURE_TRIES = 4  # of the first search
_FINE = 32  # the search ends where it knows the peak to such a part of what is evictable
MOST_WORK = 150_000
"""For each plan that is tried, in units of WORK_PER_SECOND: where that is not enough it is too tight anyway."""

MakePlan = Callable[[StepGraph, int], Plan]


def affordable_s(graph: StepGraph) -> float:
    """Return the seconds of recomputing in a step that its user can bear, by its record."""
    return _bearable_s(graph.seconds, graph.n_ops)


def bearable_s(observed_s: float, n_ops: int) -> float:
    """Return the seconds of recomputing that its user can bear, by the clock.

    Args:
        observed_s: seconds of a step without what it recomputed.
        n_ops: of that step.
    """
    # However many the ops are, observing them was seen to take less than the step itself.
    ordinary_s = max(observed_s - OBSERVING_S * n_ops, observed_s / 2)
    return _bearable_s(ordinary_s, n_ops)


def _bearable_s(ordinary_s: float, n_ops: int) -> float:
    return max(_LEAST_MORE * ordinary_s, MOST_MORE * ordinary_s - OBSERVING_S * n_ops)


class AffordablePeak:
    """The search for one graph: by halves, from above, as plans that fit are made quickly.

    Args:
        limit_bytes: what is kept to now; no peak below that is looked for.
        graph: the recorded step.
        make_plan: makes a plan of a graph for so many bytes.
        hopeless: whether it is known that nothing will do for `limit_bytes`.
        share: of what lies between that and the ordinary peak, as long as nothing was tried.
    """

    def __init__(
        self,
        limit_bytes: int,
        graph: StepGraph,
        make_plan: MakePlan,
        *,
        hopeless: bool,
        share: float = 0.5,
    ) -> None:
        self._make_plan = make_plan
        self._lowest_bytes = limit_bytes
        self._highest_bytes = max(graph.peak_bytes, limit_bytes)
        self._too_low_bytes = limit_bytes if hopeless else limit_bytes - 1
        self._tried = False
        self.peak_bytes = limit_bytes + int(share * (self._highest_bytes - limit_bytes))
        """The least that is known to be affordable; a guess as long as nothing was tried."""
        self.plan: Plan | None = None
        """For that; None where nothing has to leave."""

    @property
    def is_over(self) -> bool:
        """Whether the search has come to its end."""
        fine = max((self._highest_bytes - self._lowest_bytes) // _FINE, 1)
        highest = self.peak_bytes if self._tried else self._highest_bytes
        return highest - self._too_low_bytes <= fine

    @property
    def share(self) -> float:
        """Where the least affordable peak lies between the lowest and the ordinary one."""
        most = self._highest_bytes - self._lowest_bytes
        return (self.peak_bytes - self._lowest_bytes) / most if most > 0 else 1.0

    def look(self, graph: StepGraph, planning: PlanningTime, *, surely: bool) -> None:
        """Go on with the search as far as there is time for it.

        Args:
            graph: the recorded step, as it is known by now.
            planning: the time.
            surely: whether the first tries are made whatever time is left.
        """
        tries = 0
        while not self.is_over and (planning.left_s > 0 or (surely and tries < _SURE_TRIES)):
            highest = self.peak_bytes if self._tried else self._highest_bytes
            # What is kept to anyway comes first: it is often met already.
            first = self._too_low_bytes < self._lowest_bytes
            middle = self._lowest_bytes if first else (highest + self._too_low_bytes) // 2
            self._tried, self.peak_bytes = True, highest
            tries += 1
            with planning.planning():
                plan = self._make_plan(graph, middle)
            fits = plan.predicted_peak_bytes <= middle
            if fits and plan.predicted_seconds <= affordable_s(graph):
                self.peak_bytes, self.plan = middle, plan
            else:
                self._too_low_bytes = middle

    def too_dear(self, graph: StepGraph, planning: PlanningTime, times: float) -> None:
        """Take in that steps at `peak_bytes` took too long: as much of what is left is given up.

        Args:
            graph: the recorded step, as it is known by now.
            planning: the time.
            times: so many times as much as is bearable was recomputed.
        """
        self._tried = True
        left_bytes = max(self._highest_bytes - self.peak_bytes, 0)
        # As if what is recomputed went with what is evicted; but a quarter at the least.
        self.peak_bytes += int(left_bytes * max(1 - 1 / times, 0.25)) + 1
        self._too_low_bytes = self.peak_bytes  # that is the end of the search
        if planning.left_s > 0:
            with planning.planning():
                self.plan = self._make_plan(graph, self.peak_bytes)

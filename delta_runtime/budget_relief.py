"""When a budget is given up, and what is kept to instead.

Covers the budget of one runtime, over all its steps. Does not cover how the peak that is kept to is found
(affordable_peak).

Note: a budget that cannot be met
  1. A whole step that passed the budget shows it, where the budget is below the least one of the
     recorded step. Where it is not, the next step in a row that passes it does. A budget below the
     least one that is met, but at a price that nobody can bear, counts as one that is not.
  2. From then on no plan is made for the budget, and the relief of each graph is kept to: the least
     peak that is affordable. As the memory of the device is as large as the largest of them, that one
     is kept to in all steps.
  3. Steps that take too long all the same, by measurement, raise it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from delta_runtime.affordable_peak import MOST_WORK, AffordablePeak, affordable_s, bearable_s
from delta_runtime.core.events import Bounds
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.known_step import CALIBRATION_STEPS, KnownStep, StepCost
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.bounds import bounds_of
from delta_runtime.planning_time import PlanningTime

DIFFERS_BYTES = 4096
"""By so much, at the most, does a step differ from run to run: what malloc adds to small blocks."""
_STEPS_TO_JUDGE = 3  # what is kept to: the least of each counts
_DEAR_STEPS = 2  # in a row, before a budget that is met is given up, or more is kept to


class BudgetRelief:
    """Gives a budget up where it cannot be met.

    Args:
        drops: whether plans may drop a value.
        plans: whether plans are made.
        planning: how long plans may take.
    """

    def __init__(self, *, drops: bool, plans: bool, planning: PlanningTime) -> None:
        self._drops = drops
        self._makes_plans = plans
        self._planning = planning
        self._passed = 0  # whole steps in a row that passed the budget
        self._dear = 0  # steps in a row that took too long
        self._given_up = False
        self._limit_bytes = 0  # for steps whose graph is not known

    @property
    def given_up(self) -> bool:
        """Whether the budget was given up."""
        return self._given_up

    def limit_bytes(self, budget_bytes: int, steps: Iterable[KnownStep]) -> int:
        """Return what the next step is to keep to: the budget, or a higher peak where it was given up.

        Args:
            budget_bytes: the budget.
            steps: all that are known.
        """
        if not self._given_up:
            return budget_bytes
        reliefs = [known.relief.peak_bytes for known in steps if known.relief]
        return max(budget_bytes, self._limit_bytes, *reliefs)

    def bounds_of(self, known: KnownStep) -> Bounds | None:
        """Return the bounds of a step's last record; None where that had no backward."""
        if known.bounds is None and known.record is not None:
            with self._planning.planning():
                bounds = bounds_of(known.record, drops=self._drops)
            lower_bytes = max(bounds.lower_bytes - DIFFERS_BYTES, 0)
            if known.seen_bytes:
                lower_bytes = min(lower_bytes, known.seen_bytes)
            known.bounds = replace(bounds, lower_bytes=lower_bytes)
        return known.bounds

    def forget(self, known: KnownStep) -> None:
        """Keep to what was found for a step that is no longer remembered."""
        if known.relief is not None:
            self._limit_bytes = max(self._limit_bytes, known.relief.peak_bytes)

    def saw(
        self,
        cost: StepCost,
        known: KnownStep | None,
        steps: Sequence[KnownStep],
        budget_bytes: int,
        *,
        repeats: bool,
        waits: bool = False,
    ) -> None:
        """Give the budget up where a whole step shows that it cannot be met, and find what to keep to; see the Note.

        Args:
            cost: what the step came to.
            known: its record; None where there is none.
            steps: all that are known, the latest last.
            budget_bytes: the budget.
            repeats: whether graphs come again; else nothing is looked for that holds for one of them.
            waits: whether less may soon be kept to, so that a peak above the budget shows nothing by itself.
        """
        passes = cost.peak_bytes > budget_bytes
        if not self._given_up:
            self._given_up = self._is_hopeless(
                cost, known, budget_bytes, passes=passes, waits=waits
            )
        if not self._given_up:
            return
        limit_bytes = self.limit_bytes(budget_bytes, steps)
        if known is None or not repeats:
            self._raise_limit(cost, steps[-1].graph if steps else None, limit_bytes)
            return
        others = [each.relief for each in steps if each.relief is not None]
        if known.relief is None:
            if known.graph.peak_bytes <= limit_bytes:
                return
            bounds = self.bounds_of(known)
            lower_bytes = bounds.lower_bytes if bounds else 0
            known.relief = AffordablePeak(
                max(limit_bytes, lower_bytes),
                known.graph,
                self._plan,
                hopeless=limit_bytes < max(lower_bytes, budget_bytes + int(passes)),
                share=others[-1].share if others else 0.5,
            )
        before = known.relief.plan
        if not self._makes_plans or known.budget_bytes == limit_bytes:
            known.costs.append(cost)
        self._look(known, known.relief, surely=not others)
        if known.relief.plan is not before and self._makes_plans:
            known.plan, known.costs = known.relief.plan, []
            known.budget_bytes = self.limit_bytes(budget_bytes, steps)
        if known.relief.is_over:
            known.searched = known.plan is not None
            known.runs = max(known.runs, CALIBRATION_STEPS)

    def _is_hopeless(
        self,
        cost: StepCost,
        known: KnownStep | None,
        budget_bytes: int,
        *,
        passes: bool,
        waits: bool,
    ) -> bool:
        """Whether this step shows that the budget cannot be met (rule 1)."""
        self._passed = self._passed + 1 if passes and not waits else 0
        self._dear = self._dear + 1 if _is_dear(cost) else 0
        # A budget that is met is not given up because of one step that others slowed down.
        looks = passes or self._dear >= _DEAR_STEPS
        bounds = self.bounds_of(known) if looks and known else None
        hopeless = self._passed > 1 or (bounds is not None and budget_bytes < bounds.least_bytes)
        if hopeless:
            self._dear = 0  # counted anew, for what is kept to
        return hopeless

    def _raise_limit(self, cost: StepCost, latest: StepGraph | None, limit_bytes: int) -> None:
        """Keep to more where steps of graphs that nobody knows take too long."""
        dear = cost.rebuild_s > affordable_s(latest) if latest else _is_dear(cost)
        self._dear = self._dear + 1 if dear else 0
        if self._dear >= _DEAR_STEPS:
            self._dear = 0
            left_bytes = latest.peak_bytes - limit_bytes if latest else 0
            self._limit_bytes = limit_bytes + max(limit_bytes // 10, left_bytes // 4)

    def _look(self, known: KnownStep, relief: AffordablePeak, *, surely: bool) -> None:
        """Go on with the search for what to keep to, or raise it by what steps have cost (rule 3)."""
        if len(known.costs) < _STEPS_TO_JUDGE:
            relief.look(known.graph, self._planning, surely=surely)
            return
        costs, known.costs = known.costs, []
        rebuild_s = min(each.rebuild_s for each in costs)
        # Another thread may recompute while no step goes on: that takes no time of a step.
        observed_s = max(0.0, min(each.seconds - each.rebuild_s for each in costs))
        most_s = bearable_s(observed_s, costs[-1].ops)
        if rebuild_s > most_s:
            relief.too_dear(known.graph, self._planning, rebuild_s / max(most_s, 1e-9))

    def _plan(self, graph: StepGraph, budget_bytes: int) -> Plan:
        return joint_heuristic.plan(graph, budget_bytes, drops=self._drops, most_work=MOST_WORK)


def _is_dear(cost: StepCost) -> bool:
    """Whether recomputing took more of a step than its user can bear."""
    return cost.rebuild_s > bearable_s(cost.seconds - cost.rebuild_s, cost.ops)

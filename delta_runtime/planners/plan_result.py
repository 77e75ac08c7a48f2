"""What every planner returns for a recorded step, with the judge's word on it.

Covers the result, and the search for a plan that uses the budget where a planner's own account is coarser than the
judge's. Does not cover any planner.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners.validate import Verdict, validate

_TURNS = 6
_SAME = 1e-6  # share by which two sums of the same seconds may differ
_NEAR = 0.995  # of the budget: a plan that holds so much uses it


@dataclass(frozen=True, slots=True, eq=False)
class PlanResult:
    """A plan, or that there is none.

    Args:
        plan: that the judge found to fit; None where the planner has none.
        peak_bytes: highest live bytes of the step under it, by the judge; 0 without a plan.
        seconds: that it takes on top of the ordinary step, by the judge: rebuilding and stalls; inf without a plan.
        bound_s: no plan of the planner's own model takes less on top; None where that was not shown, or where the plan
            is outside of that model and takes less.
        solver_s: seconds that planning took.
        least_budget_bytes: without a plan, the least budget for which this planner is known to have one; else None.
        fallback: name of the planner whose plan it is, where it is not this one's own.
    """

    plan: Plan | None
    peak_bytes: int
    seconds: float
    bound_s: float | None
    solver_s: float
    least_budget_bytes: int | None = None
    fallback: str = ""

    @property
    def feasible(self) -> bool:
        """Whether there is a plan."""
        return self.plan is not None


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """A plan with what the judge says of it."""

    plan: Plan
    verdict: Verdict

    @property
    def seconds(self) -> float:
        """Seconds on top of the ordinary step."""
        return self.verdict.rebuild_s + self.verdict.stall_s


def judged(plan: Plan, graph: StepGraph, links: Links | None = None) -> Judged:
    """Have a plan judged, and write into it what the judge expects."""
    verdict = validate(plan, graph, links)
    told = replace(
        plan,
        predicted_seconds=verdict.rebuild_s + verdict.stall_s,
        predicted_peak_bytes=verdict.peak_bytes,
    )
    return Judged(told, verdict)


def result_of(
    found: Judged | None,
    budget_bytes: int,
    begin_s: float,
    *,
    bound_s: float | None = None,
    fallback: str = "",
    least_budget_bytes: int | None = None,
) -> PlanResult:
    """Return the result that a judged plan makes: itself where it fits, else what it would need.

    Args:
        found: the plan; None where the planner has none.
        budget_bytes: what may be live at any moment.
        begin_s: when planning began, by `time.perf_counter`.
        bound_s, fallback, least_budget_bytes: see `PlanResult`; the last is the peak of the plan where it does not
            fit.
    """
    solver_s = time.perf_counter() - begin_s
    if found is None:
        return PlanResult(None, 0, float("inf"), bound_s, solver_s, least_budget_bytes)
    peak_bytes = found.verdict.peak_bytes
    if peak_bytes > budget_bytes:
        return PlanResult(None, 0, float("inf"), bound_s, solver_s, peak_bytes)
    if bound_s is not None and found.seconds < bound_s * (1 - _SAME):
        bound_s = None  # it was one of a coarser account
    return PlanResult(found.plan, peak_bytes, found.seconds, bound_s, solver_s, fallback=fallback)


def moving_nothing(graph: StepGraph, budget_bytes: int, begin_s: float) -> PlanResult:
    """Return the result that is the ordinary step; no plan is faster.

    Args:
        graph, budget_bytes, begin_s: see `result_of`.
    """
    ordinary = judged(Plan.moving_nothing(graph), graph)
    return result_of(ordinary, budget_bytes, begin_s, bound_s=0.0)


def fit(
    graph: StepGraph,
    budget_bytes: int,
    at: Callable[[float], Plan | None],
    smallest: Callable[[], Plan | None],
    *,
    turns: int = _TURNS,
    until_s: float = float("inf"),
    bound_s: Callable[[], float | None] = lambda: None,
) -> PlanResult:
    """Find the fastest plan that fits among those that a planner makes for different amounts of memory.

    A planner's own account may be coarser than the judge's. It is asked for the budget, then for more as long as what
    comes of it fits, or for less as long as it does not.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment, by the judge.
        at: the planner: its plan for an amount of memory by its own account; None where it has none.
        smallest: its plan that holds the least; None where it has none but the one that moves nothing.
        turns: how often the planner is asked at the most.
        until_s: by `time.perf_counter`; from then on it is asked again only as long as nothing fits.
        bound_s: tells the bound afterwards; see `PlanResult`.
    """
    begin = time.perf_counter()
    if graph.peak_bytes <= budget_bytes:
        return moving_nothing(graph, budget_bytes, begin)
    best: Judged | None = None
    low, high, asked = 0.0, 2.0 * graph.peak_bytes, float(budget_bytes)
    for turn in range(turns):
        if turn > 0 and best is not None and time.perf_counter() > until_s:
            break
        plan = at(asked)
        found = judged(plan, graph) if plan is not None else None
        fits = found is None or found.verdict.peak_bytes <= budget_bytes
        if found is not None and fits and (best is None or found.seconds < best.seconds):
            best = found
        if found is not None and _NEAR * budget_bytes <= found.verdict.peak_bytes <= budget_bytes:
            break
        if fits:
            low = asked
        else:
            high = asked
        over = budget_bytes / max(found.verdict.peak_bytes, 1) if found is not None else 1.25
        asked = asked * over if low < asked * over < high else (low + high) / 2
    if best is None:
        plans = [each for each in (smallest(), Plan.moving_nothing(graph)) if each is not None]
        best = min(
            (judged(each, graph) for each in plans), key=lambda each: each.verdict.peak_bytes
        )
    return result_of(best, budget_bytes, begin, bound_s=bound_s())

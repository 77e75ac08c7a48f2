"""Joint: keep, swap or drop each saved value of a recorded step, under lanes and a hard peak. The default planner.

Covers the signature that all planners share; `joint_heuristic` is how it decides. By default it starts from nothing;
seeded, it takes the best of its own plan and those of the exact planners.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.plan_result import PlanResult, judged, result_of

EFFORT = 4.0
"""How long the search goes on, in steps' worth of what the first plan rebuilds."""


def plan(
    graph: StepGraph,
    budget_bytes: int,
    tiers: Links | None = None,
    *,
    effort: float = EFFORT,
    seeds: Sequence[Plan] = (),
) -> PlanResult:
    """Return a plan for a recorded step that drops, and copies where lanes are known.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        tiers: speed of the lanes; None where nothing may be copied.
        effort: see `joint_heuristic.plan`.
        seeds: plans of others for the same graph; the best that fits is the result, if this planner's is no better.
    """
    begin = time.perf_counter()
    own = joint_heuristic.plan(graph, budget_bytes, effort=effort, links=tiers)
    found = [judged(each, graph, tiers) for each in (own, *seeds)]
    best = min(
        found,
        key=lambda each: (max(each.verdict.peak_bytes - budget_bytes, 0), each.seconds),
    )
    return result_of(best, budget_bytes, begin)

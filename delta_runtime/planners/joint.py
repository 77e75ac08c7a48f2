"""Joint: keep, swap or drop each saved value of a recorded step, under lanes and a hard peak. The default planner.

Covers the signature that all planners share; `joint_heuristic` is how it decides. By default it starts from nothing;
seeded, it searches from the plans of other planners too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.plan_result import Judged, PlanResult, judged, moving_nothing, result_of
from delta_runtime.planners.presence_search import search

EFFORT = 4.0
"""How long the search goes on, in steps' worth of what the first plan rebuilds."""

_TURNS = 3  # of looking for a budget that works, where one does not


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
        effort: see `joint_heuristic.plan`; if it is more than 0, for when values are there it looks as long as it ever
            does.
        seeds: plans of others for the same graph. When values are there is looked for from each that copies nothing,
            too; the result is the best plan of all, theirs included.

    Raises:
        InvalidPlan: a seed is no plan for this graph, or copies where there are no lanes.
    """
    begin = time.perf_counter()
    if graph.peak_bytes <= budget_bytes:
        return moving_nothing(graph, budget_bytes, begin)

    def best_at(memory: int, effort: float) -> Judged:
        own = joint_heuristic.plan(
            graph,
            memory,
            effort=effort,
            links=tiers,
            least_search=joint_heuristic.MOST_TO_SEARCH,
        )
        plans = [own, *seeds, *_swapping(graph, memory, tiers), Plan.moving_nothing(graph)]
        found = [judged(each, graph, tiers) for each in plans]
        found += [judged(each, graph, tiers) for each in _searched(seeds, graph, memory)]
        return min(found, key=lambda each: (max(each.verdict.peak_bytes - memory, 0), each.seconds))

    best = best_at(budget_bytes, effort)
    peak_bytes = best.verdict.peak_bytes
    if peak_bytes <= budget_bytes:
        return result_of(best, budget_bytes, begin)
    # Of a search that peaked there it is not sure that it does so again, for another budget. Where nothing is copied,
    # what fits without a search fits with it.
    efforts = {0.0, effort} if tiers is None else {effort}
    for _ in range(_TURNS):
        for each in sorted(efforts):
            least_bytes = best_at(peak_bytes, each).verdict.peak_bytes
            if least_bytes <= peak_bytes:
                return result_of(None, budget_bytes, begin, least_budget_bytes=peak_bytes)
        peak_bytes = least_bytes
    return result_of(None, budget_bytes, begin, least_budget_bytes=graph.peak_bytes)


def _swapping(graph: StepGraph, budget_bytes: int, tiers: Links | None) -> list[Plan]:
    """Return the plan that only swaps, where there are lanes: the heuristic drops rather than have a step wait."""
    if tiers is None or not (tiers.out_bytes_per_s > 0 and tiers.in_bytes_per_s > 0):
        return []
    return [joint_heuristic.plan(graph, budget_bytes, drops=False, links=tiers)]


def _searched(seeds: Sequence[Plan], graph: StepGraph, budget_bytes: int) -> list[Plan]:
    """Return what `presence_search` makes of the plans that copy nothing."""
    recipes = recipes_of(graph)
    found = [
        search(graph, budget_bytes, each, most_work=joint_heuristic.MOST_TO_SEARCH, recipes=recipes)
        for each in seeds
        if not (each.exits == Exit.SWAP).any()
    ]
    return [each for each in found if each is not None]

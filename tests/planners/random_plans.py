"""Random small step graphs and random choices of what leaves, for property tests of plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import Mask, StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners.evaluate import Evaluator
from delta_runtime.planners.evictions_as_plan import plan_of
from delta_runtime.planners.greedy_drops import GreedyCover
from delta_runtime.planners.repair import Evictions
from delta_runtime.planners.transfer_schedule import LaneTimes
from tests.support.step_graphs import Op, step_graph

masks = st.lists(st.booleans(), min_size=30, max_size=30)
"""Of the saved values of a graph, the first ones each; no graph saves more."""
speeds = st.sampled_from([1e2, 1e3, 1e5])
"""Of lanes, in bytes a second, where values have up to 40 bytes."""


@st.composite
def graphs(draw: st.DrawFn) -> StepGraph:
    """Draw one of up to ten ops, of which it may be that none saves anything."""
    ops: list[Op] = []
    values = 0
    for _ in range(draw(st.integers(3, 10))):
        known = st.integers(0, values - 1) if values else st.nothing()
        reads = tuple(draw(st.lists(known, max_size=3 if values else 0, unique=True)))
        makes = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
        around = [*reads, *range(values, values + len(makes))]
        ops.append(
            Op(
                reads,
                makes,
                tuple(draw(st.lists(st.sampled_from(around), max_size=3, unique=True))),
                seconds=draw(st.integers(1, 9)) / 100,
                workspace_bytes=draw(st.integers(0, 40)),
                repeats=draw(st.integers(0, 9)) > 0,
                asked=draw(st.integers(0, 4)) > 0,
            )
        )
        values += len(makes)
    return step_graph(ops, persistent_bytes=draw(st.integers(0, 100)))


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice of what leaves, played; and the plan that tells it."""

    evictions: Evictions
    plan: Plan


def dropping(graph: StepGraph, dropped: list[bool], dropped_twice: list[bool]) -> Choice:
    """Drop the values of a mask as far as they can be, and some of them twice."""
    cover = GreedyCover(graph, 0, recipes_of(graph))
    n = len(graph.saved)
    drops = np.array(dropped[:n], bool) & cover.droppable
    twice = np.array(dropped_twice[:n], bool) & drops
    return _played(cover, Evaluator(cover), drops, twice, np.zeros(n, bool))


def dropping_and_copying(
    graph: StepGraph, dropped: list[bool], swapped: list[bool], links: Links
) -> Choice:
    """Drop the values of a mask as far as they can be, and copy those of another."""
    cover = GreedyCover(graph, 0, recipes_of(graph))
    n = len(graph.saved)
    drops = np.array(dropped[:n], bool) & cover.droppable
    swaps = np.array(swapped[:n], bool) & ~drops & (cover.own_need > cover.begin)
    evaluator = Evaluator(cover, LaneTimes(cover, links))
    return _played(cover, evaluator, drops, np.zeros(n, bool), swaps)


def _played(
    cover: GreedyCover, evaluator: Evaluator, drops: Mask, twice: Mask, swaps: Mask
) -> Choice:
    evictions = Evictions(drops, twice, swaps, evaluator.evaluate(drops, twice, swaps))
    return Choice(evictions, plan_of(cover, evaluator, evictions))

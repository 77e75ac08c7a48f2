"""Random small step graphs and random choices of what leaves, for property tests of plans."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import Mask, StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners.evaluate import Evaluator
from delta_runtime.planners.evictions_as_plan import plan_of
from delta_runtime.planners.greedy_drops import GreedyCover
from delta_runtime.planners.presence import Presence
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


@st.composite
def blocks(draw: st.DrawFn) -> StepGraph:
    """Draw a row of blocks: single ops, residual ones, ops whose output is not saved, several outputs, in place."""
    ops: list[Op] = []
    values = 0

    def op(reads: list[int], count: int, *, saves: bool, in_place: bool = False) -> list[int]:
        nonlocal values
        made = list(range(values, values + count))
        values += count
        makes = tuple(draw(st.integers(1, 40)) for _ in made)
        ops.append(
            Op(
                tuple(reads),
                makes,
                tuple(made) if saves else (),
                seconds=draw(st.integers(1, 9)) / 100,
                workspace_bytes=draw(st.integers(0, 20)),
                in_place=in_place,
            )
        )
        return made

    before: list[int] = []
    for _ in range(draw(st.integers(2, 6))):
        kind = draw(st.sampled_from(["single", "residual", "not saved", "several", "in place"]))
        if kind == "single":
            before = op(before, 1, saves=True)
        elif kind == "residual":
            first = op(before, 1, saves=True)
            before = op([*first, *op(first, 1, saves=draw(st.booleans()))], 1, saves=True)
        elif kind == "several":
            before = op(before, 2, saves=True)[draw(st.integers(0, 1)) :][:1]
        else:
            before = op(op(before, 1, saves=False), 1, saves=True, in_place=kind == "in place")
    return step_graph(ops, persistent_bytes=draw(st.integers(0, 100)))


def with_backward_workspaces(graph: StepGraph, rng: np.random.Generator) -> StepGraph:
    """Return a graph whose backward ops ask for something too."""
    more = np.where(graph.op_backward, rng.integers(0, 60, graph.n_ops), 0)
    return replace(graph, op_watermark_bytes=graph.op_watermark_bytes + more)


def with_other_asks(graph: StepGraph, rng: np.random.Generator) -> StepGraph:
    """Return a graph whose values are asked for never, once, or several times, and are let go of at other times.

    Not every op of backward asks for something then, and some of forward do.
    """
    ordinary = graph.op_ordinary_bytes.copy()
    uses, released = [], []
    for row, size in enumerate(graph.saved_bytes.tolist()):
        own = graph.uses[graph.use_offsets[row] : graph.use_offsets[row + 1]]
        possible = graph.op_tick[graph.op_tick >= graph.saved_at[row]]
        more = rng.choice(possible, rng.integers(0, 3))
        uses.append(np.unique([*own[rng.random(len(own)) < 0.6], *more]).astype(np.int64))
        last = max([*uses[-1].tolist(), int(graph.saved_at[row]), int(graph.alone_at[row]) - 1])
        released.append(last + int(rng.integers(0, 3)))
        was, is_now = np.searchsorted(
            graph.op_tick, [graph.released_at[row], released[-1]], side="right"
        )
        ordinary[was:is_now] += size
        ordinary[is_now:was] -= size
    return replace(
        graph,
        op_ordinary_bytes=ordinary,
        uses=np.concatenate([np.empty(0, np.int64), *uses]),
        use_offsets=np.cumsum([0, *(len(each) for each in uses)]).astype(np.int64),
        released_at=np.array(released, np.int64),
    )


def random_presence(presence: Presence, rng: np.random.Generator) -> Mask:
    """Return what is there when, at random; what comes back is asked for before it goes again."""
    graph = presence.graph
    there: Mask = rng.random((graph.n_ops, len(graph.saved))) < rng.choice([0.0, 0.3, 0.6])
    for row in range(len(graph.saved)):
        column = there[:, row]
        column[presence.made[row] : presence.leaves[row]] = True
        column[sorted(presence.asked[row])] = True
        column[presence.gone[row] :] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[False], column, [False]])))
        for begin, end in edges.reshape(-1, 2).tolist()[1:]:
            column[begin:end] = bool(presence.asked[row].intersection(range(begin, end)))
    return there


def with_what_is_read(there: Mask, presence: Presence) -> Mask:
    """Return the same, with all there that something is rebuilt from while it is: nothing is made in passing."""
    full, possible = there.copy(), presence.recipes.possible
    for op in range(1, presence.graph.n_ops):
        for row in range(full.shape[1] - 1, -1, -1):
            comes_back = full[op, row] and not full[op - 1, row] and presence.made[row] < op
            if comes_back and possible[row]:  # else it never leaves
                for parent in presence.recipes.parents[row].tolist():
                    if presence.made[parent] <= op < presence.gone[parent]:
                        full[op, parent] = True
    return full


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

"""Tells which saved values are there at which op as a `Plan`.

Covers the form alone. Every exact planner says in its own words what is there when; this is where the words meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Interval, Plan
from delta_runtime.core.recipes import Recipes, rebuild_seconds, recipes_of
from delta_runtime.core.step_graph import Floats, Ints, Mask, StepGraph
from delta_runtime.planners.greedy_drops import GreedyCover


class Presence:
    """When each saved value of a graph may be away, has to be there, and is let go of.

    Args:
        graph: the recorded or contracted step.
        recipes: of `graph`; made where None is given.
    """

    def __init__(self, graph: StepGraph, recipes: Recipes | None = None) -> None:
        self.graph = graph
        self.recipes = recipes or recipes_of(graph)
        cover = GreedyCover(graph, 0, self.recipes)
        self.made: Ints = graph.value_op[graph.saved]
        """Op that makes each value."""
        self.leaves: Ints = np.minimum(cover.begin, graph.n_ops)
        """Op before which each may leave first: forward lets go of it."""
        self.gone: Ints = gone_ops(graph)
        """First op at whose begin the program does not hold it any more."""
        self.asked: list[set[int]] = asked_ops(graph)
        """Ops behind which each is asked for."""
        self.needed: list[set[int]] = needed_ops(graph, self.asked)
        """Ops at which each has to be there for whoever asked for it."""

    def beside(self, rows: Iterable[int]) -> Floats:
        """Return live bytes at each op, at its worst, without any of these values."""
        graph = self.graph
        beside = (graph.op_ordinary_bytes + graph.op_watermark_bytes).astype(np.float64)
        for row in rows:
            beside[self.made[row] : self.gone[row]] -= float(graph.saved_bytes[row])
        return beside

    def plan(self, there: Mask) -> Plan:
        """Return the plan under which values are there at these ops, and dropped in between.

        Args:
            there: for each op and each saved value whether it is on the device, (ops, saved values). Where it has to
                be it is in any case, and what cannot be dropped stays.
        """
        graph = self.graph
        tick = [*graph.op_tick.tolist(), graph.ticks]
        intervals: list[list[Interval]] = [[] for _ in range(graph.n_values)]
        for row, value in enumerate(graph.saved.tolist()):
            if self.recipes.possible[row]:
                intervals[value] = self._intervals(there[:, row].copy(), row, tick)
            else:
                intervals[value] = [Interval(tick[int(self.made[row])], graph.ticks)]
        return Plan.of(
            intervals,
            weights=weights_of(graph, self.recipes),
            predicted_seconds=0.0,
            predicted_peak_bytes=0,
            as_written=True,
        )

    def _intervals(self, present: Mask, row: int, tick: list[int]) -> list[Interval]:
        present[sorted(self.needed[row])] = True
        present[: self.made[row]] = False
        present[self.made[row] : self.leaves[row]] = True
        present[self.gone[row] :] = False
        edges = np.flatnonzero(np.diff(np.concatenate([[False], present, [False]])))
        found = []
        for begin, end in edges.reshape(-1, 2).tolist():
            stays = end >= self.gone[row]
            until = self.graph.ticks if stays else tick[end]
            found.append(Interval(tick[begin], until, Exit.STAYS if stays else Exit.DROP))
        return found


def weights_of(graph: StepGraph, recipes: Recipes) -> Floats:
    """Return for each value of a graph the seconds that a byte of it costs; inf for what is not saved."""
    weights = np.full(graph.n_values, np.inf)
    seconds = np.array(rebuild_seconds(graph, recipes))
    weights[graph.saved] = seconds / np.maximum(graph.saved_bytes, 1)
    return weights


def gone_ops(graph: StepGraph) -> Ints:
    """Return the first op at whose begin the program does not hold each saved value any more."""
    return np.searchsorted(graph.op_tick, graph.released_at, side="right").astype(np.int64)


def asked_ops(graph: StepGraph) -> list[set[int]]:
    """Return the ops behind which each saved value is asked for: an unpack between two ops counts to the first."""
    op = np.searchsorted(graph.op_tick, graph.uses, side="right") - 1
    offsets = graph.use_offsets.tolist()
    made = graph.value_op[graph.saved].tolist()
    return [
        {at for at in op[begin:end].tolist() if at >= first}
        for first, (begin, end) in zip(made, itertools.pairwise(offsets), strict=True)
    ]


def held_until(graph: StepGraph, asked: Iterable[Iterable[int]]) -> dict[int, int]:
    """Return for each op behind which something is asked for the last op in which the node that asked may hold it.

    A node holds what it asked for until it ends. Nobody records that: it has ended when another one asks for something.
    The node of a reentrant checkpoint is the exception, which ends behind the nodes of what it ran again; its
    inputs are not counted for so long.

    Args:
        graph: the recorded or contracted step.
        asked: `asked_ops` of it.
    """
    moments = sorted({op for each in asked for op in each})
    if graph.contracted:
        return {op: op for op in moments}
    return dict(itertools.pairwise([*moments, graph.n_ops - 1]))


def needed_ops(graph: StepGraph, asked: Sequence[Collection[int]]) -> list[set[int]]:
    """Return the ops at which each saved value has to be there for the node that asked for it; see `held_until`.

    Args:
        graph: the recorded or contracted step.
        asked: `asked_ops` of it.
    """
    until = held_until(graph, asked)
    needed = []
    for ops, gone in zip(asked, gone_ops(graph).tolist(), strict=True):
        held = (range(op + 1, min(until[op] + 1, gone)) for op in ops)
        needed.append(set(ops).union(*held))
    return needed


def spare_behind(graph: StepGraph) -> Floats:
    """Return the bytes that a rebuild behind each op may hold before more is live than at that op's worst.

    In a contracted step: a rebuild within each op.
    """
    if graph.contracted:
        return graph.op_watermark_bytes.astype(np.float64)
    ordinary = graph.op_ordinary_bytes
    most = ordinary + graph.op_watermark_bytes
    behind = behind_ops(most, ordinary, gone_ops(graph), graph.saved_bytes)
    return (most - behind).astype(np.float64)


def behind_ops(most: Ints, ordinary: Ints, gone: Ints, saved_bytes: Ints) -> Ints:
    """Return live bytes between each op and the next one, where values are asked for.

    What the op held for a moment has gone; what the program lets go of between the two may still be there. More than
    at the op's worst is not said: what is more then was made outside of ops, and counts at the next one.

    Args:
        most: live bytes of each op at its worst.
        ordinary: live bytes at the begin of each op.
        gone: op at whose begin each saved value is not held any more.
        saved_bytes: of each saved value.
    """
    n = len(most)
    behind = np.append(ordinary[1:], most[-1:])
    going = np.zeros(n + 1, np.int64)
    np.add.at(going, gone, saved_bytes)
    behind[:-1] += going[1:n]
    return np.minimum(behind, most)

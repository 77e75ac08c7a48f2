"""How little a step can do with: the lower bound of any way of evicting, and the least budget of ours.

Both come from the record of a step, by the arithmetic of the planner.

- The *lower bound*: at each op there is what is not managed, what the op reads, and what it asks for.
  What others hold of the saved values is there too. No budget below that can be met by anybody.
- The *least budget*: all that may be dropped is dropped whenever nobody uses it, and made again from
  the sources each time that it is asked for. What that holds for a moment comes on top. It is what
  the victim queue comes down to when it has to, at whatever it takes.

Not covered: what either costs in seconds.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from delta_runtime.core.events import Bounds
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import Floats, Ints, Mask, StepGraph
from delta_runtime.planners.greedy_drops import GreedyCover

_SIZES = 12  # up to which values are kept, that are tried
_MOST_PLAYS = 200  # of rebuilds, for each of them


def bounds_of(graph: StepGraph, *, drops: bool = True) -> Bounds:
    """Return the lower bound and the least budget of a recorded step.

    Args:
        graph: the record.
        drops: whether values may be dropped; else they are copied, and nothing is made again.
    """
    cover = GreedyCover(graph, 0, recipes_of(graph))
    away = _Away(cover)
    lower, op = _lower_bound(graph, away)
    movable = cover.droppable if drops else cover.own_need > cover.begin
    least = _least_budget(cover, away, movable, drops=drops)
    # The small ones cost little to keep, and may spare others a long way from the sources.
    sizes = np.unique(cover.bytes[cover.droppable])[:-1]
    for size in sizes[:: max(1, len(sizes) // _SIZES)] if drops else ():
        if least <= lower:
            break
        least = min(least, _least_budget(cover, away, cover.droppable & (cover.bytes > size)))
    # What keeps everything needs no room to make anything again.
    least = min(least, graph.peak_bytes)
    return Bounds(lower, op, max(lower, least))


class _Away:
    """How many bytes of saved values may be away at each op, at the most."""

    def __init__(self, cover: GreedyCover) -> None:
        graph = cover.graph
        n = graph.n_ops
        self.begin = np.minimum(cover.begin, n)
        self.gone = np.maximum(
            np.searchsorted(graph.op_tick, graph.released_at, side="right"), self.begin
        )
        saved_at = np.searchsorted(graph.op_tick, graph.saved_at, side="right")
        self.bytes = _sums(self.begin, self.gone, cover.bytes, n)
        held = np.minimum(np.maximum(self.begin, saved_at), self.gone)
        self.held_bytes = _sums(saved_at, held, cover.bytes, n)


def _sums(begin: Ints, end: Ints, bytes_: Floats, n_ops: int) -> Floats:
    """Bytes at each op of what lasts from one op until before another."""
    change = np.zeros(n_ops + 2)
    np.add.at(change, np.minimum(begin, n_ops + 1), bytes_)
    np.add.at(change, np.minimum(np.maximum(end, begin), n_ops + 1), -bytes_)
    return np.cumsum(change)[: n_ops + 1]


def _lower_bound(graph: StepGraph, away: _Away) -> tuple[int, str]:
    n = graph.n_ops
    # What the op reads may be of what somebody holds anyway.
    read = np.maximum(graph.op_managed_input_bytes - away.held_bytes[:n], 0)
    need = (
        graph.op_ordinary_bytes
        + graph.op_watermark_bytes
        - away.bytes[:n]
        + np.where(graph.op_backward, read, 0)
        - graph.cloned_bytes
    )
    worst = int(np.argmax(need))
    return int(need[worst]), graph.op_name[worst]


def _least_budget(cover: GreedyCover, away: _Away, droppable: Mask, *, drops: bool = True) -> int:
    """Return what is live at the most if these values are dropped, and dropped again, whenever it can be."""
    graph, n = cover.graph, cover.graph.n_ops
    bytes_ = cover.bytes
    # Unpacked by a node, and held by it until it ends: at the latest when another one unpacks.
    row = np.repeat(np.arange(len(graph.saved)), np.diff(graph.use_offsets))
    order = np.argsort(graph.uses, kind="stable")
    row, tick = row[order], graph.uses[order]
    at = np.searchsorted(graph.op_tick, tick, side="right")
    next_unpack = np.append(tick, graph.ticks)[np.searchsorted(tick, tick, side="right")]
    until = np.minimum(np.searchsorted(graph.op_tick, next_unpack, side="right"), away.gone[row])
    until = np.maximum(until, at)
    used = droppable[row]
    held = _sums(at[used], until[used], bytes_[row[used]], n)
    watermark = np.append(graph.op_watermark_bytes, 0)
    there = _there(cover, away, droppable)
    least = float((there + held + watermark).max())
    if not drops:
        return int(least)
    # And what rebuilding holds in front of the op that asks.
    work = _Work(cover, droppable)
    nodes = _nodes(cover, there, droppable)
    heap = [(-(node.beside + work.at_most(node.rows)), i) for i, node in enumerate(nodes)]
    heapq.heapify(heap)
    while heap and -heap[0][0] > least:
        negative, first = heapq.heappop(heap)
        if work.plays >= _MOST_PLAYS:
            return int(-negative)  # a bound will do
        least = max(least, nodes[first].beside + work.exactly(nodes[first].rows))
    return int(least)


class _Node(NamedTuple):
    """What one node of autograd asks for.

    Args:
        beside: bytes that are live then, while everything that may be dropped is gone.
        rows: of `graph.saved`, in the order in which they are asked for.
    """

    beside: float
    rows: list[int]


def _there(cover: GreedyCover, away: _Away, droppable: Mask) -> Floats:
    """Return what is live at each op, and behind the last one, while everything that may be dropped is gone."""
    ordinary = cover.graph.op_ordinary_bytes
    gone = away.begin[droppable], away.gone[droppable], cover.bytes[droppable]
    return np.append(ordinary, ordinary[-1:]) - _sums(*gone, cover.graph.n_ops)


def _nodes(cover: GreedyCover, there: Floats, droppable: Mask) -> list[_Node]:
    """Return the nodes that ask for something that may be dropped; `there` as from `_there`."""
    graph, n = cover.graph, cover.graph.n_ops
    row = np.repeat(np.arange(len(graph.saved)), np.diff(graph.use_offsets))
    uses = np.flatnonzero(droppable[row])
    uses = uses[np.argsort(graph.uses[uses], kind="stable")]
    ticks, first = np.unique(graph.uses[uses], return_index=True)
    at = np.minimum(np.searchsorted(graph.op_tick, ticks, side="right"), n)
    return [
        _Node(beside, list(dict.fromkeys(rows.tolist())))
        for beside, rows in zip(
            there[at].tolist(), np.split(row[uses], first[1:]) if len(ticks) else (), strict=True
        )
    ]


def is_met_by_swaps(cover: GreedyCover) -> bool:
    """Return whether the cover's budget is met if all that may leave is swapped, and is back only while it is used."""
    movable = cover.own_need > cover.begin
    return _least_budget(cover, _Away(cover), movable, drops=False) <= cover.budget_bytes


def not_made_again(cover: GreedyCover) -> Mask:
    """Return the saved values of nodes for which no reruns from the sources fit into the cover's budget.

    Once all that one of these nodes asks for is dropped, with all that it is made from, a step cannot keep to the
    budget any more. Where telling takes too long, a node counts as one of them.
    """
    work = _Work(cover, cover.droppable)
    found = np.zeros(len(cover.bytes), bool)
    there = _there(cover, _Away(cover), cover.droppable)
    for node in _nodes(cover, there, cover.droppable):
        if node.beside + work.at_most(node.rows) <= cover.budget_bytes:
            continue
        if work.plays >= _MOST_PLAYS or node.beside + work.exactly(node.rows) > cover.budget_bytes:
            found[node.rows] = True
    return found & cover.droppable


class _Work:
    """What making saved values again from the sources holds at the most, they themselves included."""

    def __init__(self, cover: GreedyCover, droppable: Mask) -> None:
        graph = cover.graph
        n = graph.n_ops
        made_bytes = np.bincount(graph.value_op, weights=graph.value_bytes, minlength=n)
        asked = np.maximum(made_bytes, graph.op_watermark_bytes)
        there = np.zeros(graph.n_values, bool)  # never away
        there[graph.saved[~droppable]] = True
        # Of the whole forward, with each value alive until it is read last.
        last = graph.value_op.copy()
        readers = np.repeat(np.arange(n), np.diff(graph.input_offsets))
        np.maximum.at(last, graph.inputs, readers)
        alive = _sums(graph.value_op + 1, last + 1, graph.value_bytes.astype(float), n)
        self.plays = 0
        self._prefix: list[float] = np.maximum.accumulate(alive[:n] + asked).tolist()
        self._asked = asked.tolist()
        self._saved = graph.saved.tolist()
        self._bytes: list[int] = graph.value_bytes.tolist()
        self._op = graph.value_op.tolist()
        inputs = np.where(there[graph.inputs], -1, graph.inputs).tolist()
        offsets = graph.input_offsets.tolist()
        self._reads = [
            [value for value in inputs[offsets[op] : offsets[op + 1]] if value >= 0]
            for op in range(n)
        ]

    def at_most(self, rows: list[int]) -> float:
        """Return a bound of `exactly` that costs nothing."""
        bytes_ = [self._bytes[self._saved[row]] for row in rows]
        most: float = max(
            self._prefix[self._op[self._saved[row]]] - own
            for row, own in zip(rows, bytes_, strict=True)
        )
        return float(sum(bytes_)) + most

    def exactly(self, rows: list[int]) -> float:
        """Return what one node asks for, in its order; what comes by the way stays for it."""
        roots = [self._saved[row] for row in rows]
        there: set[int] = set()
        most = 0.0
        for root in roots:
            if root not in there:
                held = float(sum(self._bytes[value] for value in there))
                most = max(most, held + self._play(root, there, set(roots)))
        return most

    def _play(self, root: int, there: set[int], stay: set[int]) -> float:
        """Return the most bytes while a value is made beside those that are there; adds what stays to them."""
        self.plays += 1
        made_by, sizes = self._op, self._bytes
        ops = {made_by[root]}
        last = {root: len(self._asked)}
        stack = [made_by[root]]
        while stack:
            op = stack.pop()
            for value in self._reads[op]:
                if value in there:
                    continue
                if last.get(value, -1) < op:
                    last[value] = op
                maker = made_by[value]
                if maker not in ops:
                    ops.add(maker)
                    stack.append(maker)
        made: dict[int, list[int]] = {}
        for value in [*last, *(stay - there - last.keys())]:
            made.setdefault(made_by[value], []).append(value)
        alive = most = 0.0
        ends: dict[int, float] = {}
        for op in sorted(ops):
            if alive + self._asked[op] > most:
                most = alive + self._asked[op]
            for value in made.get(op, ()):
                alive += sizes[value]
                if value in stay:
                    there.add(value)
                else:
                    ends[last[value]] = ends.get(last[value], 0.0) + sizes[value]
            alive -= ends.pop(op, 0.0)
        return max(most, alive)

"""A first choice of what to drop: the cheapest cover of what is too much at each op.

Dropping a saved value covers its bytes from after its last use in forward until it is needed again: at
its own first unpack, or earlier when a dropped value downstream is rebuilt from it. It costs the
seconds of the op that made it and of the unsaved ops in between. What rebuilding holds for a moment
is not counted here: that is `evaluate`'s concern.

csrc/planners/cover.cpp chooses alike, faster; it is used where the extension was loaded.
"""

from __future__ import annotations

import heapq
from collections.abc import Set
from types import ModuleType

import numpy as np

from delta_runtime.core import compiled
from delta_runtime.core.interrupts import give_way
from delta_runtime.core.recipes import Recipes
from delta_runtime.core.step_graph import Ints, StepGraph

_WORK_OF_A_GAIN = 25
_GAINS_AT_ONCE = 1000  # a few milliseconds
EPSILON_S = 1e-7
"""Seconds added to every choice: no op is free."""


def _last_forward_read(graph: StepGraph) -> Ints:
    """Index of the last op in forward that made or read each value."""
    last = graph.value_op.copy()
    reader = np.repeat(np.arange(graph.n_ops), np.diff(graph.input_offsets))
    forward = ~graph.op_backward[reader]
    np.maximum.at(last, graph.inputs[forward], reader[forward])
    return last


class GreedyCover:
    """The state of the greedy choice: what is dropped, from when to when, and what is still too much.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        recipes: of `graph`.
        staying: rows of `graph.saved` that are not to be dropped.
    """

    def __init__(
        self,
        graph: StepGraph,
        budget_bytes: int,
        recipes: Recipes,
        staying: Set[int] = frozenset(),
    ) -> None:
        self.graph = graph
        self.budget_bytes = budget_bytes
        self.recipes = recipes
        self.bytes = graph.saved_bytes.astype(np.float64)
        last_read = _last_forward_read(graph)[graph.saved]
        saved = np.searchsorted(graph.op_tick, graph.saved_at + 1, side="left")
        alone = np.searchsorted(graph.op_tick, graph.alone_at, side="left")
        self.begin = np.maximum(np.maximum(last_read + 1, saved), alone)
        # Rebuilt before the op that unpacks it, while the op before is just over: one op early.
        # What is never asked for may be away until the program lets go of it.
        gone = np.searchsorted(graph.op_tick, graph.released_at, side="right")
        asked_at = np.maximum(np.searchsorted(graph.op_tick, graph.first_use, side="right") - 1, 0)
        self.own_need = np.minimum(asked_at, np.maximum(gone, self.begin))
        self.need = self.own_need.copy()
        self.dropped = np.zeros(len(graph.saved), dtype=bool)
        self.work = 0  # gains computed, in units of `Evaluator.work`
        self.run_op = np.zeros(graph.n_ops, dtype=np.int64)  # planned recipes that run each op
        self.excess = (graph.op_ordinary_bytes + graph.op_watermark_bytes - budget_bytes).astype(
            np.float64
        )
        self.original_excess = self.excess.copy()
        self.droppable = recipes.possible & (self.own_need > self.begin)
        self.droppable[list(staying)] = False
        self._give_up()

    def _give_up(self) -> None:
        """Take out of `excess` what no choice can cover: it must not drive the greedy choice."""
        most = np.zeros(len(self.excess) + 1)
        away = self.droppable
        np.add.at(most, self.begin[away], self.bytes[away])
        np.add.at(most, self.own_need[away], -self.bytes[away])
        self.excess -= np.maximum(self.excess - np.cumsum(most)[:-1], 0)

    def marginal_seconds(self, row: int) -> float:
        ops = self.recipes.ops[row]
        seconds = 0.0
        for each in self.graph.rerun_seconds[ops[self.run_op[ops] == 0]].tolist():
            seconds += each  # one by one: `sum` rounds otherwise
        return seconds

    def changes(self, row: int) -> tuple[dict[int, int], list[tuple[int, int, float]]]:
        """Return what dropping a value would do: the needs that move, and the spans of bytes that change."""
        need = int(self.own_need[row])
        for child in self.recipes.children[row]:
            if self.dropped[child]:
                need = min(need, int(self.need[child]))
        needs = {row: need}
        spans = []
        if need > self.begin[row]:
            spans.append((int(self.begin[row]), need, -float(self.bytes[row])))
        stack = [row]
        while stack:
            child = stack.pop()
            for parent in self.recipes.parents[child].tolist():
                if not self.dropped[parent]:
                    continue
                before = needs.get(parent, int(self.need[parent]))
                if before > needs[child]:
                    sooner = max(needs[child], int(self.begin[parent]))
                    if before > sooner:
                        spans.append((sooner, before, float(self.bytes[parent])))
                    needs[parent] = needs[child]
                    stack.append(parent)
        return needs, spans

    def gain(self, row: int) -> float:
        """By how many byte-ops dropping the value lessens the excess."""
        give_way()
        self.work += _WORK_OF_A_GAIN
        _, spans = self.changes(row)
        if not spans:
            return 0.0
        low = min(span[0] for span in spans)
        high = max(span[1] for span in spans)
        window = self.excess[low:high]
        after = window.copy()
        for begin, end, change in spans:
            after[begin - low : end - low] += change
        return float((np.maximum(window, 0) - np.maximum(after, 0)).sum())

    def add(self, row: int) -> None:
        needs, spans = self.changes(row)
        for begin, end, change in spans:
            self.excess[begin:end] += change
        for moved, need in needs.items():
            self.need[moved] = need
        self.dropped[row] = True
        self.run_op[self.recipes.ops[row]] += 1


def choose(cover: GreedyCover) -> None:
    """Take the value with the least seconds per covered byte-op until nothing is too much.

    Lazy: scores only get worse as the excess shrinks (nearly: an op that another recipe runs anyway
    gets cheaper), so the best stale score is looked at again before it is believed.
    """
    if compiled.planners is not None:
        _choose_compiled(cover, compiled.planners)
        return
    added = True
    while added and cover.excess.max(initial=0) > 0:
        added = False
        heap: list[tuple[float, int]] = []
        for row in np.flatnonzero(cover.droppable & ~cover.dropped).tolist():
            gain = cover.gain(row)
            if gain > 0:
                heap.append(((cover.marginal_seconds(row) + EPSILON_S) / gain, row))
        heapq.heapify(heap)
        while heap and cover.excess.max(initial=0) > 0:
            stale, row = heapq.heappop(heap)
            gain = cover.gain(row)
            if gain <= 0:
                continue  # for now: another choice may make it worth while, in the next round
            score = (cover.marginal_seconds(row) + EPSILON_S) / gain
            if heap and score > heap[0][0] and score > stale:
                heapq.heappush(heap, (score, row))
                continue
            cover.add(row)
            added = True


def _choose_compiled(cover: GreedyCover, planners: ModuleType) -> None:
    recipes = cover.recipes
    choice = planners.Cover(
        bytes=cover.bytes,
        begin=cover.begin,
        own_need=cover.own_need,
        parent_offsets=recipes.parent_lists.offsets,
        parents=recipes.parent_lists.items,
        child_offsets=recipes.child_lists.offsets,
        children=recipes.child_lists.items,
        recipe_offsets=recipes.op_lists.offsets,
        recipe_ops=recipes.op_lists.items,
        rerun_seconds=cover.graph.rerun_seconds,
        excess=cover.excess,
        droppable=cover.droppable,
        epsilon_s=EPSILON_S,
    )
    while not choice.go_on(_GAINS_AT_ONCE):
        give_way()
    cover.work += _WORK_OF_A_GAIN * choice.gains()
    cover.dropped = choice.dropped()

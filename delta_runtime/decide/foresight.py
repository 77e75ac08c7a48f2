"""What to drop in a step whose graph is known: a greedy cover of the memory that is too much.

At each op `i` of the recorded step, `ordinary + watermark - budget` bytes have to be away. Dropping a
saved value covers its bytes from after its last use in forward until it is needed again: at its own
first unpack, or earlier when a dropped value downstream is rebuilt from it. It costs the seconds of
the op that made it and of the unsaved ops in between; each runs once, for what is rebuilt stays.
The greedy choice takes the least seconds per byte and excess covered, then takes back what turned
out not to be needed (reverse delete).

It is not optimal, and it knows nothing of what rebuilding itself holds; the runtime's own eviction
is the judge of that. `planners` will hold the exact algorithms.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_runtime.core.graph import Floats, Ints, StepGraph

Mask = npt.NDArray[np.bool_]

_EPSILON_S = 1e-7  # no op is free
_PLANNED = 1e-4  # weight of a planned drop relative to an unplanned one: it goes first


@dataclass(frozen=True, eq=False)
class Foresight:
    """Weights by value of a repeated step, and what is expected of them.

    Args:
        weights: of each value, for the victim queue; smallest goes first.
        rebuilt_weights: the same once the value was rebuilt.
        planned: which saved values (indices into `graph.saved`) are to be dropped.
        predicted_seconds: seconds of rebuilding, with each op run once.
        predicted_peak_bytes: highest live bytes expected; above the budget where no cover was found.
    """

    weights: Floats
    rebuilt_weights: Floats
    planned: Mask
    predicted_seconds: float
    predicted_peak_bytes: int


@dataclass(frozen=True, eq=False)
class _Recipes:
    """For each saved value: the unsaved ops of its recipe, and the saved values that it starts from."""

    ops: list[Ints]
    parents: list[Ints]
    children: list[list[int]]
    possible: Mask


def _recipes(graph: StepGraph) -> _Recipes:
    page_of = np.full(graph.n_values, -1, dtype=np.int64)
    page_of[graph.saved] = np.arange(len(graph.saved))
    ops: list[Ints] = []
    parents: list[Ints] = []
    children: list[list[int]] = [[] for _ in graph.saved]
    possible = np.ones(len(graph.saved), dtype=bool)
    for page, value in enumerate(graph.saved):
        chain: set[int] = set()
        roots: set[int] = set()
        stack = [int(graph.value_op[value])]
        while stack:
            op = stack.pop()
            if op in chain:
                continue
            chain.add(op)
            for source in graph.inputs_of(op):
                parent = int(page_of[source])
                if parent >= 0:
                    roots.add(parent)
                else:
                    stack.append(int(graph.value_op[source]))
            if len(chain) > 4096:
                possible[page] = False
                break
        roots.discard(page)
        ops.append(np.array(sorted(chain), dtype=np.int64))
        parents.append(np.array(sorted(roots), dtype=np.int64))
        for parent in roots:
            children[parent].append(page)
    return _Recipes(ops, parents, children, possible)


def _last_forward_read(graph: StepGraph) -> Ints:
    """Index of the last op in forward that made or read each value."""
    last = graph.value_op.copy()
    for op in range(graph.n_ops):
        if not graph.op_backward[op]:
            last[graph.inputs_of(op)] = op
    return last


class _Cover:
    """The state of the greedy choice: what is dropped, from when to when, and what is still too much."""

    def __init__(self, graph: StepGraph, budget_bytes: int) -> None:
        self.graph = graph
        self.recipes = _recipes(graph)
        self.bytes = graph.saved_bytes.astype(np.float64)
        last_read = _last_forward_read(graph)[graph.saved]
        saved_at = np.searchsorted(graph.op_tick, graph.saved_at, side="left")
        self.begin = np.maximum(last_read, saved_at) + 1
        # Rebuilt before the op that unpacks it, while the op before is just over: one op early.
        self.own_need = np.searchsorted(graph.op_tick, graph.first_use, side="right") - 1
        self.need = self.own_need.copy()
        self.planned = np.zeros(len(graph.saved), dtype=bool)
        self.run_op = np.zeros(graph.n_ops, dtype=np.int64)  # planned recipes that run each op
        self.excess = (graph.op_ordinary_bytes + graph.op_watermark_bytes - budget_bytes).astype(
            np.float64
        )
        self.infeasible = self._give_up()

    def _give_up(self) -> Floats:
        """Takes out of `excess` what no choice can cover: reported, but not chased."""
        most = np.zeros(len(self.excess) + 1)
        away = self.recipes.possible & (self.own_need > self.begin)
        np.add.at(most, self.begin[away], self.bytes[away])
        np.add.at(most, self.own_need[away], -self.bytes[away])
        lost = np.maximum(self.excess - np.cumsum(most)[:-1], 0)
        self.excess -= lost
        return lost

    def marginal_seconds(self, page: int) -> float:
        ops = self.recipes.ops[page]
        return float(self.graph.op_seconds[ops[self.run_op[ops] == 0]].sum())

    def changes(self, page: int) -> tuple[dict[int, int], list[tuple[int, int, float]]]:
        """What dropping a page would do: the needs that move, and the spans of bytes that change."""
        need = int(self.own_need[page])
        for child in self.recipes.children[page]:
            if self.planned[child]:
                need = min(need, int(self.need[child]))
        needs = {page: need}
        spans = []
        if need > self.begin[page]:
            spans.append((int(self.begin[page]), need, -float(self.bytes[page])))
        stack = [page]
        while stack:
            child = stack.pop()
            for parent in self.recipes.parents[child].tolist():
                if not self.planned[parent]:
                    continue
                before = needs.get(parent, int(self.need[parent]))
                if before > needs[child]:
                    sooner = max(needs[child], int(self.begin[parent]))
                    if before > sooner:
                        spans.append((sooner, before, float(self.bytes[parent])))
                    needs[parent] = needs[child]
                    stack.append(parent)
        return needs, spans

    def gain(self, page: int) -> float:
        """By how many byte-ops dropping the page lessens the excess."""
        _, spans = self.changes(page)
        if not spans:
            return 0.0
        low = min(span[0] for span in spans)
        high = max(span[1] for span in spans)
        window = self.excess[low:high]
        after = window.copy()
        for begin, end, change in spans:
            after[begin - low : end - low] += change
        return float(np.maximum(window, 0).sum() - np.maximum(after, 0).sum())

    def add(self, page: int) -> None:
        needs, spans = self.changes(page)
        for begin, end, change in spans:
            self.excess[begin:end] += change
        for moved, need in needs.items():
            self.need[moved] = need
        self.planned[page] = True
        self.run_op[self.recipes.ops[page]] += 1

    def take_back(self, page: int) -> bool:
        """Keeps a page after all, if everything still fits. Needs that it brought forward stay so."""
        span = slice(int(self.begin[page]), max(int(self.begin[page]), int(self.need[page])))
        if (self.excess[span] + self.bytes[page]).max(initial=-np.inf) > 0:
            return False
        self.excess[span] += self.bytes[page]
        self.planned[page] = False
        self.run_op[self.recipes.ops[page]] -= 1
        return True


def _choose(cover: _Cover) -> None:
    """Takes the page with the least seconds per covered byte-op until nothing is too much.

    Lazy: scores only get worse as the excess shrinks (nearly: an op that another recipe runs anyway
    gets cheaper), so the best stale score is looked at again before it is believed.
    """
    open_pages = cover.recipes.possible & (cover.own_need > cover.begin)
    added = True
    while added and cover.excess.max(initial=0) > 0:
        added = False
        heap: list[tuple[float, int]] = []
        for page in np.flatnonzero(open_pages & ~cover.planned).tolist():
            gain = cover.gain(page)
            if gain > 0:
                heap.append(((cover.marginal_seconds(page) + _EPSILON_S) / gain, page))
        heapq.heapify(heap)
        while heap and cover.excess.max(initial=0) > 0:
            stale, page = heapq.heappop(heap)
            gain = cover.gain(page)
            if gain <= 0:
                continue  # for now: another choice may make it worth while, in the next round
            score = (cover.marginal_seconds(page) + _EPSILON_S) / gain
            if heap and score > heap[0][0] and score > stale:
                heapq.heappush(heap, (score, page))
                continue
            cover.add(page)
            added = True


def foresee(graph: StepGraph, budget_bytes: int) -> Foresight:
    """Choose what to drop in the next step that is like `graph`.

    Args:
        graph: the recorded step; its seconds should come from more than one run of it.
        budget_bytes: what may be live at any moment.

    Returns:
        Weights for every value of the step.
    """
    cover = _Cover(graph, budget_bytes)
    _choose(cover)
    own_seconds = np.array([graph.op_seconds[ops].sum() for ops in cover.recipes.ops])
    for page in np.argsort(-own_seconds):
        if cover.planned[page]:
            cover.take_back(int(page))
    ratio = own_seconds / np.maximum(cover.bytes, 1)
    rebuilt = np.full(graph.n_values, np.inf)
    rebuilt[graph.saved] = ratio
    weights = rebuilt.copy()
    weights[graph.saved] = np.where(cover.planned, ratio * _PLANNED, ratio)
    ran = np.zeros(graph.n_ops, dtype=bool)
    for page in np.flatnonzero(cover.planned):
        ran[cover.recipes.ops[page]] = True
    return Foresight(
        weights=weights,
        rebuilt_weights=rebuilt,
        planned=cover.planned,
        predicted_seconds=float(graph.op_seconds[ran].sum()),
        predicted_peak_bytes=int(
            budget_bytes + (cover.excess + cover.infeasible).max(initial=-budget_bytes)
        ),
    )

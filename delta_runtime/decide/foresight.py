"""What to drop in a step whose graph is known.

At each op of the recorded step, `ordinary + watermark - budget` bytes have to be away. Dropping a
saved value covers its bytes from after its last use in forward until it is needed again: at its own
first unpack, or earlier when a dropped value downstream is rebuilt from it. It costs the seconds of
the op that made it and of the unsaved ops in between. A value that was rebuilt early may be dropped
once more until its own use (`again`), at the cost of a second rebuild.

Three stages: a lazy greedy cover (least seconds per byte and op covered); where that is not enough,
a local search on a simulation of the whole backward pass, with `again` as a move; then whatever
turned out not to be needed is taken back. It is a heuristic: `planners` will hold the exact ones.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_runtime.core.graph import Floats, Ints, StepGraph

Mask = npt.NDArray[np.bool_]

_EPSILON_S = 1e-7  # no op is free
_MOST_WORK = 400_000  # uses played in the local search: about half a second
_PLANNED = 1e-4  # weight of a planned drop relative to an unplanned one: it goes first


@dataclass(frozen=True, eq=False)
class Foresight:
    """Weights by value of a repeated step, and what is expected of them.

    Args:
        weights: of each value, for the victim queue; smallest goes first.
        rebuilt_weights: the same once the value was rebuilt.
        planned: which saved values (rows of `graph.saved`) are to be dropped.
        again: which of them are to be dropped once more when they were rebuilt early.
        predicted_seconds: seconds of rebuilding.
        predicted_peak_bytes: highest live bytes expected; above the budget where no cover was found.
    """

    weights: Floats
    rebuilt_weights: Floats
    planned: Mask
    again: Mask
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
        self.original_excess = self.excess.copy()
        self._give_up()

    def _give_up(self) -> None:
        """Takes out of `excess` what no choice can cover: it must not drive the greedy choice."""
        most = np.zeros(len(self.excess) + 1)
        away = self.recipes.possible & (self.own_need > self.begin)
        np.add.at(most, self.begin[away], self.bytes[away])
        np.add.at(most, self.own_need[away], -self.bytes[away])
        self.excess -= np.maximum(self.excess - np.cumsum(most)[:-1], 0)

    def marginal_seconds(self, page: int) -> float:
        ops = self.recipes.ops[page]
        return float(self.graph.rerun_seconds[ops[self.run_op[ops] == 0]].sum())

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


@dataclass(frozen=True, eq=False)
class _Outcome:
    """What a choice leads to: seconds of rebuilding, and bytes too much at each op."""

    seconds: float
    excess: Floats

    @property
    def area(self) -> float:
        return float(np.maximum(self.excess, 0).sum())


def _work_bytes(graph: StepGraph, recipes: _Recipes) -> list[float]:
    """What rebuilding each saved value holds for a moment, beside the value and its saved parents."""
    made_bytes = np.bincount(graph.value_op, weights=graph.value_bytes, minlength=graph.n_ops)
    workspace = np.maximum(graph.op_watermark_bytes - made_bytes, 0)
    work = []
    for page, ops in enumerate(recipes.ops):
        passing = made_bytes[ops].sum() - graph.value_bytes[graph.saved[page]]
        work.append(float(passing + workspace[ops].max(initial=0)))
    return work


class _Simulation:
    """Plays backward with a choice of drops, as the runtime would without any further pressure."""

    def __init__(self, cover: _Cover) -> None:
        graph = cover.graph
        self.cover = cover
        self.bytes = cover.bytes
        self.base = (cover.original_excess).copy()
        self.begin = cover.begin.tolist()
        self.made_at = graph.saved.tolist()
        self.own_need = cover.own_need.tolist()
        self.seconds = [float(graph.rerun_seconds[ops].sum()) for ops in cover.recipes.ops]
        self.work_bytes = _work_bytes(graph, cover.recipes)
        self.parents = [parents.tolist() for parents in cover.recipes.parents]
        self.gone = np.searchsorted(graph.op_tick, graph.released_at, side="right").tolist()
        uses = [
            (int(at), page)
            for page in range(len(graph.saved))
            for at in np.searchsorted(
                graph.op_tick,
                graph.uses[graph.use_offsets[page] : graph.use_offsets[page + 1]],
                side="right",
            )
            - 1
        ]
        self.uses = sorted(uses)

    def play(self, dropped: Mask, again: Mask) -> _Outcome:
        n_ops = len(self.base)
        away = np.zeros(n_ops + 1)
        extra: dict[int, float] = {}
        resident = (~dropped).tolist()
        once_more = again.tolist()
        for page in np.flatnonzero(dropped).tolist():
            away[self.begin[page]] += self.bytes[page]
            # What is never asked for stays away.
        seconds = 0.0
        for at, page in self.uses:
            if resident[page] and self.gone[page] >= at:
                continue
            todo, stack = {page}, [page]
            while stack:
                for parent in self.parents[stack.pop()]:
                    there = resident[parent] and self.gone[parent] >= at
                    if not there and parent not in todo:
                        todo.add(parent)
                        stack.append(parent)
            order = sorted(todo, key=self.made_at.__getitem__)  # parents first
            last_reader = {
                parent: made for made in order for parent in self.parents[made] if parent in todo
            }
            most, passing = 0.0, 0.0
            ends: dict[int, list[float]] = {}
            for made in order:
                seconds += self.seconds[made]
                most = max(most, passing + self.work_bytes[made])
                if made != page and (
                    (once_more[made] and self.own_need[made] > at) or self.gone[made] < at
                ):
                    passing += self.bytes[made]
                    ends.setdefault(last_reader.get(made, made), []).append(self.bytes[made])
                    most = max(most, passing)
                elif not resident[made]:
                    resident[made] = True
                    away[max(at, self.begin[made])] -= self.bytes[made]
                passing -= sum(ends.pop(made, ()))
            extra[at] = max(extra.get(at, 0.0), most)
        excess = self.base - np.cumsum(away)[:-1]
        if extra:
            # Rebuilding happens before the op: beside what is live then, but not beside the op's own needs.
            at_ops = np.fromiter(extra, dtype=np.int64)
            need = np.fromiter(extra.values(), dtype=np.float64)
            own = self.cover.graph.op_watermark_bytes[np.minimum(at_ops + 1, n_ops - 1)]
            np.maximum.at(excess, at_ops, excess[at_ops] + np.maximum(need - own, 0))
        return _Outcome(seconds, excess)


def _search(simulation: _Simulation, dropped: Mask, again: Mask) -> _Outcome:
    """Adds drops, and second drops, where the simulation is still over the budget."""
    cover = simulation.cover
    best = simulation.play(dropped, again)
    plays = 1
    allowed = max(64, _MOST_WORK // max(1, len(simulation.uses)))
    tried_in_vain = np.zeros(len(best.excess), dtype=bool)
    while plays < allowed:
        open_excess = np.where(tried_in_vain, 0, best.excess)
        worst = int(np.argmax(open_excess))
        if open_excess[worst] <= 0:
            break
        spanning = (cover.begin <= worst) & (cover.own_need > worst) & cover.recipes.possible
        moves = [(page, False) for page in np.flatnonzero(spanning & ~dropped).tolist()]
        moves += [(page, True) for page in np.flatnonzero(spanning & dropped & ~again).tolist()]
        found: tuple[float, int, bool, _Outcome] | None = None
        for page, second in moves:
            mask = again if second else dropped
            mask[page] = True
            outcome = simulation.play(dropped, again)
            mask[page] = False
            plays += 1
            gained = best.area - outcome.area
            if gained > 0:
                score = (max(outcome.seconds - best.seconds, 0) + _EPSILON_S) / gained
                if found is None or score < found[0]:
                    found = (score, page, second, outcome)
        if found is None:
            tried_in_vain[worst] = True
            continue
        (again if found[2] else dropped)[found[1]] = True
        best = found[3]
        tried_in_vain[:] = False
    return best


def _prune(simulation: _Simulation, dropped: Mask, again: Mask, best: _Outcome) -> _Outcome:
    """Takes back, dearest first, what is not needed for the excess to be as small as it is."""
    order = np.argsort([-seconds for seconds in simulation.seconds])
    for mask in (again, dropped):
        for page in order.tolist():
            if not mask[page] or (mask is dropped and again[page]):
                continue
            mask[page] = False
            outcome = simulation.play(dropped, again)
            if outcome.area <= best.area and outcome.seconds <= best.seconds:
                best = outcome
            else:
                mask[page] = True
    return best


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
    simulation = _Simulation(cover)
    dropped = cover.planned.copy()
    again = np.zeros(len(dropped), dtype=bool)
    outcome = _search(simulation, dropped, again)
    outcome = _prune(simulation, dropped, again, outcome)
    ratio = np.array(simulation.seconds) / np.maximum(cover.bytes, 1)
    weights = np.full(graph.n_values, np.inf)
    rebuilt = weights.copy()
    weights[graph.saved] = np.where(dropped, ratio * _PLANNED, ratio)
    rebuilt[graph.saved] = np.where(again, ratio * _PLANNED, ratio)
    return Foresight(
        weights=weights,
        rebuilt_weights=rebuilt,
        planned=dropped,
        again=again,
        predicted_seconds=outcome.seconds,
        predicted_peak_bytes=int(budget_bytes + outcome.excess.max(initial=-budget_bytes)),
    )

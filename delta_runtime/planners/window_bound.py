"""How few seconds more than the ordinary step any plan can take that drops: a bound by a program of whole numbers.

What is rebuilt needs what it is rebuilt from, which `least_seconds` leaves out. Here a value is there or not: with half
of each value there, each would find half of what it needs. The program stays small, because backward is cut into few
windows, and what comes first within one is left open.

Covers plans that drop what `Recipes.possible` allows; the runtime drops nothing else. Does not cover copies, nor what a
rebuild holds for a moment.

Note: the program
  The windows end at the first op behind which anything is asked for, and at those behind which the largest values are.
  The slots of a value are the windows, cut where the value itself is asked for, from the op before which it may leave
  to the last one behind which it, or what is rebuilt from it, is asked for.
  x[i, s]: value i is there before slot s and throughout it, or a node holds it. r[i, s]: it is rebuilt behind an op of
  slot s.
  1. Nothing comes from nowhere: x[i, s] <= x[i, s-1] + r[i, s-1]. Before its first slot a value is there.
  2. What is asked for at the end of a slot is there: x[i, s] + r[i, s] >= 1.
  3. What is rebuilt finds what it is rebuilt from. Each parent j was there before the slot of j in which that happens
     begins, or is rebuilt in it: r[i, s] <= x[j, first-1] + the sum of r[j, first-1 .. last], over the slots of j from
     the first to the last that have an op of s. A parent that is gone is rebuilt behind the same op.
  4. At each op what is too much is away: the sum of bytes * (1 - x) >= excess, over what may be away. A value that is
     asked for is there until the node that asked has ended; after the last time it is away for nothing.
  5. An op runs again in a window at least as often as any value is rebuilt in it that needs it to.
  Cost: the seconds of all ops that run again. Every plan is a solution, and costs no less: 1 to 5 say what must be,
  never when.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from itertools import pairwise

import numpy as np

from delta_runtime.core.recipes import Recipes, recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.planners.least_seconds import least_seconds
from delta_runtime.planners.linear_program import ONE, TOLERANCE, LinearProgram, SolverFailed
from delta_runtime.planners.presence import Presence

_WINDOWS = (12, 32, 64, 128)
"""About so many, one program after the other: the more, the closer the bound, and the longer it takes."""
_MOST_COLUMNS = 100_000
"""A program that may have more is not made: the solver takes hours for it."""
_MOST_STRETCHES = 24
"""In each window it has to fit at so many places, those with the most that is too much."""
_GAP = 1e-4


def window_bound(
    graph: StepGraph, budget_bytes: int, *, time_limit_s: float = 60.0
) -> float | None:
    """Return seconds that every plan that drops takes on top of the ordinary step; None if none can fit.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        time_limit_s: after so long, beside what `least_seconds` takes, the highest bound so far is the result; it is no
            lower than that of `least_seconds`.

    Raises:
        SolverFailed: see `least_seconds`.
        ImportError: scipy is not installed.
    """
    bound_s = least_seconds(graph, budget_bytes)
    if not bound_s:
        return bound_s
    ends_s = time.monotonic() + time_limit_s
    recipes = recipes_of(graph)
    presence = Presence(graph, recipes)
    tried: set[int] = set()
    for most in _WINDOWS:
        events = _events(presence, most)
        many = 2 * len(graph.saved) * len(events) > _MOST_COLUMNS
        if many or len(events) in tried or time.monotonic() >= ends_s:
            break
        tried.add(len(events))
        program = _Windows(presence, recipes, budget_bytes, events).program
        try:
            answer = program.solve(time_limit_s=max(ends_s - time.monotonic(), 0.0), gap=_GAP)
        except SolverFailed:
            break
        if answer.impossible:
            return None
        if answer.bound is not None:
            # What the solver takes for met may be missed by a little.
            bound_s = max(bound_s, answer.bound * (1 - TOLERANCE))
    return bound_s


def _events(presence: Presence, most: int) -> list[int]:
    """Return the ops at which windows end: where the largest values are asked for, about so many."""
    rows = [
        row for row in np.flatnonzero(presence.recipes.possible).tolist() if presence.asked[row]
    ]
    if not rows:
        return [presence.graph.n_ops - 1]
    events = {min(min(presence.asked[row]) for row in rows), presence.graph.n_ops - 1}
    bytes_ = presence.graph.saved_bytes
    for row in sorted(rows, key=lambda row: (-int(bytes_[row]), row)):
        if len(events) >= most:
            break
        events |= presence.asked[row]
    return sorted(events)


class _Slots:
    """The slots of a value: it has the ops from `begins[s]` to before `begins[s + 1]` in slot s.

    Those before `gone` have a column x, all have a column r.
    """

    def __init__(self, first: int, gone: int, last: int, cuts: set[int]) -> None:
        """Cut the ops from `first` to `last` behind each of `cuts`, and where the value is gone."""
        inside = {cut + 1 for cut in cuts if first <= cut < last}
        if first < gone <= last:
            inside.add(gone)
        self.begins = sorted({first, last + 1} | inside)
        self.first, self.gone, self.last = first, gone, last
        self.there: list[int] = []  # columns x
        self.reruns: list[int] = []  # columns r

    def __len__(self) -> int:
        return len(self.begins) - 1

    def of(self, op: int) -> int:
        """Return the slot that an op is in."""
        return bisect_left(self.begins, op + 1) - 1


class _Windows:
    """The program of the Note."""

    def __init__(
        self, presence: Presence, recipes: Recipes, budget_bytes: int, events: list[int]
    ) -> None:
        self.graph, self.presence, self.recipes = presence.graph, presence, recipes
        self.events = events
        self.unit = max(float(budget_bytes), 1.0)  # of bytes
        self.bytes: list[float] = self.graph.saved_bytes.astype(np.float64).tolist()
        self.program = LinearProgram()
        self.seconds = np.maximum(np.nan_to_num(self.graph.rerun_seconds), 0.0)
        self.slots = self._slots()
        self.asked_last = {row: max(presence.asked[row]) for row in self.slots}
        for row in self.slots:
            self._columns(row)
        self._runs()
        for row in self.slots:
            self._stays_or_is_rebuilt(row)
            self._finds_parents(row)
        self._fits(budget_bytes)

    def _slots(self) -> dict[int, _Slots]:
        """Return the slots of each value that may be dropped, and is asked for."""
        presence, graph = self.presence, self.graph
        rows = [
            row
            for row in np.flatnonzero(self.recipes.possible).tolist()
            if presence.asked[row] and max(presence.asked[row]) >= presence.leaves[row]
        ]
        last = {row: max(presence.asked[row]) for row in rows}
        for row in sorted(rows, key=lambda row: -int(graph.saved[row])):
            for parent in self.recipes.parents[row].tolist():
                if parent in last:
                    last[parent] = max(last[parent], last[row])
        events = set(self.events)
        return {
            row: _Slots(
                int(presence.leaves[row]),
                int(presence.gone[row]),
                last[row],
                events | presence.asked[row],
            )
            for row in rows
        }

    def _columns(self, row: int) -> None:
        slots, needed = self.slots[row], self.presence.needed[row]
        for begin, end in pairwise(slots.begins):
            if begin < slots.gone:
                # Before its first slot it is there. Before another one it is, if a node holds it already.
                held = begin == slots.first or begin - 1 in needed
                fixed = held and all(op in needed for op in range(begin, end))
                column = ONE if fixed else self.program.column(0.0, 0.0, 1.0, whole=True)
                slots.there.append(column)
            slots.reruns.append(self.program.column(0.0, 0.0, 1.0))

    def _runs(self) -> None:
        """Rule 5. The seconds of an op that one value alone needs are those of its r."""
        needed_by = Counter(op for row in self.slots for op in self.recipes.ops[row].tolist())
        runs: dict[tuple[int, int], int] = {}  # by window and op
        for row, slots in self.slots.items():
            ops = [op for op in self.recipes.ops[row].tolist() if self.seconds[op] > 0]
            own_s = float(sum(self.seconds[op] for op in ops if needed_by[op] == 1))
            within: dict[int, list[int]] = {}
            for begin, column in zip(slots.begins, slots.reruns, strict=False):
                self.program.add_cost(column, own_s)
                within.setdefault(bisect_left(self.events, begin), []).append(column)
            for op in ops:
                if needed_by[op] == 1:
                    continue
                for window, columns in within.items():
                    if (window, op) not in runs:
                        runs[window, op] = self.program.column(float(self.seconds[op]), 0.0, np.inf)
                    terms = [(each, 1.0) for each in columns]
                    self.program.row([*terms, (runs[window, op], -1.0)], -np.inf, 0.0)

    def _stays_or_is_rebuilt(self, row: int) -> None:
        """Rules 1 and 2."""
        slots, asked = self.slots[row], self.presence.asked[row]
        for slot, column in enumerate(slots.there):
            if slot > 0:
                before = [(slots.there[slot - 1], -1.0), (slots.reruns[slot - 1], -1.0)]
                self.program.row([(column, 1.0), *before], -np.inf, 0.0)
        for op in asked:
            if op >= slots.first:
                slot = slots.of(op)
                there = [(slots.there[slot], 1.0)] if slot < len(slots.there) else []
                self.program.row([*there, (slots.reruns[slot], 1.0)], 1.0, np.inf)

    def _finds_parents(self, row: int) -> None:
        """Rule 3."""
        slots = self.slots[row]
        for parent in self.recipes.parents[row].tolist():
            its = self.slots.get(parent)
            if its is None:
                continue
            for (begin, end), column in zip(pairwise(slots.begins), slots.reruns, strict=True):
                if begin < its.first:
                    continue  # at the begin of this slot the parent cannot have left yet
                low, high = its.of(begin), its.of(end - 1)
                found = [(each, -1.0) for each in its.reruns[low : high + 1]]
                if begin < its.gone:
                    if low == 0:
                        continue  # before its first slot the parent is there
                    found += [(its.there[low - 1], -1.0), (its.reruns[low - 1], -1.0)]
                self.program.row([(column, 1.0), *found], -np.inf, 0.0)

    def _fits(self, budget_bytes: int) -> None:
        """Rule 4, for the worst op of a stretch in which the same is away."""
        graph, presence = self.graph, self.presence
        n = graph.n_ops
        excess = (graph.op_ordinary_bytes + graph.op_watermark_bytes - budget_bytes).astype(
            np.float64
        )
        bytes_ = self.bytes
        leaves, gone = presence.leaves.tolist(), presence.gone.tolist()
        # After its last time: by op, bytes that are away for nothing.
        idle = np.zeros(n + 1)
        edges = {0, n}
        for row in range(len(graph.saved)):
            begin = max([leaves[row], *(op + 1 for op in presence.needed[row])])
            if begin < gone[row]:
                idle[begin] += bytes_[row]
                idle[gone[row]] -= bytes_[row]
            edges |= {begin, gone[row], leaves[row]}
        for row, slots in self.slots.items():
            edges.update(slots.begins)
            needed = presence.needed[row]
            edges.update(op for op in needed if op - 1 not in needed)
            edges.update(op + 1 for op in needed if op + 1 not in needed)
        idle = np.cumsum(idle)
        stretches: dict[int, list[tuple[float, int]]] = {}  # by window
        for begin, end in pairwise(sorted(edge for edge in edges if edge <= n)):
            worst = float((excess[begin:end] - idle[begin:end]).max())
            if worst > 0:
                stretches.setdefault(bisect_left(self.events, begin), []).append((worst, begin))
        for within in stretches.values():
            for worst, begin in sorted(within, reverse=True)[:_MOST_STRETCHES]:
                self._away(begin, worst)

    def _away(self, op: int, excess: float) -> None:
        terms = []
        most = 0.0
        for row, slots in self.slots.items():
            if (
                slots.first <= op < min(slots.gone, self.asked_last[row])
                and op not in self.presence.needed[row]
            ):
                share = self.bytes[row] / self.unit
                terms.append((slots.there[slots.of(op)], share))
                most += share
        self.program.row(terms, -np.inf, most - excess / self.unit)

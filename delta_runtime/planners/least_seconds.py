"""How few seconds more than the ordinary step any plan can take: a bound by a linear program.

Covers plans that copy, one lane in each direction, and drop what `Recipes.possible` allows. The bound is valid, not
tight: what is rebuilt needs other values too, copies come late, and what is away is away as a whole; none of that
counts here (`window_bound` knows the first and the last, of plans that drop). HiGHS solves it; see `linear_program`.

Note: the program
  A value is asked for again and again. Between two times it may be away: by a part d that is dropped, and by a part s
  that is copied out, d + s <= 1. Behind the last time it may be away for nothing.
  1. At each op what is too much is away: the sum of bytes * (d + s) over the values that may be away >= excess.
  2. Who was dropped is made again, by its own op and by all unsaved ones of its recipe. An op runs at least as often as
     for the one value that asks for it the most: runs >= sum of d over the times of that value.
  3. Who was copied out crosses the lane out once, and the lane in each time.
  4. The step takes its ordinary seconds and those of rule 2, and no less than either lane is busy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import Floats, StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners.greedy_drops import GreedyCover
from delta_runtime.planners.linear_program import LinearProgram
from delta_runtime.planners.presence import asked_ops, gone_ops, needed_ops


def least_seconds(
    graph: StepGraph, budget_bytes: int, *, drops: bool = True, links: Links | None = None
) -> float | None:
    """Return seconds that every plan within the budget takes on top of the ordinary step; None if none can fit.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        drops: whether values may be dropped.
        links: speed of the lanes; None where nothing may be copied.

    Raises:
        SolverFailed: neither a bound was found, nor a proof that none can fit.
        ImportError: scipy is not installed.
    """
    excess = (graph.op_ordinary_bytes + graph.op_watermark_bytes - budget_bytes).astype(np.float64)
    if excess.max(initial=0.0) <= 0:
        return 0.0
    lanes = links if links and links.out_bytes_per_s > 0 and links.in_bytes_per_s > 0 else None
    program = _Program(graph, drops=drops, lanes=lanes)
    program.cover(excess)
    return program.solve()


@dataclass(frozen=True, slots=True)
class _Absence:
    """A time in which a value may be away: at the ops from `begin` to before `end`."""

    row: int
    begin: int
    end: int
    last: bool


def _absences(graph: StepGraph, cover: GreedyCover) -> list[_Absence]:
    found = []
    asked = asked_ops(graph)
    needed = needed_ops(graph, asked)
    gone = gone_ops(graph)
    for row in range(len(graph.saved)):
        begin = int(cover.begin[row])
        for op in sorted(needed[row]):  # in which it has to be there
            if op >= begin:
                if op in asked[row] and op > begin:
                    found.append(_Absence(row, begin, op, last=False))
                begin = op + 1
        if gone[row] > begin:
            found.append(_Absence(row, begin, int(gone[row]), last=True))
    return found


class _Program:
    """The program of the Note; columns are d, s, runs of ops, who is copied out, and the extra seconds."""

    def __init__(self, graph: StepGraph, *, drops: bool, lanes: Links | None) -> None:
        self.graph, self.lanes = graph, lanes
        recipes = recipes_of(graph)
        cover = GreedyCover(graph, 0, recipes)
        self.absences = _absences(graph, cover)
        self.bytes = graph.saved_bytes.astype(np.float64)
        self.program = LinearProgram()
        self.extra = self.program.column(1.0, 0.0, np.inf)
        # Of each absence: those whose sum is the part that is away.
        self.columns: list[list[int]] = []
        dropped: dict[int, list[int]] = {}
        copied: dict[int, list[int]] = {}
        for absence in self.absences:
            ways = [self._column(1.0)]  # for nothing, if it is the last one
            if not absence.last:
                ways = []
                if drops and recipes.possible[absence.row]:
                    ways.append(self._column(1.0))
                    dropped.setdefault(absence.row, []).append(ways[-1])
                if lanes is not None:
                    ways.append(self._column(1.0))
                    copied.setdefault(absence.row, []).append(ways[-1])
            if len(ways) > 1:
                self._at_most([(column, 1.0) for column in ways], 1.0)
            self.columns.append(ways)
        self._rebuild(dropped, [each.tolist() for each in recipes.ops])
        if lanes is not None:
            self._copy(copied, lanes)

    def _column(self, upper: float) -> int:
        return self.program.column(0.0, 0.0, upper)

    def _at_most(self, terms: list[tuple[int, float]], limit: float) -> None:
        self.program.row(terms, -np.inf, limit)

    def _rebuild(self, dropped: dict[int, list[int]], ops: list[list[int]]) -> None:
        """Rule 2, and the first half of rule 4."""
        runs: dict[int, int] = {}
        for row, columns in dropped.items():
            for op in ops[row]:
                if op not in runs:
                    runs[op] = self._column(np.inf)
                self._at_most([*((each, 1.0) for each in columns), (runs[op], -1.0)], 0.0)
        seconds = np.maximum(np.nan_to_num(self.graph.rerun_seconds), 0.0)
        terms = [(column, float(seconds[op])) for op, column in runs.items()]
        self._at_most([*terms, (self.extra, -1.0)], 0.0)

    def _copy(self, copied: dict[int, list[int]], lanes: Links) -> None:
        """Rule 3, and the second half of rule 4."""
        out: list[tuple[int, float]] = [(self.extra, -1.0)]
        back: list[tuple[int, float]] = [(self.extra, -1.0)]
        for row, columns in copied.items():
            leaves = self._column(1.0)
            out.append((leaves, float(self.bytes[row]) / lanes.out_bytes_per_s))
            for column in columns:
                self._at_most([(column, 1.0), (leaves, -1.0)], 0.0)
                back.append((column, float(self.bytes[row]) / lanes.in_bytes_per_s))
        ordinary = np.maximum(np.nan_to_num(self.graph.op_seconds), 0.0)
        for terms in (out, back):
            self._at_most(terms, float(ordinary.sum()))

    def cover(self, excess: Floats) -> None:
        """Rule 1, for each op that has too much and none of whose neighbours has more with the same values away."""
        n = self.graph.n_ops
        begins: list[list[int]] = [[] for _ in range(n + 1)]
        ends: list[list[int]] = [[] for _ in range(n + 1)]
        for index, absence in enumerate(self.absences):
            begins[min(absence.begin, n)].append(index)
            ends[min(absence.end, n)].append(index)
        away: set[int] = set()
        worst = 0.0
        for op in range(n):
            if begins[op] or ends[op]:
                self._cover_one(away, worst)
                worst = 0.0
                away.difference_update(ends[op])
                away.update(each for each in begins[op] if self.absences[each].end > op)
            worst = max(worst, float(excess[op]))
        self._cover_one(away, worst)

    def _cover_one(self, away: set[int], excess: float) -> None:
        if excess > 0:
            terms = [
                (column, -float(self.bytes[self.absences[each].row]))
                for each in sorted(away)
                for column in self.columns[each]
            ]
            self._at_most(terms, -excess)

    def solve(self) -> float | None:
        """Return the least extra seconds; None if there is no solution."""
        answer = self.program.solve()
        return None if answer.impossible else answer.cost

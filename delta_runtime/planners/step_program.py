"""Checkmate's program for a recorded step: what is there at each op, and what runs again in front of it.

The same variables as in `checkmate`, on what a runtime can choose: forward runs once, in its order, and holds what it
holds; backward asks for saved values, and before each of its ops any of them may be rebuilt. What the step holds beside
saved values is a number for each op. The account is that of the judge of plans (`validate`), so that a whole solution
costs and holds what the judge says.

Covers drops, exactly and by its linear relaxation, on graphs small enough for the solver (`contraction`). Does not
cover copies.

Note: the program
  x[t, i]: value i is on the device during op t. r[t, i]: it is rebuilt behind op t (there, by the judge's account,
  during t). p[t, i]: it is rebuilt in passing only. F[t, i, k]: in passing, it goes once k was made.
  1. x is 1 from the op that makes a value until forward lets go of it, at each op behind which it is asked for, and as
     long as the node that asked may hold it.
  2. Nothing comes from nowhere: x[t, i] <= x[t-1, i] + r[t, i].
  3. What is rebuilt finds what it starts from: r[t, i] <= x[t, j] + r[t, j] for each j that it is rebuilt from.
  4. Memory: what the step holds beside + sum of bytes * x <= budget.
  5. A rebuild holds more for a moment: p[t, i] >= r[t, i] - x[t, i]; each of the values that are made one after the
     other, with its workspace, beside those in passing that were made before and have not gone. What the
     op itself held for a moment has gone by then.
  6. What goes went once, when its reader ran: F[t, i, k] <= r[t, k], their sum <= p[t, i]; and no later reader runs:
     sum of F[t, i, k'] for k' < k, + r[t, k] <= 1.
  Cost: the seconds of all r. Or, without a budget, the peak: the budget is then that of the ordinary step, and the
  share of it that is not used is taken off each row of 4 and 5.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import Recipes, rebuild_seconds, recipes_of
from delta_runtime.core.reruns import Reruns
from delta_runtime.core.step_graph import Floats, StepGraph
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.linear_program import ONE, TOLERANCE, ZERO, LinearProgram
from delta_runtime.planners.plan_result import judged
from delta_runtime.planners.presence import Presence, spare_behind

_THRESHOLDS = tuple(round(0.1 * each, 1) for each in range(1, 10))
_EFFORT = 4.0  # of joint, for what the solver is to beat
_SLACK = 1e-7
"""Of the budget, that the solver is given more: it takes rows for met that are missed by less, but not always."""
_FEW_COLUMNS = 200
"""So few that the solver proves the least peak in a moment, on any machine."""


def _check_contracted(graph: StepGraph, recipes: Recipes) -> None:
    """Raise ValueError unless each value that may be dropped is rebuilt by one op, and by one of its own."""
    possible = [ops.tolist() for ops, one in zip(recipes.ops, recipes.possible, strict=True) if one]
    if (
        not graph.contracted
        or len({op for ops in possible for op in ops}) < len(possible)
        or max(map(len, possible), default=1) > 1
    ):
        raise ValueError(
            "a value may be rebuilt by several ops, or by one that makes another value too: contract the step"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the solver made of a step.

    Args:
        plan: the best plan found; None where there was none.
        bound_s: no plan that drops rebuilds for fewer seconds; None where that was not shown.
        impossible: it was shown that no plan fits.
    """

    plan: Plan | None
    bound_s: float | None
    impossible: bool


class StepProgram:
    """The program of the Note for one graph and one budget.

    Args:
        graph: a contracted step: each value that may be dropped is rebuilt by one op, and by one of its own.
        budget_bytes: what may be live at any moment; None where that is what is to be made least, in place of seconds.
    """

    def __init__(self, graph: StepGraph, budget_bytes: float | None) -> None:
        self.graph = graph
        self.budget_bytes = float(graph.peak_bytes if budget_bytes is None else budget_bytes)
        self.unit = max(self.budget_bytes, 1.0)
        self.recipes: Recipes = recipes_of(graph)
        _check_contracted(graph, self.recipes)
        self.presence = Presence(graph, self.recipes)
        self.leaves = self.presence.leaves.tolist()
        self.made = self.presence.made.tolist()
        self.gone = self.presence.gone.tolist()
        self.asked = self.presence.asked
        self.rows = np.flatnonzero(self.recipes.possible).tolist()
        self.rows.sort(key=lambda row: int(graph.saved[row]))
        self.bytes = graph.saved_bytes.astype(np.float64)
        self.seconds = rebuild_seconds(graph, self.recipes)
        self.workspace = Reruns(graph, self.recipes).held_alone()
        self.spare = spare_behind(graph)
        self.beside = self.presence.beside(self.rows)
        self.program = LinearProgram()
        # By how much of the budget it is not used, where it is to be made least.
        self.unused = self.program.column(-1.0, 0.0, 1.0) if budget_bytes is None else ZERO
        self.last = self._last_needed()
        self.there: dict[tuple[int, int], int] = {}
        self.reruns: dict[tuple[int, int], int] = {}
        for op in range(graph.n_ops):
            self._columns(op)
        for op in range(graph.n_ops):
            self._rows(op)

    def _last_needed(self) -> dict[int, int]:
        """Return the last op behind which each value is rebuilt for itself or for another, if it is at all."""
        last = {row: max(self.asked[row], default=-1) for row in self.rows}
        for row in reversed(self.rows):
            for parent in self.recipes.parents[row].tolist():
                if parent in last:
                    last[parent] = max(last[parent], last[row])
        return last

    def _columns(self, op: int) -> None:
        for row in self.rows:
            if not self.made[row] <= op < self.gone[row]:
                continue
            fixed = op < self.leaves[row] or op in self.presence.needed[row]
            self.there[op, row] = ONE if fixed else self.program.column(0.0, 0.0, 1.0, whole=True)
        for row in self.rows:
            if self.leaves[row] <= op <= self.last[row]:
                self.reruns[op, row] = self.program.column(
                    self.seconds[row] if self.unused == ZERO else 0.0, 0.0, 1.0, whole=True
                )

    def _is_there(self, op: int, row: int) -> int:
        return self.there.get((op, row), ZERO)

    def _rows(self, op: int) -> None:
        for row in self.rows:
            column = self._is_there(op, row)
            if column != ZERO and op >= self.leaves[row]:  # rule 2
                before = self._is_there(op - 1, row) if op > self.made[row] else ONE
                rerun = self.reruns.get((op, row), ZERO)
                self.program.row([(column, 1.0), (before, -1.0), (rerun, -1.0)], -np.inf, 0.0)
        resident = [(self._is_there(op, row), self.bytes[row] / self.unit) for row in self.rows]
        resident.append((self.unused, 1.0))
        room = (self.budget_bytes - self.beside[op]) / self.unit + _SLACK
        self.program.row(resident, -np.inf, room)  # rule 4
        again = [row for row in self.rows if (op, row) in self.reruns]
        for row in again:  # rule 3
            for parent in self.recipes.parents[row].tolist():
                if parent in self.last:
                    self.program.row(
                        [
                            (self.reruns[op, row], 1.0),
                            (self._is_there(op, parent), -1.0),
                            (self.reruns.get((op, parent), ZERO), -1.0),
                        ],
                        -np.inf,
                        0.0,
                    )
        self._passing(op, again, resident, room)

    def _passing(
        self, op: int, again: list[int], resident: list[tuple[int, float]], room: float
    ) -> None:
        """Rules 5 and 6."""
        unit = self.unit
        room += float(self.spare[op]) / unit
        readers: dict[int, list[int]] = {}
        for row in again:
            for parent in self.recipes.parents[row].tolist():
                readers.setdefault(parent, []).append(row)
        passing: dict[int, int] = {}
        goes: dict[int, list[tuple[int, int]]] = {}  # by the reader: (value, F)
        for row in again:
            if not readers.get(row):
                continue
            here = self.reruns[op, row]
            there = self._is_there(op, row)
            if there == ONE:
                continue
            passing[row] = self.program.column(0.0, 0.0, 1.0)
            self.program.row([(here, 1.0), (there, -1.0), (passing[row], -1.0)], -np.inf, 0.0)
            earlier: list[tuple[int, float]] = []
            for reader in readers[row]:
                if earlier:
                    self.program.row([*earlier, (self.reruns[op, reader], 1.0)], -np.inf, 1.0)
                column = self.program.column(0.0, 0.0, 1.0)
                self.program.row([(column, 1.0), (self.reruns[op, reader], -1.0)], -np.inf, 0.0)
                earlier.append((column, 1.0))
                goes.setdefault(reader, []).append((row, column))
            self.program.row([*earlier, (passing[row], -1.0)], -np.inf, 0.0)
        held: int | None = None  # in passing, before a value is made
        for row in again:
            before = [] if held is None else [(held, 1.0)]
            making = [(self.reruns[op, row], self.workspace[row] / unit)]
            if row in passing:
                making.append((passing[row], self.bytes[row] / unit))
            if row in passing or self.workspace[row] > 0:
                self.program.row([*resident, *before, *making], -np.inf, room)
            before += making[1:]
            before += [(column, -self.bytes[gone] / unit) for gone, column in goes.get(row, ())]
            if before:
                held = self.program.column(0.0, 0.0, np.inf)
                self.program.row([(held, -1.0), *before], -np.inf, 0.0)

    def fastest(self, time_limit_s: float, gap: float) -> Outcome:
        """Return the plan with the fewest seconds of rebuilding: by rounding and by joint first, then exactly.

        Args:
            time_limit_s: after so long the best plan so far counts.
            gap: stop where its seconds are within this share of the bound.

        Raises:
            SolverFailed: see `LinearProgram.solve`.
        """
        begin = time.monotonic()
        rounded = self.rounded()
        if rounded.impossible:
            return rounded
        best = min(
            (each for each in (rounded.plan, self._of_joint()) if each is not None),
            key=lambda plan: plan.predicted_seconds,
            default=None,
        )
        if best is not None:
            # What is dearer is not looked for. The solver may pass a row by its tolerance, and so may this one.
            most_s = best.predicted_seconds * (1 + TOLERANCE)
            if rounded.bound_s is not None and most_s * (1 - gap) <= rounded.bound_s:
                return Outcome(best, rounded.bound_s, impossible=False)
            terms = [(column, self.seconds[row]) for (_, row), column in self.reruns.items()]
            self.program.row(terms, 0.0, most_s)
        end_s = begin + time_limit_s
        answer = self.program.solve(time_limit_s=max(end_s - time.monotonic(), 0.0), gap=gap)
        bounds = [each for each in (answer.bound, rounded.bound_s) if each is not None]
        found = None if answer.x is None else self._of(answer.x)
        impossible = answer.impossible
        if answer.x is not None and found is None:
            # It passes the budget by the solver's tolerance.
            tighter = StepProgram(self.graph, self.budget_bytes * (1 - TOLERANCE)).program
            answer = tighter.solve(time_limit_s=max(end_s - time.monotonic(), 0.0), gap=gap)
            found = None if answer.x is None else self._of(answer.x)
        if found is not None and (best is None or found.predicted_seconds < best.predicted_seconds):
            best = found
        return Outcome(best, max(bounds, default=None), impossible and best is None)

    def rounded(self) -> Outcome:
        """Return the best plan from rounding the relaxation at nine thresholds, and the bound that the relaxation is.

        Raises:
            SolverFailed: see `LinearProgram.solve`.
        """
        there, bound_s = self.relaxation()
        if there is None:
            return Outcome(None, None, impossible=True)
        plans = (self._judged(self.presence.plan(there >= threshold)) for threshold in _THRESHOLDS)
        fitting = [each for each in plans if each is not None]
        best = min(fitting, key=lambda plan: plan.predicted_seconds, default=None)
        return Outcome(best, bound_s, impossible=False)

    def _of_joint(self) -> Plan | None:
        """Return the joint heuristic's plan, which the solver is to beat; None where it does not fit."""
        return self._judged(
            joint_heuristic.plan(self.graph, int(self.budget_bytes), effort=_EFFORT)
        )

    def small_plans(self) -> list[Plan]:
        """Return plans that hold little, for a program without a budget: the same each time.

        Values are there only when they are asked for, or as the relaxation says, at nine thresholds. Where the program
        is small, the last plan holds the least. A large one is not solved: what the solver has when the clock stops it
        is another plan each time.

        Raises:
            SolverFailed: see `LinearProgram.solve`.
        """
        theres = [np.zeros((self.graph.n_ops, len(self.graph.saved)), bool)]
        relaxed = self.relaxation()[0]
        if relaxed is not None:
            theres += [relaxed >= threshold for threshold in _THRESHOLDS]
        if len(self.program) <= _FEW_COLUMNS:
            answer = self.program.solve()
            if answer.x is not None:
                theres.append(self._there(answer.x) > 0.5)
        return [self.presence.plan(there) for there in theres]

    def _of(self, x: Floats) -> Plan | None:
        return self._judged(self.presence.plan(self._there(x) > 0.5))

    def _judged(self, plan: Plan) -> Plan | None:
        """Return a plan with what the judge says of it; None where it does not fit."""
        told = judged(plan, self.graph).plan
        return told if told.predicted_peak_bytes <= self.budget_bytes else None

    def relaxation(self) -> tuple[Floats | None, float | None]:
        """Solve with fractions.

        Returns:
            How much of each value is there at each op, (ops, saved values), and the seconds; None for both where
            there is no solution.
        """
        answer = self.program.solve(relaxed=True)
        if answer.x is None:
            return None, None
        return self._there(answer.x), answer.cost

    def _there(self, x: Floats) -> Floats:
        found = np.zeros((self.graph.n_ops, len(self.graph.saved)))
        for (op, row), column in self.there.items():
            found[op, row] = 1.0 if column == ONE else x[column]
        return found

"""Linear programs, put together column by column and row by row, and solved by HiGHS through scipy.

Covers programs whose cost is made least, some of whose columns may have to be whole numbers. Does not cover what the
columns mean: that is for the planners.

Note: what the solver returns
  1. HiGHS takes a row for met where it is violated by less than a tolerance, and a column for whole where it is nearly
     so. Rows are therefore scaled to 1, and whoever needs a row to hold exactly checks: a sum of bytes may pass its
     limit by the share TOLERANCE.
  2. HiGHS stops within a millionth of the bound, whatever the gap that is asked for. Costs below 1, such as seconds of
     an op, are therefore scaled to about 1. Larger ones stay: whole numbers let it cut more off.
  3. That there is no solution is only said where the solver proved it. Where it failed, an error says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from delta_runtime.core.errors import DeltaError
from delta_runtime.core.step_graph import Floats

TOLERANCE = 1e-5
"""By so much of its largest factor may a row be violated, the tolerances of whole numbers in it added up."""

ONE, ZERO = -1, -2
"""In place of a column: what always is 1, or 0."""

_LARGE_COST = 1e6
_ROUNDING = 1e-9  # a sum of constants may miss its limit by so much
_OPTIMAL, _LIMIT, _IMPOSSIBLE, _TROUBLE = 0, 1, 2, 4  # scipy's statuses; 3 is unbounded


class SolverFailed(DeltaError):
    """The solver neither found a solution, nor proved that there is none, nor ran out of time. Nothing was changed."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What the solver found.

    Args:
        x: the columns of the best solution; None where none was found.
        cost: what they come to; infinite where there are none.
        bound: no solution costs less; None where that was not shown.
        impossible: it was proved that there is no solution. Without one and without that, time ran out.
    """

    x: Floats | None
    cost: float
    bound: float | None
    impossible: bool


class LinearProgram:
    """Columns with a cost and bounds, rows that limit sums of them.

    Example:
        >>> program = LinearProgram()
        >>> apples = program.column(2.0, 0.0, 10.0)
        >>> pears = program.column(3.0, 0.0, 10.0, whole=True)
        >>> program.row([(apples, 1.0), (pears, 2.0)], 5.0, np.inf)
        >>> answer = program.solve()
        >>> round(answer.cost, 6), answer.x.round(6).tolist()
        (8.0, [1.0, 2.0])
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._whole: list[bool] = []
        self._row_lower: list[float] = []
        self._row_upper: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._factors: list[float] = []

    def column(self, cost: float, lower: float, upper: float, whole: bool = False) -> int:
        """Add a column, and return its index.

        Args:
            cost: of one unit of it.
            lower, upper: its least and its most; they may be infinite.
            whole: whether it must be a whole number.
        """
        self._costs.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._whole.append(whole)
        return len(self._costs) - 1

    def add_cost(self, column: int, cost: float) -> None:
        """Have a unit of a column cost so much more."""
        self._costs[column] += cost

    def __len__(self) -> int:
        """Return how many columns there are."""
        return len(self._costs)

    def row(self, terms: Iterable[tuple[int, float]], lower: float, upper: float) -> None:
        """Limit a sum.

        Args:
            terms: columns, each with its factor; the terms of one column add up. ONE and ZERO may stand for columns.
            lower, upper: least and most of the sum; they may be infinite.
        """
        factors: dict[int, float] = {}
        for column, factor in terms:
            factors[column] = factors.get(column, 0.0) + factor
        constant = factors.pop(ONE, 0.0)
        factors.pop(ZERO, None)
        lower, upper = lower - constant, upper - constant
        if not factors:
            if lower <= _ROUNDING and upper >= -_ROUNDING:
                return
            # There is no solution: the solver takes no row without columns for that.
            factors[self.column(0.0, 0.0, 0.0)] = 1.0
            lower, upper = 1.0, 1.0
        scale = max(map(abs, factors.values())) or 1.0
        self._rows += [len(self._row_lower)] * len(factors)
        self._columns += factors
        self._factors += [factor / scale for factor in factors.values()]
        self._row_lower.append(lower / scale)
        self._row_upper.append(upper / scale)

    def solve(
        self,
        time_limit_s: float | None = None,
        gap: float | None = None,
        relaxed: bool = False,
    ) -> Answer:
        """Make the cost least.

        Args:
            time_limit_s: after so long the best solution so far is the answer; None is as long as it takes.
            gap: stop where the cost is within this share of the bound; HiGHS's own where None is given.
            relaxed: let whole columns be fractions.

        Raises:
            SolverFailed: neither a solution, nor a proof that there is none, nor the time limit.
            ImportError: scipy is not installed.
        """
        if not self._costs:  # of which the solver makes nothing
            return Answer(np.empty(0), 0.0, 0.0, impossible=False)
        end_s = None if time_limit_s is None else time.monotonic() + time_limit_s
        found = self._run(end_s, gap, relaxed)
        if found.status == _TROUBLE:
            # Among others, presolve may see no more than that a program is either impossible or unbounded.
            found = self._run(end_s, gap, relaxed, presolve=False)
        whole = not relaxed and any(self._whole)
        bound = found.mip_dual_bound if whole else found.fun
        if found.status == _IMPOSSIBLE:
            return Answer(None, np.inf, None, impossible=True)
        if found.status == _LIMIT and (found.x is None or not whole):
            # Without whole columns, what was reached by then need not keep to the rows.
            return Answer(None, np.inf, self._cost(bound) if whole else None, impossible=False)
        if found.x is None or found.status not in (_OPTIMAL, _LIMIT):
            raise SolverFailed(
                "The solver failed: it found no solution, and did not prove that there is none.",
                asked=f"{len(self._costs)} columns, {len(self._row_lower)} rows",
                found=str(found.message),
                tried="solving it with presolve, and without where that failed",
            )
        return Answer(
            np.asarray(found.x, np.float64),
            float(np.dot(found.x, self._costs)),
            self._cost(bound),
            impossible=False,
        )

    def _run(
        self, end_s: float | None, gap: float | None, relaxed: bool, presolve: bool = True
    ) -> Any:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import csr_array
        except ImportError as error:
            raise ImportError(
                'a linear program needs scipy: pip install "delta-runtime[planners]"'
            ) from error
        options: dict[str, Any] = {"presolve": presolve}
        if end_s is not None:
            options["time_limit"] = max(end_s - time.monotonic(), 0.0)
        if gap is not None:
            options["mip_rel_gap"] = gap
        shape = len(self._row_lower), len(self._costs)
        matrix = csr_array((self._factors, (self._rows, self._columns)), shape=shape)
        return milp(
            np.array(self._costs) / self._unit_of_cost,
            constraints=LinearConstraint(matrix, self._row_lower, self._row_upper),
            bounds=Bounds(self._lower, self._upper),
            integrality=np.array(self._whole, np.float64) * (not relaxed),
            options=options,
        )

    @property
    def _unit_of_cost(self) -> float:
        """A power of two near the largest cost, where that is below 1 or above a million; rule 2."""
        most = max(map(abs, self._costs), default=0.0)
        odd = 0 < most < 1 or most > _LARGE_COST
        return float(2.0 ** np.floor(np.log2(most))) if odd else 1.0

    def _cost(self, solvers: float | None) -> float | None:
        """Return a cost of the solver's as one of this program's."""
        if solvers is None or not np.isfinite(solvers):
            return None
        return float(solvers) * self._unit_of_cost

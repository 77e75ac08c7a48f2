"""Rotor: a chain whose stages may keep their input alone or all that autograd saves, in the least time.

From Herrmann et al., "Optimal checkpointing for heterogeneous chains" (Inria RR-9302, 2019), with two changes: the
test of the room for `SAVE` and the span over which `CHECKPOINT` asks for room to run forward are the exact ones, so
that the result is the optimum over all persistent schedules. *Persistent*: what was stored stays until its backward.

Covers one chain, where stage `i` reads what stage `i - 1` made and nothing else; parameters are not counted. Recorded
steps become chains in `step_chain`.

Note: the recurrence
  C(s, t, m) is the least time of the forwards still needed and of all backwards of stages s to t, where x_s is there
  and *not* counted in m, and the gradient y_(t+1) is counted.
  1. C(L, L, m) = b_L if m >= g_L + q_L: the loss. g_i is the size of y_i, in the paper a_i.
  2. Save all of stage s: f_s + b_s + C(s+1, t, m - A_(s+1)), where there is room to run it forward beside y_(t+1), and
     backward beside what it saved.
  3. Keep x_s, run forward to x_j alone, do j to t, then s to j-1 from x_s again:
     f_s + ... + f_(j-1) + C(j, t, m - a_j) + C(s, j-1, m), where there is room to run forward beside y_(t+1).
  A row of the table is all m at once. The rows over which 3 takes its minimum lie side by side in memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import Floats, Ints, StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners.chain import Action, Chain, Kind, replay
from delta_runtime.planners.plan_result import Judged, PlanResult, judged, moving_nothing, result_of
from delta_runtime.planners.solution import Solution
from delta_runtime.planners.step_chain import StepChain

SLOTS = 500

_FINE_SLOTS = 2000  # for the least memory, which rounding up would miss
_MOST_MEMORY = 1.5
"""Times the budget. Of recorded steps a chain says up to 1.2 times what the judge says."""
_MOST_JUDGED = 20  # schedules of one table at first, and as many around the best of these
_SAME = 1e-9  # share of the seconds: less is rounding


def solve(
    f: Sequence[float],
    b: Sequence[float],
    a: Sequence[float],
    abar: Sequence[float],
    f_tmp: Sequence[float],
    b_tmp: Sequence[float],
    memory: float,
    slots: int | None = None,
    g: Sequence[float] | None = None,
) -> Solution[list[Action]] | None:
    """Return the fastest persistent schedule that holds no more than `memory`; None if there is none.

    Args:
        f, b, a, abar, f_tmp, b_tmp, g: see `Chain`.
        memory: room for everything, the input of the first stage included; in the unit of the sizes.
        slots: the unit of the table is so small that `memory` holds at least so many; 500 where None is given. Sizes
            are rounded up to whole units. Whole numbers up to that many are taken as they are, so that the result is
            exact.

    Takes time in proportion to slots * L^3, and 8 * slots * L^2 bytes.
    """
    chain = Chain(f, b, a, abar, f_tmp, b_tmp, g)
    table = _table_for(chain, memory, SLOTS if slots is None else slots)
    schedule = None if table is None else table.schedule(table.columns - 1)
    if schedule is None:
        return None
    seconds, peak = replay(chain, schedule)
    return Solution(seconds, peak, schedule)


def plan(
    graph: StepGraph, budget_bytes: int, tiers: Links | None = None, *, slots: int = SLOTS
) -> PlanResult:
    """Return the fastest plan for a recorded step, taken as a chain; see `step_chain`.

    One table has the schedules for all amounts of memory up to a half more than the budget. Up to twenty that take
    different times are judged on the whole step, then as many around the fastest that fits; the fastest of these that
    fits is taken.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        tiers: not used; this planner copies nothing.
        slots: see `solve`.
    """
    begin = time.perf_counter()
    if graph.peak_bytes <= budget_bytes:
        return moving_nothing(graph, budget_bytes, begin)
    chain = StepChain(graph)
    columns = chain.columns()
    most = int(_MOST_MEMORY * slots) if slots > 0 else slots
    table = _table_for(columns, _MOST_MEMORY * budget_bytes, most)
    best = None if table is None else _best_judged(table, chain, budget_bytes)
    if best is None:
        ends = (chain.plan_of_schedule(_smallest(columns)), Plan.moving_nothing(graph))
        best = min((judged(each, graph) for each in ends), key=lambda each: each.verdict.peak_bytes)
    return result_of(best, budget_bytes, begin)


def _best_judged(table: _Table, step: StepChain, budget_bytes: int) -> Judged | None:
    """Return the fastest that fits of those plans of a table that are judged; None where none of the first does."""
    rooms = table.rooms()
    plans: dict[int, Judged] = {}

    def best() -> int | None:
        fit = [each for each, plan in plans.items() if plan.verdict.peak_bytes <= budget_bytes]
        return min(fit, key=lambda each: plans[each].seconds, default=None)

    def judge(places: Ints) -> None:
        for each in places.tolist():
            schedule = None if each in plans else table.schedule(int(rooms[each]))
            if schedule is not None:
                plans[each] = judged(step.plan_of_schedule(schedule), step.contraction.whole)

    coarse = np.unique(np.linspace(0, len(rooms) - 1, min(_MOST_JUDGED, len(rooms))).astype(int))
    judge(coarse)
    around = best()
    if around is None:
        return None
    at = int(np.searchsorted(coarse, around))
    ends = coarse[max(at - 1, 0)], coarse[min(at + 1, len(coarse) - 1)]
    judge(np.unique(np.linspace(*ends, _MOST_JUDGED).astype(int)))
    found = best()
    assert found is not None
    return plans[found]


def _smallest(chain: Chain) -> list[Action]:
    """Return a schedule that holds about the least."""
    memory = least_memory(chain.a, chain.abar, chain.f_tmp, chain.b_tmp, chain.g)
    while True:
        table = _table_for(chain, memory, _FINE_SLOTS)
        schedule = table and table.schedule(table.columns - 1)
        if schedule:
            return schedule
        memory *= 1 + 1 / _FINE_SLOTS


def _table_for(chain: Chain, memory: float, slots: int) -> _Table | None:
    """Return the table for so much memory; None where the first stage's input does not fit.

    Raises:
        ValueError: there is not one slot.
    """
    if slots < 1:
        raise ValueError(f"slots must be at least 1, not {slots}")
    sizes, room = _in_units(chain, memory, slots)
    left = room - int(sizes.a[0])
    return _Table(chain, sizes, left) if left >= 0 else None


def least_memory(
    a: Sequence[float],
    abar: Sequence[float],
    f_tmp: Sequence[float],
    b_tmp: Sequence[float],
    g: Sequence[float] | None = None,
) -> float:
    """Return the smallest `memory` for which `solve` finds a schedule, before sizes are rounded to units."""
    n = len(f_tmp)
    chain = Chain([0.0] * n, [0.0] * (n + 1), a, abar, f_tmp, b_tmp, g)
    sizes = np.asarray(chain.a, np.float64)
    gradients = np.asarray(chain.gradients, np.float64)
    saved = np.asarray(chain.abar, np.float64)
    least = np.full((n + 1, n + 1), np.inf)  # of m in C(s, t, m)
    least[n, n] = gradients[n] + chain.b_tmp[n]
    for s in range(n - 1, -1, -1):
        forward = _running_forward(sizes, np.asarray(chain.f_tmp, np.float64), s)
        after = _gradient_after(gradients, s)
        for t in range(s, n + 1):
            keep = max(
                after[t - s] + saved[s + 1] + chain.f_tmp[s],
                gradients[s] + gradients[s + 1] + saved[s + 1] + chain.b_tmp[s],
                saved[s + 1] + (least[s + 1, t] if t > s else 0.0),
            )
            split = np.maximum(sizes[s + 1 : t + 1] + least[s + 1 : t + 1, t], least[s, s:t])
            split = np.maximum(split, after[t - s] + forward[: t - s])
            least[s, t] = min(keep, split.min(initial=np.inf))
    return float(least[0, n] + sizes[0])


@dataclass(frozen=True, slots=True)
class _Sizes:
    a: Ints
    abar: Ints
    f_tmp: Ints
    b_tmp: Ints
    g: Ints


def _in_units(chain: Chain, memory: float, slots: int) -> tuple[_Sizes, int]:
    """Sizes in whole units, rounded up, and how many units there is room for."""
    columns = (chain.a, chain.abar, chain.f_tmp, chain.b_tmp, chain.gradients)
    whole = all(float(each).is_integer() for column in columns for each in column)
    if whole:
        unit = max(memory // slots, 1)
    else:
        unit = memory / slots if memory > 0 else 1.0
    rounded = (
        np.ceil(np.asarray(column, np.float64) / unit).astype(np.int64) for column in columns
    )
    return _Sizes(*rounded), int(memory // unit)


def _running_forward(sizes: Floats | Ints, tmp: Floats | Ints, s: int) -> Floats | Ints:
    """For j = s + 1 to L: the most that the forwards from x_s to x_j hold, x_s not counted."""
    held = sizes[s + 1 :] + tmp[s:]
    held[1:] += sizes[s + 1 : -1]
    return np.maximum.accumulate(held)


def _gradient_after(gradients: Floats | Ints, s: int) -> Floats | Ints:
    """For t = s to L: size of the gradient that stages s to t start from."""
    return np.append(gradients[s + 1 :], 0)


class _Table:
    """C(s, t, m) for all s <= t and m from 0 to `room`.

    Held twice: by s, and by t, moved up by a_j and with the forwards' seconds up to j added, as rule 3 reads them.
    """

    def __init__(self, chain: Chain, sizes: _Sizes, room: int) -> None:
        n = chain.length
        self.chain, self.sizes, self.n = chain, sizes, n
        self.columns = room + 1
        self.seconds = np.array([0.0, *accumulate(chain.f)])  # of the forwards before each stage
        self.by_s = [np.full((n + 1 - s, self.columns), np.inf) for s in range(n + 1)]
        self.by_t = [np.full((t + 1, self.columns), np.inf) for t in range(n + 1)]
        self.scratch = np.empty((n + 1, self.columns))
        self.by_s[n][0, int(sizes.g[n] + sizes.b_tmp[n]) :] = chain.b[n]
        self._move_up(n, n)
        for s in range(n - 1, -1, -1):
            forward = _running_forward(sizes.a, sizes.f_tmp, s)
            after = _gradient_after(sizes.g, s)
            for t in range(s, n + 1):
                row = self.by_s[s][t - s]
                self._save_into(row, s, t)
                self._split_into(row, s, t, forward[: t - s] + after[t - s])
                self._move_up(s, t)

    def _move_up(self, s: int, t: int) -> None:
        size = min(int(self.sizes.a[s]), self.columns)
        moved = self.by_t[t][s, size:]
        np.add(self.by_s[s][t - s, : self.columns - size], self.seconds[s], out=moved)

    def _save_needs(self, s: int, t: int) -> tuple[int, int]:
        """Room to save stage s, and how much of it stays taken."""
        g, kept = self.sizes.g, int(self.sizes.abar[s + 1])
        after = int(g[t + 1]) if t < self.n else 0
        forward = after + kept + int(self.sizes.f_tmp[s])
        backward = int(g[s] + g[s + 1]) + kept + int(self.sizes.b_tmp[s])
        return max(forward, backward, kept), kept

    def _save_into(self, row: Floats, s: int, t: int) -> None:
        room, kept = self._save_needs(s, t)
        if room >= self.columns:
            return
        spent = self.chain.f[s] + self.chain.b[s]
        if t == s:
            row[room:] = spent
        else:
            np.add(
                self.by_s[s + 1][t - s - 1, room - kept : self.columns - kept],
                spent,
                out=row[room:],
            )

    def _split_into(self, row: Floats, s: int, t: int, forward: Ints) -> None:
        """Take the minimum over j; `forward` is the room to run from s to each j, which never falls with j."""
        end = self.columns
        count = int(
            np.searchsorted(forward, end, side="left")
        )  # as many fit into all that there is
        # Between two steps of `forward` the same j are open to all m.
        while count > 0:
            begin = int(forward[count - 1])
            both = self.scratch[:count, : end - begin]
            np.add(
                self.by_t[t][s + 1 : s + 1 + count, begin:end],
                self.by_s[s][:count, begin:end],
                out=both,
            )
            best = both.min(axis=0)
            best -= self.seconds[s]
            np.minimum(row[begin:end], best, out=row[begin:end])
            end = begin
            count = int(np.searchsorted(forward, end, side="left"))

    def _best_split(self, s: int, t: int, m: int) -> tuple[float, int]:
        """Least seconds of rule 3, and its j; inf where none fits."""
        a = self.sizes.a
        forward = (
            _running_forward(a, self.sizes.f_tmp, s)[: t - s]
            + _gradient_after(self.sizes.g, s)[t - s]
        )
        count = int(np.searchsorted(forward, m, side="right"))
        if count == 0:
            return np.inf, -1
        values = self.by_t[t][s + 1 : s + 1 + count, m] + self.by_s[s][:count, m]
        best = int(values.argmin())
        return float(values[best] - self.seconds[s]), s + 1 + best

    def rooms(self) -> Ints:
        """Return the least room for each time that the whole chain may take, the most room first."""
        seconds = self.by_s[0][self.n]
        before = np.append(np.inf, seconds[:-1])
        faster = np.isfinite(seconds) & (seconds < before * (1 - _SAME))
        return np.flatnonzero(faster)[::-1]

    def schedule(self, room: int) -> list[Action] | None:
        """Return what to do with so much room beside the first stage's input; None where it is too little."""
        if not np.isfinite(self.by_s[0][self.n, room]):
            return None
        actions: list[Action] = []
        to_do: list[tuple[int, int, int] | Action] = [(0, self.n, room)]
        while to_do:
            item = to_do.pop()
            if isinstance(item, Action):
                actions.append(item)
                continue
            s, t, m = item
            if s == self.n:
                actions.append(Action(Kind.LOSS, s))
                continue
            split, j = self._best_split(s, t, m)
            saving = np.inf
            needs, kept = self._save_needs(s, t)
            if m >= needs:
                rest = self.by_s[s + 1][t - s - 1, m - kept] if t > s else 0.0
                saving = self.chain.f[s] + self.chain.b[s] + rest
            if split < saving:
                actions.append(Action(Kind.CHECKPOINT, s))
                actions += (Action(Kind.SKIP, k) for k in range(s + 1, j))
                to_do += [(s, j - 1, m), (j, t, m - int(self.sizes.a[j]))]
            else:
                actions.append(Action(Kind.SAVE, s))
                to_do.append(Action(Kind.BACKWARD, s))
                if t > s:
                    to_do.append((s + 1, t, m - kept))
        return actions

"""Moccasin: Checkmate's problem with few whole numbers, as the times in which each output is kept.

From Bartan et al., "Moccasin: Efficient Tensor Rematerialization for Neural Networks" (ICML 2023, arXiv 2304.14463): a
constraint program over intervals. CP-SAT of OR-tools solves it, in a process of its own: OR-tools and another HiGHS
cannot be loaded side by side, and a process can be stopped.

Nodes, stages and schedules are those of `checkmate`. Covers what it covers, as far as no node runs more often than a
limit says. Does not cover recorded steps.

Note: the program
  The turn of node k in stage t, k <= t, is event t (t + 1) / 2 + k.
  1. An output is kept in up to `most_runs` intervals of events. One begins where its node runs: the first at the node's
     own turn in its own stage, each later one at its turn in a later stage, behind the end of the one before.
  2. A node that runs finds what it reads: an interval of that began before and has not ended.
  3. At each event the outputs that are kept take no more than the budget; what a node needs beside them while it
     runs is an interval of one event.
  Cost: that of the nodes of all intervals.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from delta_runtime.planners.checkmate import (
    Action,
    Dag,
    Kind,
    PlannerTimeout,
    cheapest,
    greedy_schedules,
    least_memory,
    replay,
)
from delta_runtime.planners.linear_program import SolverFailed
from delta_runtime.planners.solution import Solution

_LARGEST = 2**40
"""CP-SAT adds whole numbers of 64 bits. Columns with a larger sum, or of no whole numbers, are scaled to this one."""
_LONGEST_S = 1e6  # of any limit
_TO_STOP_S = 10.0  # beyond its limit, until the solver's process is stopped


@dataclass(frozen=True, slots=True)
class _Program:
    """What the solver's process is told; sizes and costs are whole numbers, costs in units of `cost_unit`."""

    deps: Sequence[Sequence[int]]
    cpu: Sequence[int]
    ram: Sequence[int]
    workspace: Sequence[int]
    budget: int
    cost_unit: float
    most_runs: int
    time_limit_s: float
    gap: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """What it says.

    Args:
        intervals: node, first and last event of each; None where none were found.
        bound: no schedule of the program costs less, in the unit of its arguments.
        impossible: it was proved that there is none.
    """

    intervals: list[tuple[int, int, int]] | None
    bound: float
    impossible: bool


def solve(
    deps: Sequence[Iterable[int]],
    cpu: Sequence[float],
    ram: Sequence[float],
    budget: float,
    workspace: Sequence[float] | None = None,
    *,
    most_runs: int = 3,
    time_limit_s: float = 60.0,
    gap: float = 1e-6,
) -> Solution[list[Action]] | None:
    """Return the schedule of least cost that holds no more than `budget`, and runs no node too often; None if none is.

    Sizes that are not whole numbers, or very large, are rounded to units of about 1e-12 of all of them together. Where
    what is found passes the budget by that, the solver is asked once more, with sizes rounded up. A schedule that
    evicts greedily is the result where it is better, or the only one: it may run a node more often, and bound is None.

    Args:
        deps, cpu, ram, budget, workspace: see `checkmate.solve`.
        most_runs: how often a node may run; at least 1. With 2 the program is smaller, and may miss the optimum.
        time_limit_s: after so long the best schedule so far is returned, with the bound that was reached.
        gap: stop where the cost is within this share of the bound.

    Raises:
        ValueError: `most_runs` is less than 1, or the columns do not fit each other.
        PlannerTimeout: the limit came before any schedule.
        SolverFailed: the solver's process did not start, or ended without an answer; the text has its last words.
        ImportError: OR-tools is not installed.
    """
    if most_runs < 1:
        raise ValueError(f"most_runs is {most_runs}: each node runs once at least")
    if importlib.util.find_spec("ortools") is None:
        raise ImportError('moccasin needs OR-tools: pip install "delta-runtime[cp-sat]".')
    dag = Dag.of(deps, cpu, ram, workspace)
    if budget < least_memory(dag):
        return None
    answer = _ask(_program(dag, budget, most_runs, time_limit_s, gap))
    if answer.intervals is not None and not _fits(dag, budget, answer.intervals):
        answer = _ask(_program(dag, budget, most_runs, time_limit_s, gap, strictly=True))
    schedules = greedy_schedules(dag, budget)
    if answer.intervals is not None:
        schedules.append(_as_schedule(dag.n, answer.intervals))
    best = cheapest(dag, budget, schedules)
    if best is not None:
        bound = None
        if answer.intervals is not None:
            bound = min(answer.bound, best.objective)
        return Solution(best.objective, best.peak, best.schedule, bound=bound)
    if answer.impossible:
        return None
    raise PlannerTimeout(
        f"moccasin: no schedule of {dag.n} nodes within {budget:g} was found in {time_limit_s:g} s, "
        "nor a proof that there is none. Give it more time, or a graph with fewer nodes."
    )


def _program(
    dag: Dag,
    budget: float,
    most_runs: int,
    time_limit_s: float,
    gap: float,
    *,
    strictly: bool = False,
) -> _Program:
    """Return what the solver is told; if `strictly`, no sizes that have to be rounded pass the budget by that."""
    sizes = [*dag.ram, *dag.workspace]
    size_unit, cost_unit = _unit([*sizes, sum(sizes)]), _unit([*dag.cpu, sum(dag.cpu)])
    limit = min(budget, sum(sizes))
    exact = size_unit == 1
    rounded = math.ceil if strictly and not exact else round
    return _Program(
        deps=[[int(each) for each in inputs] for inputs in dag.deps],
        cpu=[round(each / cost_unit) for each in dag.cpu],
        ram=[rounded(each / size_unit) for each in dag.ram],
        workspace=[rounded(each / size_unit) for each in dag.workspace],
        budget=math.floor(limit / size_unit) + (0 if exact or strictly else dag.n + 1),
        cost_unit=cost_unit,
        most_runs=int(most_runs),
        time_limit_s=min(time_limit_s, _LONGEST_S),
        gap=gap,
    )


def _fits(dag: Dag, budget: float, intervals: Iterable[tuple[int, int, int]]) -> bool:
    return replay(dag, _as_schedule(dag.n, intervals))[1] <= budget


def _unit(values: Sequence[float]) -> float:
    """Return what counts as one, for values of which the last is the sum of some: 1 where they are whole numbers."""
    whole = all(float(each).is_integer() for each in values)
    return 1.0 if whole and values[-1] <= _LARGEST else max(values[-1], 1e-300) / _LARGEST


def _as_schedule(n: int, intervals: Iterable[tuple[int, int, int]]) -> list[Action]:
    """Return the schedule of `n` nodes that keeps outputs so; what is there at the end is not freed."""
    runs: dict[int, int] = {}
    frees: dict[int, list[int]] = {}
    for node, first, last in intervals:
        runs[first] = node
        if last < _event(n - 1, n - 1):
            frees.setdefault(last, []).append(node)
    schedule: list[Action] = []
    for event in sorted({*runs, *frees}):
        if event in runs:
            schedule.append(Action(Kind.RUN, runs[event]))
        schedule += [Action(Kind.FREE, node) for node in sorted(frees.get(event, ()))]
    return schedule


def _event(stage: int, node: int) -> int:
    return stage * (stage + 1) // 2 + node


def _ask(program: _Program) -> _Answer:
    """Have a process of its own solve a program; it is stopped if this one is interrupted."""
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable or "python3", "-c", start],
            input=json.dumps(asdict(program)),
            capture_output=True,
            text=True,
            timeout=program.time_limit_s + _TO_STOP_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Answer(None, 0.0, impossible=False)
    except OSError as error:
        raise SolverFailed(
            "moccasin: the solver's process did not start.", found=str(error)
        ) from error
    last_words = [*done.stderr.strip().splitlines(), *done.stdout.strip().splitlines()][-1:]
    try:
        plain = json.loads(done.stdout.strip().splitlines()[-1])
        intervals = plain["intervals"]
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise SolverFailed(
            "moccasin: the solver's process ended without an answer.",
            found=f"exit status {done.returncode} after {time.monotonic() - begin:.0f} s; its last "
            f"words: {last_words[0] if last_words else 'none'}",
        ) from error
    return _Answer(
        None if intervals is None else [(node, first, last) for node, first, last in intervals],
        plain["bound"],
        plain["impossible"],
    )


# ---------------------------------------------------------------- in the process of its own


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """An interval of the program, from event `begin` to before `end`, if it is `there`."""

    there: Any
    begin: Any
    end: Any


def _answer(program: _Program) -> _Answer:
    """Solve a program here."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    n, last = len(program.deps), _event(len(program.deps), 0)
    kept: list[list[_Kept]] = []
    lasting, demands = [], []
    for node in range(n):
        turns = [_event(stage, node) for stage in range(node, n)]
        kept.append([])
        for number in range(min(program.most_runs, len(turns))):  # rule 1
            first = number == 0
            there = model.new_constant(1) if first else model.new_bool_var("")
            domain = cp_model.Domain.from_values(turns[:1] if first else turns[number:])
            begin = model.new_int_var_from_domain(domain, "")
            end = model.new_int_var(turns[number] + 1, last, "")
            length = model.new_int_var(1, last, "")
            lasting.append(model.new_optional_interval_var(begin, length, end, there, ""))
            demands.append(program.ram[node])
            if program.workspace[node]:
                lasting.append(model.new_optional_fixed_size_interval_var(begin, 1, there, ""))
                demands.append(program.workspace[node])
            if not first:
                before = kept[node][-1]
                model.add(begin >= before.end).only_enforce_if(there)
                model.add_implication(there, before.there)
            kept[node].append(_Kept(there, begin, end))
    for node, inputs in enumerate(program.deps):
        for reading in kept[node]:
            for each in inputs:
                _find(model, reading, kept[each])
    model.add_cumulative(lasting, demands, program.budget)  # rule 3
    model.minimize(
        sum(
            program.cpu[node] * each.there
            for node, intervals in enumerate(kept)
            for each in intervals
        )
    )
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = program.time_limit_s
    solver.parameters.relative_gap_limit = program.gap
    solver.parameters.random_seed = 0
    solver.parameters.catch_sigint_signal = False  # it would leave Ctrl-C as the system has it
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(model.validate())
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _Answer(None, 0.0, impossible=status == cp_model.INFEASIBLE)
    intervals = [
        (node, solver.value(each.begin), solver.value(each.end) - 1)
        for node, of_node in enumerate(kept)
        for each in of_node
        if solver.value(each.there)
    ]
    # A rounded cost is off by half a unit for each run.
    off = 0.0 if program.cost_unit == 1 else 0.5 * n * program.most_runs
    return _Answer(
        intervals, (solver.best_objective_bound - off) * program.cost_unit, impossible=False
    )


def _find(model: Any, reading: _Kept, read: Sequence[_Kept]) -> None:
    """Rule 2, for one input of one run."""
    ways = []
    for each in read:
        way = model.new_bool_var("")
        model.add_implication(way, each.there)
        model.add(each.begin < reading.begin).only_enforce_if(way)
        model.add(each.end > reading.begin).only_enforce_if(way)
        ways.append(way)
    model.add_bool_or(ways).only_enforce_if(reading.there)


def main() -> None:
    """Read a program from standard input, and write the answer as the last line of standard output."""
    program = _Program(**json.load(sys.stdin))
    print("\n" + json.dumps(asdict(_answer(program))), flush=True)  # noqa: T201

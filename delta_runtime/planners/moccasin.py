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
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from delta_runtime.planners.checkmate import (
    Action,
    Dag,
    Kind,
    PlannerTimeout,
    cheapest,
    greedy_schedules,
    least_memory,
)
from delta_runtime.planners.linear_program import SolverFailed
from delta_runtime.planners.solution import Solution

_LARGEST = 2**40
"""CP-SAT adds whole numbers of 64 bits. Columns with a larger sum, or of no whole numbers, are scaled to this one."""
_TO_STOP_S = 10.0  # beyond its limit, until the solver's process is stopped


@dataclass(frozen=True, slots=True)
class _Program:
    """What the solver's process is told; sizes and costs are whole numbers."""

    deps: Sequence[Sequence[int]]
    cpu: Sequence[int]
    ram: Sequence[int]
    workspace: Sequence[int]
    budget: int
    most_runs: int
    time_limit_s: float
    gap: float


@dataclass(frozen=True, slots=True)
class _Answer:
    """What it says.

    Args:
        intervals: node, first and last event of each; None where none were found.
        bound: no schedule of the program costs less.
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

    Sizes that are not whole numbers, or very large, are rounded up to units of about 1e-12 of all sizes together. The
    bound, and that there is no schedule, are of the rounded ones. A schedule that evicts greedily is the result where
    it is better, or the only one: it may run a node more often.

    Args:
        deps, cpu, ram, budget, workspace: see `checkmate.solve`.
        most_runs: how often a node may run; at least 1. With 2 the program is smaller, and may miss the optimum.
        time_limit_s: after so long the best schedule so far is returned, with the bound that was reached.
        gap: stop where the cost is within this share of the bound.

    Raises:
        ValueError: `most_runs` is less than 1, or the columns do not fit each other.
        PlannerTimeout: the limit came before any schedule.
        SolverFailed: the solver's process ended without an answer; the text has its last words.
        ImportError: OR-tools is not installed.
    """
    if most_runs < 1:
        raise ValueError(f"most_runs is {most_runs}: each node runs once at least")
    if importlib.util.find_spec("ortools") is None:
        raise ImportError('moccasin needs OR-tools: pip install "delta-runtime[cp-sat]".')
    dag = Dag.of(deps, cpu, ram, workspace)
    if budget < least_memory(dag):
        return None
    most = sum(dag.ram) + sum(dag.workspace)
    size_unit, cost_unit = _unit([*dag.ram, *dag.workspace, most]), _unit([*dag.cpu, sum(dag.cpu)])
    answer = _ask(
        _Program(
            deps=dag.deps,
            cpu=[round(each / cost_unit) for each in dag.cpu],
            ram=[math.ceil(each / size_unit) for each in dag.ram],
            workspace=[math.ceil(each / size_unit) for each in dag.workspace],
            budget=math.floor(min(budget, most) / size_unit),
            most_runs=most_runs,
            time_limit_s=time_limit_s,
            gap=gap,
        )
    )
    schedules = greedy_schedules(dag, budget)
    if answer.intervals is not None:
        schedules.append(_as_schedule(dag.n, answer.intervals))
    best = cheapest(dag, budget, schedules)
    if best is not None:
        bound = None
        if answer.intervals is not None:
            rounding = 0.0 if cost_unit == 1 else cost_unit * dag.n * most_runs
            bound = min(answer.bound * cost_unit - rounding, best.objective)
        return Solution(best.objective, best.peak, best.schedule, bound=bound)
    if answer.impossible:
        return None
    raise PlannerTimeout(
        f"moccasin: no schedule of {dag.n} nodes within {budget:g} was found in {time_limit_s:g} s, "
        "nor a proof that there is none. Give it more time, or a graph with fewer nodes."
    )


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
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("DELTA_")
    }
    paths = [str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "delta_runtime.planners.moccasin"],
            input=json.dumps(asdict(program)),
            capture_output=True,
            text=True,
            env=environment,
            timeout=program.time_limit_s + _TO_STOP_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return _Answer(None, 0.0, impossible=False)
    if done.returncode != 0:
        last_words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise SolverFailed(
            "moccasin: the solver's process ended without an answer.",
            found=f"exit status {done.returncode} after {time.monotonic() - begin:.0f} s: {last_words[0]}",
        )
    plain = json.loads(done.stdout)
    intervals = plain["intervals"]
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
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return _Answer(None, 0.0, impossible=status == cp_model.INFEASIBLE)
    intervals = [
        (node, solver.value(each.begin), solver.value(each.end) - 1)
        for node, of_node in enumerate(kept)
        for each in of_node
        if solver.value(each.there)
    ]
    return _Answer(intervals, solver.best_objective_bound, impossible=False)


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
    """Read a program from standard input, and write the answer to standard output."""
    program = _Program(**json.load(sys.stdin))
    json.dump(asdict(_answer(program)), sys.stdout)


if __name__ == "__main__":
    main()

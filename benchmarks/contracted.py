"""Which planner wins on six recorded steps, and how far from the optimum is each?

A benchmark. Records one step of M1, M2 and M3 of scripts/workloads.py and of three models of tests/zoo with nothing
evicted. Contracts each to at most 45 ops and plans it at several budgets: exactly, by rounding the linear relaxation,
and by joint with lanes off. Then plans the whole step with every planner that drops, and sets them beside the bound of
`planners/least_seconds.py`. All seconds are the judge's, on top of the ordinary step. Nothing is executed but the
recorded steps: see `benchmarks/planned.py` for that. Takes about 20 minutes on two idle cores (`--graphs unet
--budgets 3`: one); needs no GPU. Exits 1 if joint is more than 5 % above a proved optimum, or an optimum was not
proved.

    python -m benchmarks.contracted [--graphs resnet50,gpt,vit,unet,t5,convnext] [--budgets 8] [--seconds 60]
        [--json FILE]

The budgets lie evenly between the least for which the relaxation has a solution, and the ordinary peak.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import delta_runtime as delta
from benchmarks.common import BENCH_WORKLOADS, MIB, SEED, console, machine, words, write_json
from delta_runtime.planners.contraction import by_size
from delta_runtime.planners.joint import plan as joint
from delta_runtime.planners.least_seconds import least_seconds
from delta_runtime.planners.plan_result import judged
from delta_runtime.planners.registry import PLANNERS
from delta_runtime.planners.step_program import StepProgram
from scripts.train_plain import THREADS

GRAPHS = ("resnet50", "gpt", "vit", "unet", "t5", "convnext")
WHOLE = ("recompute", "rotor", "checkmate", "min_peak", "chen")
GAP = 1e-3
WITHIN = 1.05  # of the optimum
_STEPS = 4
_WIDTH = 150
_BISECTIONS = 12


@dataclass(frozen=True, slots=True)
class Row:
    """One graph under one budget; seconds are None where there is no plan.

    Args:
        exact_s, bound_s, solver_s: on the contracted graph, and how long it took.
        rounded_s, joint_s: on the same.
        whole_s: of each planner on the whole graph.
        whole_bound_s: no plan that drops takes less on the whole graph.
    """

    graph: str
    ops: int
    budget_bytes: int
    exact_s: float | None
    bound_s: float | None
    solver_s: float
    rounded_s: float | None
    joint_s: float | None
    whole_s: dict[str, float | None] = field(default_factory=dict)
    whole_bound_s: float | None = None

    @property
    def proved(self) -> bool:
        """Whether the exact plan was shown to be the optimum."""
        return self.exact_s is None or (
            self.bound_s is not None and self.exact_s <= self.bound_s * (1 + 2 * GAP) + 1e-9
        )

    @property
    def joint_holds(self) -> bool:
        """Whether joint is near enough to a proved optimum."""
        if self.exact_s is None or not self.proved:
            return True
        return self.joint_s is not None and self.joint_s <= WITHIN * self.exact_s + 1e-9


def record(name: str) -> delta.StepGraph:
    """Return the record of a model's step, with the least seconds of a few."""
    runtime = delta.Runtime(policy="off", device="cpu", min_bytes=0)
    if name in BENCH_WORKLOADS:
        state = BENCH_WORKLOADS[name].build(SEED)
        for index in range(_STEPS):
            with runtime.step():
                state.loss(state.batch(index)).backward()
            state.model.zero_grad(set_to_none=True)
    else:
        import tests.zoo  # noqa: F401
        from tests.zoo.registry import ZOO

        built = ZOO[name].build(SEED)
        for index in range(_STEPS):
            batch = built.batch(index)
            with runtime.step():
                built.loss(batch).backward()
            built.model.zero_grad(set_to_none=True)
    graph = runtime.graph()
    runtime.close()
    return graph


def least_budget(graph: delta.StepGraph) -> int:
    """Return about the least budget for which the relaxation has a solution."""
    low, high = 0, graph.peak_bytes
    for _ in range(_BISECTIONS):
        middle = (low + high) // 2
        if StepProgram(graph, middle).relaxation()[0] is None:
            low = middle
        else:
            high = middle
    return high


def seconds_of(name: str, graph: delta.StepGraph, budget_bytes: int) -> float | None:
    """Return what a planner's plan of the whole step takes on top; None where it has none of its own."""
    result = PLANNERS[name].plan(graph, budget_bytes)
    return result.seconds if result.feasible and not result.fallback else None


def rows_of(name: str, budgets: int, time_limit_s: float) -> list[Row]:
    """Plan one model's step at several budgets."""
    graph = record(name)
    small = by_size(graph).graph
    low, high = least_budget(small), small.peak_bytes
    found = []
    for number in range(budgets):
        budget = low + (high - low) * number // budgets
        begin = time.perf_counter()
        exact = StepProgram(small, budget).fastest(time_limit_s, GAP)
        solver_s = time.perf_counter() - begin
        rounded = StepProgram(small, budget).rounded()
        mine = joint(small, budget)
        found.append(
            Row(
                name,
                small.n_ops,
                budget,
                judged(exact.plan, small).seconds if exact.plan else None,
                exact.bound_s,
                solver_s,
                judged(rounded.plan, small).seconds if rounded.plan else None,
                mine.seconds if mine.feasible else None,
                {each: seconds_of(each, graph, budget) for each in WHOLE},
                least_seconds(graph, budget),
            )
        )
        show(found[-1:], graph.seconds)
    return found


def show(rows: list[Row], step_s: float) -> None:
    """Print what came of a budget, in shares of the ordinary step."""

    def share(seconds: float | None) -> str:
        return "-" if seconds is None else f"{100 * seconds / step_s:.2f} %"

    table = Table("graph", "ops", "MiB", "exact", "bound", "solver", "rounded", "joint", "bound w.")
    for name in WHOLE:
        table.add_column(name)
    for row in rows:
        table.add_row(
            row.graph,
            str(row.ops),
            f"{row.budget_bytes / MIB:.1f}",
            share(row.exact_s) + ("" if row.proved else " ?"),
            share(row.bound_s),
            f"{row.solver_s:.1f} s",
            share(row.rounded_s),
            share(row.joint_s) + ("" if row.joint_holds else " !"),
            share(row.whole_bound_s),
            *(share(row.whole_s[name]) for name in WHOLE),
        )
    Console(width=_WIDTH).print(table)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="for the solver, each")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    rows = [
        row
        for name in words(options.graphs)
        for row in rows_of(name, options.budgets, options.seconds)
    ]
    write_json(options.json, {"machine": machine(), "rows": [asdict(row) for row in rows]})
    unproved = sum(not row.proved for row in rows)
    behind = sum(not row.joint_holds for row in rows)
    console.print(f"{len(rows)} rows; {unproved} not proved; joint too far behind in {behind}")
    return 0 if unproved == behind == 0 else 1


if __name__ == "__main__":
    sys.exit(main())

"""How do bookkeeping and planning grow with the number of saved tensors?

A benchmark. Chains of tiny ops that save 10^2 to 10^5 tensors are trained without a runtime and under a budget that
never binds, in turns; the difference is what observing, packing and unpacking cost a step. Then the recorded step is
planned for at 60 % of its activations, as the runtime does it. Fitted are the exponents of both over the number of
saved tensors, over all sizes and between neighbours. Takes about five minutes on an idle core; needs no GPU. Exits 1
where, between any two neighbours, bookkeeping grows faster than n^1.15 or planning faster than n^1.5.

    python -m benchmarks.scaling [--sizes 100,1000,10000,100000] [--rounds 5] [--json FILE]
        [--plot docs/plots/scaling.png]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import delta_runtime as delta
from benchmarks.common import machine, words, write_json
from delta_runtime import cpu_pool
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.units import format_seconds
from delta_runtime.planners import joint_heuristic

SIDE = 16
SHARE = 0.6
EFFORT = 4.0  # as the plan cache asks for a final plan
MOST_BOOKKEEPING, MOST_PLANNING = 1.15, 1.5
"""Exponents."""
_WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Row:
    """One chain.

    Args:
        saved: tensors that a step saves.
        ordinary_s, managed_s: a step without a runtime, and under a budget that never binds; medians.
        first_s: the step that is recorded first.
        planning_s: a plan for 60 % of the activations.
        share: of the activations that the plan's peak leaves; the budget where it holds.
    """

    saved: int
    ordinary_s: float
    managed_s: float
    first_s: float
    planning_s: float
    share: float

    @property
    def bookkeeping_s(self) -> float:
        """What the runtime costs a step."""
        return self.managed_s - self.ordinary_s


class Chain:
    """Ops one after the other, of which each saves a tensor."""

    def __init__(self, saved: int) -> None:
        torch.manual_seed(0)
        self.saved = saved
        self.start = torch.randn(SIDE, SIDE, requires_grad=True)

    def loss(self) -> Tensor:
        """Run forward; branches join every eight ops, so that plans have something to choose from."""
        h = self.start * 1.0
        for k in range(self.saved):
            h = h.sin() if k % 8 else h + h.tanh()
        return h.sum()

    def step(self, runtime: delta.Runtime | None) -> float:
        """Run a step; return its seconds."""
        self.start.grad = None
        begin_s = time.perf_counter()
        with runtime.step() if runtime else contextlib.nullcontext():
            self.loss().backward()
        return time.perf_counter() - begin_s


def measure(saved: int, rounds: int) -> Row:
    """Train a chain of one size, and plan for it."""
    chain = Chain(saved)
    chain.step(None)
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0)
    first_s = chain.step(runtime)
    graph = runtime.graph()
    for _ in range(_WARM_UP):
        chain.step(runtime)
        runtime.wait_for_plan()
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(rounds):
        for managed in (False, True):
            gc.collect()
            times[managed].append(chain.step(runtime if managed else None))
    runtime.close()
    planning_s, share = planned(graph)
    return Row(
        len(graph.saved),
        statistics.median(times[False]),
        statistics.median(times[True]),
        first_s,
        planning_s,
        share,
    )


def planned(graph: StepGraph) -> tuple[float, float]:
    """Plan for a share of the activations; return the seconds, and the share that the plan leaves."""
    budget_bytes = int(graph.peak_bytes - (1 - SHARE) * graph.activation_bytes)
    begin_s = time.perf_counter()
    plan = joint_heuristic.plan(graph, budget_bytes, effort=EFFORT)
    seconds = time.perf_counter() - begin_s
    return seconds, 1 - (graph.peak_bytes - plan.predicted_peak_bytes) / graph.activation_bytes


def exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Fit seconds = a x size^exponent by least squares of the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(np.maximum(seconds, 1e-9)), 1)[0])


def exponents(rows: Sequence[Row]) -> tuple[float, float]:
    """Return those of bookkeeping and of planning."""
    sizes = [row.saved for row in rows]
    return (
        exponent(sizes, [row.bookkeeping_s for row in rows]),
        exponent(sizes, [row.planning_s for row in rows]),
    )


def steepest(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the largest exponents between neighbouring sizes, of bookkeeping and of planning."""
    pairs = [exponents(pair) for pair in zip(rows, rows[1:])]
    return max(each[0] for each in pairs), max(each[1] for each in pairs)


def show(rows: Sequence[Row], console: Console) -> None:
    """Print the table."""
    table = Table(
        *("saved tensors", "ordinary step", "managed", "bookkeeping", "a saved tensor"),
        *("first step", "planning", "plan leaves"),
    )
    for row in rows:
        table.add_row(
            f"{row.saved:,}",
            *map(format_seconds, (row.ordinary_s, row.managed_s, row.bookkeeping_s)),
            format_seconds(row.bookkeeping_s / row.saved),
            *map(format_seconds, (row.first_s, row.planning_s)),
            f"{row.share:.1%}",
        )
    console.print(table)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Plot both against the number of saved tensors, with their exponents."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    sizes = [row.saved for row in rows]
    both = ([row.bookkeeping_s for row in rows], [row.planning_s for row in rows])
    for name, seconds, power in zip(("bookkeeping", "planning"), both, exponents(rows)):
        axes.loglog(sizes, seconds, "o-", label=f"{name}: n^{power:.2f}")
    axes.loglog(sizes, [row.ordinary_s for row in rows], "k:", label="ordinary step")
    axes.set_xlabel("saved tensors of a step")
    axes.set_ylabel("seconds")
    axes.legend()
    figure.savefig(path, dpi=90)


def main() -> int:
    """Parse the command line and run everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="100,1000,10000,100000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    sizes = [int(word) for word in words(options.sizes)]
    if len(sizes) < 2 or min(sizes) < 16:
        parser.error("--sizes: two or more, of 16 or more saved tensors")
    torch.set_num_threads(1)
    cpu_pool.install()
    console = Console(width=140)
    rows: list[Row] = []
    for size in sizes:
        rows.append(measure(size, options.rounds))
        write_json(options.json, {"machine": machine(), "rows": [asdict(row) for row in rows]})
    show(rows, console)
    bookkeeping, planning = exponents(rows)
    console.print(f"bookkeeping grows with n^{bookkeeping:.2f}, planning with n^{planning:.2f}")
    bookkeeping, planning = steepest(rows)
    console.print(f"between neighbours at most with n^{bookkeeping:.2f} and n^{planning:.2f}")
    if options.plot:
        draw(rows, options.plot)
    return 0 if bookkeeping <= MOST_BOOKKEEPING and planning <= MOST_PLANNING else 1


if __name__ == "__main__":
    sys.exit(main())

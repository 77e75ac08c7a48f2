"""What does each budget cost, from the ordinary peak down to the least, and is any infeasible above one that is not?

A stress run. For models of `SIZED` in scripts/workloads.py, budgets from 98 % of the ordinary peak down in steps of
2 %, until three in a row fail. At each a fresh runtime trains until its plan stays, with the budget as the pool's
capacity; then its steps and ordinary ones take turns. Noted are peak, step-time ratio, seconds of recomputing and of
waiting, bytes dropped and swapped. Peers are points at their own peaks, `bound` is what no plan that drops goes below.
A budget that fails above one that holds is flagged. Takes about 20 minutes for a model and policy on an idle machine;
needs no GPU. Exits 1 where a budget is flagged or was passed.

    python scripts/stress_budget_sweep.py [--models llama] [--policies recompute] [--peers checkpoint,selective]
        [--link pcie5] [--step 2] [--highest 98] [--steps 2] [--bound-seconds 5] [--out FILE] [--plots FOLDER]

`--out` appends each budget to FILE, a line of JSON each; a run that was cut goes on from there. sweep_budget.py asks
whether budgets hold from the first step on, and times nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import delta_runtime as delta
from benchmarks.common import SEED, console, keep_memory, words
from benchmarks.contenders import OFFLOADING, PEERS, HostLink, contender
from benchmarks.peers import Kind, in_turns
from delta_runtime import cpu_pool
from delta_runtime.act.links import link_bytes_per_s
from delta_runtime.core.events import Place
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.online.policies import POLICIES
from delta_runtime.plan_cache import STEPS_TO_SETTLE
from delta_runtime.planners.window_bound import window_bound
from scripts.points_file import PointsFile
from scripts.workloads import SIZED, SizedWorkload, TrainState

FAILURES_TO_STOP = 3
_SETTLED_AFTER = 2


@dataclass(frozen=True, slots=True)
class Point:
    """One budget under one policy, or a peer at its own peak.

    Args:
        percent: of the ordinary peak.
        ratio: of the step's time to an ordinary one's beside it; 0 where it failed.
        bound_ratio: what no plan that drops goes below; 0 where that is not known.
        failure: why it failed, or "".
    """

    model: str
    name: str
    percent: float
    budget_bytes: int
    peak_bytes: int = 0
    ratio: float = 0.0
    rebuild_s: float = 0.0
    stall_s: float = 0.0
    dropped_bytes: int = 0
    swapped_bytes: int = 0
    bound_ratio: float = 0.0
    failure: str = ""


Record = PointsFile[Point]


def known_point(record: Record, model: str, name: str, percent: float | None) -> Point | None:
    """Return a point that is in the file; of a peer with None."""
    for each in record.points:
        if (each.model, each.name) == (model, name) and percent in (None, each.percent):
            return each
    return None


def at_budget(
    workload: SizedWorkload,
    ordinary: Kind,
    policy: str,
    percent: float,
    arguments: argparse.Namespace,
) -> Point:
    """Train under one budget."""
    state = ordinary.state
    budget_bytes = int(ordinary.peak_bytes * percent / 100)
    link = arguments.link if Place.SWAPPED in POLICIES[policy].evicts_to else None
    runtime = delta.Runtime(budget_bytes, device="cpu", policy=policy, link_bytes_per_s=link)
    within = Kind(lambda: cpu_pool.capacity(budget_bytes), state, runtime)
    try:
        for index in range(STEPS_TO_SETTLE):
            within.block(0, timed=False)
            runtime.wait_for_plan()
            if index >= _SETTLED_AFTER and runtime.settled:
                break
        beside = Kind(contextlib.nullcontext, state)
        in_turns([beside, within], 2, arguments.steps, SEED)
        last = runtime.report().last
        graph = runtime.graph()
    except (torch.OutOfMemoryError, delta.DeltaError) as error:
        state.optimizer.zero_grad(set_to_none=True)
        return Point(
            workload.name, policy, percent, budget_bytes, failure=str(error).splitlines()[0]
        )
    finally:
        runtime.close()
        gc.collect()
    return Point(
        workload.name,
        policy,
        percent,
        budget_bytes,
        within.peak_bytes,
        within.least.seconds / beside.least.seconds,
        last.rebuild_s,
        last.in_stall_s + last.out_stall_s,
        last.dropped_bytes,
        last.swapped_out_bytes,
        bound_ratio(graph, budget_bytes, arguments.bound_seconds),
    )


def bound_ratio(graph: StepGraph, budget_bytes: int, limit_s: float) -> float:
    """Return the step-time ratio that no plan that drops goes below; 0 where it is not asked for, or not known."""
    if limit_s <= 0:
        return 0.0
    bound_s = window_bound(graph, budget_bytes, time_limit_s=limit_s)
    return 0.0 if bound_s is None else 1 + bound_s / graph.seconds


def at_peer(workload: SizedWorkload, ordinary: Kind, name: str, link: HostLink) -> Point | None:
    """Train as a peer does; None where it has nothing to do for this model."""
    state: TrainState = ordinary.state
    with contender(name, state.model, workload.blocks, link) as n_blocks:
        pass
    if n_blocks == 0 or (name == "checkpoint_sequential" and not workload.in_a_row):
        return None
    peer = Kind(lambda: contender(name, state.model, workload.blocks, link), state)
    peer.block(1, timed=False)
    beside = Kind(contextlib.nullcontext, state)
    in_turns([beside, peer], 2, 2, SEED)
    percent = 100 * peer.peak_bytes / ordinary.peak_bytes
    ratio = peer.least.seconds / beside.least.seconds
    return Point(workload.name, name, percent, peer.peak_bytes, peer.peak_bytes, ratio)


def sweep(
    workload: SizedWorkload, record: Record, arguments: argparse.Namespace
) -> Iterator[Point]:
    """Go through the budgets of each policy, and the peers."""
    workload.build(SEED).batch(0)  # data are read once and stay
    gc.collect()
    ordinary = Kind(contextlib.nullcontext, workload.build(SEED))
    ordinary.block(1, timed=False)
    link = HostLink(link_bytes_per_s(arguments.link))
    for name in arguments.peers:
        point = known_point(record, workload.name, name, None) or at_peer(
            workload, ordinary, name, link
        )
        if point is not None:
            yield point if point in record.points else record.add(point)
    for policy in arguments.policies:
        failed = 0
        percents = range(arguments.highest, 0, -arguments.step)
        for percent in track(
            percents, f"{workload.name}, {policy}", console=Console(file=sys.stderr)
        ):
            point = known_point(record, workload.name, policy, percent) or record.add(
                at_budget(workload, ordinary, policy, percent, arguments)
            )
            yield point
            failed = failed + 1 if point.failure else 0
            if failed == FAILURES_TO_STOP:
                break


def flagged(points: Sequence[Point]) -> list[str]:
    """Return what is wrong, in words: budgets that fail above one that holds, and such as were passed."""
    found = []
    for each in points:
        of_these = [p for p in points if (p.model, p.name) == (each.model, each.name)]
        below = [p for p in of_these if p.percent < each.percent and not p.failure]
        where = f"{each.model}, {each.name}, {each.percent:g} %"
        if each.failure and below:
            least = min(p.percent for p in below)
            found.append(f"{where}: fails though {least:g} % holds: {each.failure}")
        if each.peak_bytes > each.budget_bytes:
            found.append(f"{where}: {each.peak_bytes - each.budget_bytes} bytes above the budget")
    return found


def show(points: Sequence[Point]) -> None:
    """Print the table."""
    table = Table(title="budgets, of the ordinary peak", title_justify="left")
    for heading in ("model", "by", "%", "peak / budget", "step / ordinary", "bound"):
        table.add_column(heading)
    for heading in ("recomputing: s", "waiting: s", "dropped", "swapped"):
        table.add_column(heading)
    for each in points:
        if each.failure:
            table.add_row(each.model, each.name, f"{each.percent:.0f}", "", "fails")
            continue
        table.add_row(
            *(each.model, each.name, f"{each.percent:.0f}"),
            *(f"{each.peak_bytes / each.budget_bytes:.3f}", f"{each.ratio:.3f}"),
            *(f"{each.bound_ratio:.3f}" if each.bound_ratio else "", f"{each.rebuild_s:.3f}"),
            *(f"{each.stall_s:.3f}", f"{each.dropped_bytes >> 20} MiB"),
            f"{each.swapped_bytes >> 20} MiB",
        )
    Console(highlight=False, width=max(console.width, 120)).print(table)


def plot(points: Sequence[Point], folder: Path) -> None:
    """Draw step time against budget, a file for each model."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for model in dict.fromkeys(each.model for each in points):
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot()
        mine = [each for each in points if each.model == model and not each.failure]
        for name in dict.fromkeys(each.name for each in mine):
            line = sorted((each.percent, each.ratio) for each in mine if each.name == name)
            style = "o-" if name in POLICIES else "s"
            axes.plot(*zip(*line, strict=True), style, markersize=4, label=name)
        bound = sorted((each.percent, each.bound_ratio) for each in mine if each.bound_ratio)
        if bound:
            axes.plot(*zip(*bound, strict=True), "k--", linewidth=1, label="bound, recomputing")
        axes.set_xlabel("allocator's peak, % of the ordinary one")
        axes.set_ylabel("step / ordinary step")
        axes.set_title(SIZED[model].title if model in SIZED else model)
        axes.legend()
        figure.savefig(folder / f"budget_sweep_{model}.png", dpi=110)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=words, default=["llama"])
    parser.add_argument("--policies", type=words, default=["recompute"])
    parser.add_argument("--peers", type=words, default=["checkpoint", "selective"])
    parser.add_argument("--link", help="bytes per second of each lane, or a card's name")
    parser.add_argument("--step", type=int, default=2, help="of the grid, in %%")
    parser.add_argument("--highest", type=int, default=98, help="first budget, in %%")
    parser.add_argument("--steps", type=int, default=2, help="timed ones of a block")
    parser.add_argument("--bound-seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plots", type=Path)
    arguments = parser.parse_args(argv)
    known = {"models": SIZED, "policies": POLICIES, "peers": PEERS}
    for option, allowed in known.items():
        if unknown := [name for name in getattr(arguments, option) if name not in allowed]:
            parser.error(f"--{option}: {unknown[0]!r} is none of {', '.join(allowed)}")
    if min(arguments.step, arguments.steps, arguments.highest) < 1:
        parser.error("--step, --steps, --highest: at least 1")
    if any(name in OFFLOADING for name in arguments.peers) and not arguments.link:
        parser.error("--peers: what offloads needs a --link")
    torch.set_num_threads(1)
    cpu_pool.install()
    keep_memory()
    warnings.filterwarnings("ignore", message="delta_runtime")
    options = {name: getattr(arguments, name) for name in ("link", "steps", "bound_seconds")}
    record = Record(arguments.out, Point, options)
    points = [each for name in arguments.models for each in sweep(SIZED[name], record, arguments)]
    show(points)
    if arguments.plots:
        plot(points, arguments.plots)
    faults = flagged(points)
    for fault in faults:
        console.print(fault, markup=False)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

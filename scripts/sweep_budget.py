"""Down to which budget does a model train without ever holding more, from the first step on?

A stress run, not a benchmark: nothing is timed. For M1 and M2 of scripts/workloads.py, budgets from 90 % of the
ordinary peak in steps of 5 % down until two in a row fail. At each one a fresh runtime trains for a few steps with the
pool's capacity at the budget; a budget fails if a step runs out of memory or its allocator peak is above the budget.
Takes about 3 minutes on two idle cores; needs no GPU. Exits 1 if a budget above the least feasible one fails, or if
the least feasible one is above 45 % of the ordinary peak.

    python scripts/sweep_budget.py [--models resnet50,gpt] [--steps 4] [--policy recompute] [--link pcie4]
        [--no-rescue] [--least 0.45] [--json FILE]

`--no-rescue` switches the rescue inside allocations off from each budget's second step on: what then holds the budget
is the look-ahead at op boundaries alone. `--link` gives policies that swap something to swap over: bytes per
second or a card's name (delta_runtime/act/links.py).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

import torch
from rich.console import Console
from rich.table import Table

import delta_runtime as delta
from benchmarks.common import (
    BENCH_WORKLOADS,
    SEED,
    Measured,
    console,
    machine,
    measure,
    train_step,
    write_json,
)
from delta_runtime import _C, cpu_pool
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.online.policies import POLICIES
from scripts.train_plain import THREADS
from scripts.workloads import TrainState

HIGHEST_PERCENT = 90
STEP_PERCENT = 5
FAILURES_TO_STOP = 2


@dataclass(slots=True)
class Trial:
    """One budget.

    Args:
        percent: of the ordinary peak.
        of_activations: the share of the activations that the budget leaves.
        peak_bytes, rescues, recompute_s: of each step that ended.
        failure: why it failed, "" if it held.
    """

    model: str
    percent: int
    budget_bytes: int
    of_activations: float
    peak_bytes: list[int] = field(default_factory=list)
    rescues: list[int] = field(default_factory=list)
    recompute_s: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def holds(self) -> bool:
        return not self.failure


@dataclass(slots=True)
class Sweep:
    """All budgets of one workload."""

    model: str
    measured: Measured
    trials: list[Trial] = field(default_factory=list)

    @property
    def least_percent(self) -> int | None:
        """The least budget that held."""
        return min((trial.percent for trial in self.trials if trial.holds), default=None)

    def faults(self, least: float) -> list[str]:
        """Return what is wrong with it, in words."""
        lowest = self.least_percent
        if lowest is None:
            return [f"{self.model}: no budget held"]
        found = [
            f"{self.model}: {trial.percent} % failed though {lowest} % holds: {trial.failure}"
            for trial in self.trials
            if trial.percent > lowest and not trial.holds
        ]
        if lowest > 100 * least:
            found.append(f"{self.model}: {lowest} % is the least that holds; at most {least:.0%}")
        return found


def run_trial(
    trial: Trial,
    state: TrainState,
    *,
    policy: str,
    link: str | None,
    steps: int,
    rescue: bool,
    first_index: int,
) -> None:
    """Trains under one budget with a fresh runtime; fills `trial`."""
    gc.collect()
    runtime = delta.Runtime(trial.budget_bytes, policy=policy, device="cpu", link_bytes_per_s=link)
    try:
        for step in range(steps):
            batch = state.batch(first_index + step)
            if step > 0 and not rescue:
                _C.cpu_pool.set_rescue_enabled(False)
            cpu_pool.reset_peak()
            with cpu_pool.capacity(trial.budget_bytes):
                train_step(state, batch, runtime)
                peak_bytes = cpu_pool.peak_bytes()
            last = runtime.report().last
            trial.peak_bytes.append(peak_bytes)
            trial.rescues.append(last.rescues)
            trial.recompute_s.append(last.rebuild_s)
            if peak_bytes > trial.budget_bytes:
                over = format_bytes(peak_bytes - trial.budget_bytes)
                trial.failure = f"step {step + 1}: peak {over} above the budget"
                return
            if last.peak_bytes > trial.budget_bytes:
                over = format_bytes(last.peak_bytes - trial.budget_bytes)
                trial.failure = (
                    f"step {step + 1}: {over} above the budget with what the pool cannot see"
                )
                return
    except (torch.OutOfMemoryError, delta.DeltaError) as error:
        step = len(trial.peak_bytes) + 1
        trial.failure = f"step {step}: {type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        _C.cpu_pool.set_rescue_enabled(True)
        runtime.close()
        state.optimizer.zero_grad(set_to_none=True)


def sweep(name: str, arguments: argparse.Namespace) -> Sweep:
    """Try budgets from high to low for one workload."""
    workload = BENCH_WORKLOADS[name]
    workload.build(SEED).batch(0)  # data are read once and stay
    gc.collect()
    state = workload.build(SEED)
    measured = measure(state)
    result = Sweep(name, measured)
    console.print(
        f"[bold]{workload.title}[/]: ordinary peak {format_bytes(measured.peak_bytes)}, of it activations "
        f"{format_bytes(measured.activation_bytes)} ({measured.activation_bytes / measured.peak_bytes:.1%})"
    )
    failed = 0
    index = 3
    for percent in range(arguments.highest, 0, -STEP_PERCENT):
        budget_bytes = measured.peak_bytes * percent // 100
        trial = Trial(name, percent, budget_bytes, measured.of_activations(budget_bytes))
        result.trials.append(trial)
        run_trial(
            trial,
            state,
            policy=arguments.policy,
            link=arguments.link,
            steps=arguments.steps,
            rescue=not arguments.no_rescue,
            first_index=index,
        )
        index += arguments.steps
        console.print(f"  {percent} %: {trial.failure or 'holds'}", markup=False)
        failed = 0 if trial.holds else failed + 1
        if failed == FAILURES_TO_STOP:
            break
    return result


def show(sweeps: Sequence[Sweep], title: str) -> None:
    """Print the table."""
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(
        ("model", "% of peak", "% of act.", "budget", "peak / budget of each step")
        + ("rescues", "recompute", "")
    ):
        table.add_column(heading, justify="left" if i in (0, 4, 5, 7) else "right")
    for result in sweeps:
        for trial in result.trials:
            table.add_row(
                trial.model,
                f"{trial.percent}",
                f"{trial.of_activations:.1%}",
                format_bytes(trial.budget_bytes),
                " ".join(f"{peak / trial.budget_bytes:.3f}" for peak in trial.peak_bytes),
                " ".join(str(n) for n in trial.rescues),
                format_seconds(trial.recompute_s[-1]) if trial.recompute_s else "",
                "holds" if trial.holds else "fails",
            )
        table.add_section()
    Console(highlight=False, width=max(console.width, 150)).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=["resnet50", "gpt"])
    parser.add_argument("--steps", type=int, default=4, help="steps at each budget")
    parser.add_argument("--policy", choices=list(POLICIES), default="recompute")
    parser.add_argument("--link", help="bytes per second of each lane, or a card's name")
    parser.add_argument(
        "--no-rescue", action="store_true", help="rescue off from the second step on"
    )
    parser.add_argument("--highest", type=int, default=HIGHEST_PERCENT, help="first budget, in %%")
    parser.add_argument(
        "--least", type=float, default=0.45, help="share of the peak that must be reached"
    )
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    for name in arguments.models:
        if name not in BENCH_WORKLOADS:
            parser.error(f"--models: {name!r} is none of {', '.join(BENCH_WORKLOADS)}")
    if arguments.steps < 1:
        parser.error("--steps: at least 1")
    torch.set_num_threads(arguments.threads)
    cpu_pool.install()
    # A budget that is passed is a failure of the trial here, and said there.
    warnings.filterwarnings("ignore", message="delta_runtime: the budget", category=RuntimeWarning)

    sweeps = [sweep(name, arguments) for name in arguments.models]
    held_by = "look-ahead alone from the second step on" if arguments.no_rescue else "with rescue"
    show(sweeps, f"Budgets held by policy {arguments.policy}, capacity = budget, {held_by}")
    faults = [fault for result in sweeps for fault in result.faults(arguments.least)]
    for result in sweeps:
        console.print(
            f"{result.model}: least budget that holds {result.least_percent} % of the peak"
        )
    for fault in faults:
        console.print(fault, markup=False, style="bold red")
    write_json(
        arguments.json,
        {
            "machine": machine(),
            "policy": arguments.policy,
            "link": arguments.link,
            "rescue_from_step_2": not arguments.no_rescue,
            "models": {result.model: asdict(result.measured) for result in sweeps},
            "least_percent": {result.model: result.least_percent for result in sweeps},
            "trials": [asdict(trial) for result in sweeps for trial in result.trials],
            "faults": faults,
        },
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

"""What does a byte budget cost in time, and is it less than what checkpointing every block costs?

A benchmark. Trains M1 and M2 of scripts/workloads.py with `policy="recompute"` at several shares of the activations
(`--filters`: with every filter), with the pool's capacity at the budget; every managed step has an ordinary one before
and after it, in one process, on one training state, and its ratio is to their mean. Each timed step, of either kind,
comes after another one like it that is not timed: going from one kind to the other moves memory from and to the
system, which no training run does at each step. Beside it the peer:
torch.utils.checkpoint around every block, and the runtime at a budget equal to that peer's peak.
Takes about 17 minutes on two idle cores (`--rounds 3`: 10; `--filters --rounds 1`: 18); needs no GPU. Exits 1 if a row
ran out of memory or a limit of time was missed.

    python -m benchmarks.recompute [--models resnet50,gpt] [--shares 0.7,0.5,0.35,0.2] [--policies recompute]
        [--rounds 9] [--filters] [--no-peer] [--json FILE] [--markdown FILE]

A share is of the activations: budget = ordinary peak - (1 - share) x activations. Ratios are medians over the rounds
with their quartiles; the other figures are medians over the same steps, which all come after calibration.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import delta_runtime as delta
from benchmarks.common import (
    BENCH_WORKLOADS,
    MIB,
    SEED,
    Measured,
    Spread,
    checkpointed,
    console,
    machine,
    measure,
    train_step,
    words,
    write_json,
)
from delta_runtime import cpu_pool
from delta_runtime.core.events import EventKind
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.known_step import CALIBRATION_STEPS
from delta_runtime.online.policies import POLICIES
from delta_runtime.report.step_report import StepTotals
from scripts.train_plain import THREADS
from scripts.workloads import (
    Batch,
    TrainState,
    Workload,
)

FILTERS = ("delta", "dtr", "dtr_local", "msps", "lru", "largest", "next_use", "recompute")
FILTER_SHARES = (0.7, 0.5, 0.4)
RATIO_LIMITS = {0.7: 1.06, 0.5: 1.10, 0.35: 1.16, 0.2: 1.28}
"""The step-time ratio that policy "recompute" has to reach, by share of the activations."""


# ----------------------------------------------------------------------------------------- contenders


@dataclass(slots=True)
class Sample:
    """One timed step of a contender."""

    seconds: float
    ordinary_s: float
    last: StepTotals
    again_bytes: int

    @property
    def ratio(self) -> float:
        return self.seconds / self.ordinary_s

    @property
    def rest(self) -> float:
        """What the step cost beside recomputation, relative to an ordinary step."""
        return self.ratio - 1 - self.last.rebuild_s / self.ordinary_s


class RebuildWatch:
    """Counts the bytes that a runtime rebuilt more than once in a step."""

    def __init__(self, runtime: delta.Runtime) -> None:
        self._batches: list[Any] = []
        runtime.steps.pump.listener = lambda events: self._batches.append(events)

    def take(self) -> int:
        """Bytes rebuilt beyond the first time since the last call."""
        batches, self._batches = self._batches, []
        if not batches:
            return 0
        events = np.concatenate(batches)
        rebuilt = events[(events["kind"] == EventKind.REBUILT) & (events["key"] >= 0)]
        _, first, count = np.unique(rebuilt["key"], return_index=True, return_counts=True)
        return int((rebuilt["bytes"][first] * (count - 1)).sum())


class Contender:
    """One row: the same step, run in one certain way."""

    def __init__(self, name: str, share: float | None, budget_bytes: int) -> None:
        self.name = name
        self.share = share
        self.budget_bytes = budget_bytes
        self.samples: list[Sample] = []
        self.peak_bytes = 0
        self.failure = ""
        self.runtime: delta.Runtime | None = None
        self.watch: RebuildWatch | None = None

    def start(self) -> None:
        """Make what the steps need."""
        policy = self.name.split()[0]
        self.runtime = delta.Runtime(self.budget_bytes, policy=policy, device="cpu")
        self.watch = RebuildWatch(self.runtime)

    def close(self) -> None:
        if self.runtime is not None:
            self.runtime.close()

    def step(self, state: TrainState, batch: Batch) -> float:
        """Run one step under the capacity; return its seconds, nan after it ran out of memory."""
        gc.collect()
        cpu_pool.set_capacity(self.budget_bytes)
        cpu_pool.reset_peak()
        begin = time.perf_counter()
        try:
            self.run(state, batch)
        except (torch.OutOfMemoryError, delta.DeltaError) as error:
            self.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        finally:
            seconds = time.perf_counter() - begin
            self.peak_bytes = max(self.peak_bytes, cpu_pool.peak_bytes())
            cpu_pool.set_capacity(None)
        if self.failure:
            state.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            return float("nan")
        return seconds

    def run(self, state: TrainState, batch: Batch) -> None:
        train_step(state, batch, self.runtime)

    def sample(self, seconds: float, ordinary_s: float) -> None:
        """Take the step that was timed last into the account."""
        assert self.runtime is not None and self.watch is not None
        last = self.runtime.report().last
        again = self.watch.take()
        self.samples.append(Sample(seconds, ordinary_s, last, again))

    def predicted_s(self) -> float | None:
        """Seconds of recomputation that the plan expects; None where there is no plan."""
        plan = None if self.runtime is None else self.runtime.plan()
        return None if plan is None else plan.predicted_seconds


class Peer(Contender):
    """torch.utils.checkpoint around every block, without the runtime and without a capacity."""

    def start(self) -> None:
        pass

    def step(self, state: TrainState, batch: Batch) -> float:
        gc.collect()
        cpu_pool.reset_peak()
        with checkpointed(state.model):
            begin = time.perf_counter()
            train_step(state, batch)
            seconds = time.perf_counter() - begin
        self.peak_bytes = max(self.peak_bytes, cpu_pool.peak_bytes())
        return seconds

    def sample(self, seconds: float, ordinary_s: float) -> None:
        self.samples.append(Sample(seconds, ordinary_s, StepTotals(), 0))


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one contender. Bytes and seconds are medians over the timed steps, peaks the highest of all.

    Args:
        share: of the activations, as it was asked for; None where the budget was given otherwise.
        of_peak, of_activations: the budget relative to the ordinary peak, and what it leaves of the activations.
        ratio: step time over that of the ordinary steps around it; None where it ran out of memory.
        rest: what is left of ratio - 1 after the recomputation: observing, deciding, copies, cold caches.
        again_bytes: bytes rebuilt a second time or more.
        predicted_ratio: what the plan expected; None where there is no plan.
        limit: what the ratio has to reach; None where nothing is demanded.
        failure: what ended it, "" if nothing did.
    """

    model: str
    policy: str
    share: float | None
    budget_bytes: int
    of_peak: float
    of_activations: float
    peak_bytes: int
    ratio: Spread | None
    step_s: float
    ordinary_s: float
    recompute_s: float
    rest: float
    replayed_ops: float
    rescues: float
    dropped_bytes: float
    again_bytes: float
    predicted_ratio: float | None
    limit: float | None
    failure: str

    @property
    def holds(self) -> bool:
        """Whether it ran, and within its limit if it has one."""
        return self.ratio is not None and (self.limit is None or self.ratio.median <= self.limit)


def row_of(model: str, contender: Contender, measured: Measured) -> Row:
    """Sum a contender up."""
    samples = contender.samples if not contender.failure else []

    def median(get: Callable[[Sample], float]) -> float:
        return float(statistics.median(get(sample) for sample in samples)) if samples else 0.0

    ordinary_s = median(lambda s: s.ordinary_s)
    predicted_s = contender.predicted_s()
    recompute = contender.name == "recompute" and contender.share is not None
    return Row(
        model=model,
        policy=contender.name,
        share=contender.share,
        budget_bytes=contender.budget_bytes,
        of_peak=contender.budget_bytes / measured.peak_bytes,
        of_activations=measured.of_activations(contender.budget_bytes),
        peak_bytes=contender.peak_bytes,
        ratio=Spread.of([sample.ratio for sample in samples]) if samples else None,
        step_s=median(lambda s: s.seconds),
        ordinary_s=ordinary_s,
        recompute_s=median(lambda s: s.last.rebuild_s),
        rest=median(lambda s: s.rest),
        replayed_ops=median(lambda s: s.last.replayed_ops),
        rescues=median(lambda s: s.last.rescues),
        dropped_bytes=median(lambda s: s.last.dropped_bytes),
        again_bytes=median(lambda s: s.again_bytes),
        predicted_ratio=(
            None if predicted_s is None or not ordinary_s else 1 + predicted_s / ordinary_s
        ),
        limit=RATIO_LIMITS.get(contender.share) if recompute else None,
        failure=contender.failure,
    )


# ----------------------------------------------------------------------------------------- one workload


@dataclass(slots=True)
class Settings:
    """What is asked for."""

    shares: list[float]
    policies: list[str]
    rounds: int
    peer: bool
    limits: bool = True


@dataclass(slots=True)
class Result:
    """The rows of one workload."""

    workload: Workload
    measured: Measured
    rows: list[Row] = field(default_factory=list)


def bench(workload: Workload, settings: Settings) -> Result:
    """Measures all rows of one workload in turns."""
    gc.collect()
    state = workload.build(SEED)
    measured = measure(state)
    console.print(
        f"[bold]{workload.title}[/]: ordinary peak {format_bytes(measured.peak_bytes)}, of it activations "
        f"{format_bytes(measured.activation_bytes)} ({measured.activation_bytes / measured.peak_bytes:.1%})\n"
        f"  no choice of drops goes below about {format_bytes(measured.least_bytes)} "
        f"({measured.of_activations(measured.least_bytes):.1%} of the activations): {measured.least_op}"
    )
    contenders = [
        Contender(policy, share, measured.budget_bytes(share))
        for share in settings.shares
        for policy in settings.policies
    ]
    index = 3
    if settings.peer:
        peer = Peer("checkpoint every block", None, 0)
        for index in range(3, 5):
            peer.step(state, state.batch(index))
        peer.budget_bytes = peer.peak_bytes
        contenders.append(peer)
        contenders += [
            Contender(f"{policy} at the peer's peak", None, peer.peak_bytes)
            for policy in settings.policies
        ]
    for contender in contenders:
        contender.start()
        plans = contender.runtime is None or contender.runtime.policy.plans
        for _ in range(CALIBRATION_STEPS + 1 if plans else 1):
            index += 1
            if not contender.failure:
                contender.step(state, state.batch(index))
        label = f"{contender.name} {format_bytes(contender.budget_bytes)}"
        console.print(f"  calibrated: {label}  {contender.failure}", markup=False)
        if contender.watch is not None:
            contender.watch.take()

    def ordinary() -> float:
        nonlocal index
        for _ in range(2):  # the first one warms up
            index += 1
            batch = state.batch(index)
            gc.collect()
            begin = time.perf_counter()
            train_step(state, batch)
            seconds = time.perf_counter() - begin
        return seconds

    for contender in contenders:
        told = []
        before = ordinary()
        for _ in range(settings.rounds):
            if contender.failure:
                break
            index += 2
            contender.step(state, state.batch(index - 1))
            if contender.watch is not None:
                contender.watch.take()
            seconds = contender.step(state, state.batch(index))
            after = ordinary()
            if not contender.failure:
                contender.sample(seconds, (before + after) / 2)
                told.append(f"{contender.samples[-1].ratio:.3f}")
            before = after
        console.print(
            f"  {contender.name} {format_bytes(contender.budget_bytes)}: ordinary "
            f"{format_seconds(before)}, ratios {' '.join(told)}",
            markup=False,
        )
    result = Result(workload, measured)
    result.rows = [row_of(workload.name, contender, measured) for contender in contenders]
    for contender in contenders:
        contender.close()
    return result


# --------------------------------------------------------------------------------------- what is shown

HEADINGS = (
    "model",
    "policy",
    "share",
    "budget",
    "% of peak",
    "% of act.",
    "peak",
    "ratio",
    "limit",
    "predicted",
    "recompute",
    "rest",
    "ops again",
    "rescues",
    "dropped",
    "twice",
)


def cells(row: Row) -> tuple[str, ...]:
    """One row as text, in the order of HEADINGS."""
    if row.ratio is None:
        ratio = "failed" if row.failure else "-"
    else:
        ratio = row.ratio.text()
    limit = "" if row.limit is None else f"{row.limit:.2f} {'ok' if row.holds else 'MISSED'}"
    managed = row.policy.split()[0] in POLICIES
    return (
        row.model,
        row.policy,
        "" if row.share is None else f"{row.share:.0%}",
        format_bytes(row.budget_bytes) if managed else "-",
        f"{row.of_peak:.1%}",
        f"{row.of_activations:.1%}",
        format_bytes(row.peak_bytes),
        ratio,
        limit,
        "" if row.predicted_ratio is None else f"{row.predicted_ratio:.3f}",
        format_seconds(row.recompute_s) if managed else "",
        f"{row.rest:+.1%}" if managed and row.ratio else "",
        f"{row.replayed_ops:.0f}" if managed else "",
        f"{row.rescues:.0f}" if managed else "",
        format_bytes(row.dropped_bytes) if managed else "",
        f"{row.again_bytes / MIB:.1f} MiB" if managed else "",
    )


def show(results: Sequence[Result]) -> None:
    """Print the table."""
    table = Table(title="Step time inside a budget, over ordinary steps", title_justify="left")
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if i < 2 else "right", no_wrap=True)
    for result in results:
        for row in result.rows:
            table.add_row(*cells(row))
        table.add_section()
    Console(highlight=False, width=max(console.width, 230)).print(table)
    for result in results:
        for row in result.rows:
            if row.failure:
                console.print(
                    f"{row.model}, {row.policy}, {format_bytes(row.budget_bytes)}: {row.failure}",
                    markup=False,
                )


def markdown(results: Sequence[Result], about: dict[str, Any]) -> str:
    """Return the same table in Markdown."""
    lines = [
        f"torch {about['torch']}, {about['cpu']}, {about['threads']} threads, {about['date'][:10]}. "
        "Ratio: median [quartiles] of step time over the ordinary steps around it.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "|" + "|".join("---" if i < 2 else "---:" for i in range(len(HEADINGS))) + "|",
    ]
    lines += ["| " + " | ".join(cells(row)) + " |" for result in results for row in result.rows]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=words, default=["resnet50", "gpt"])
    parser.add_argument(
        "--shares", type=lambda text: [float(word) for word in words(text)], default=None
    )
    parser.add_argument("--policies", type=words, default=None)
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each row")
    parser.add_argument(
        "--filters", action="store_true", help="compare all filters at 70, 50 and 40 %%"
    )
    parser.add_argument("--no-peer", action="store_true", help="leave checkpointing out")
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args(argv)
    settings = Settings(
        shares=arguments.shares
        or list(FILTER_SHARES if arguments.filters else tuple(RATIO_LIMITS)),
        policies=arguments.policies or list(FILTERS if arguments.filters else ("recompute",)),
        rounds=arguments.rounds,
        peer=not (arguments.no_peer or arguments.filters),
    )
    for name in arguments.models:
        if name not in BENCH_WORKLOADS:
            parser.error(f"--models: {name!r} is none of {', '.join(BENCH_WORKLOADS)}")
    for name in settings.policies:
        if name not in POLICIES:
            parser.error(f"--policies: {name!r} is none of {', '.join(POLICIES)}")
    if settings.rounds < 1 or not all(0 < share <= 1 for share in settings.shares):
        parser.error("--rounds: at least 1; --shares: above 0 and at most 1")
    torch.set_num_threads(arguments.threads)
    cpu_pool.install()

    results = []
    for name in arguments.models:
        BENCH_WORKLOADS[name].build(SEED).batch(0)  # data are read once and stay
        results.append(bench(BENCH_WORKLOADS[name], settings))
    about = machine()
    show(results)
    write_json(
        arguments.json,
        {
            "machine": about,
            "rounds": settings.rounds,
            "models": {result.workload.name: asdict(result.measured) for result in results},
            "rows": [asdict(row) for result in results for row in result.rows],
        },
    )
    if arguments.markdown:
        arguments.markdown.parent.mkdir(parents=True, exist_ok=True)
        arguments.markdown.write_text(markdown(results, about))
    missed = [row for result in results for row in result.rows if not row.holds]
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

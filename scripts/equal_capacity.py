"""What stress_max_batch.py and stress_max_input.py share: training at the memory that an ordinary step takes.

The capacity of a model is the allocator's peak in ordinary steps at its ordinary batch and input, and 64 KiB. A
`Trial` trains a larger one within it: the pool refuses every byte above. Not run by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import delta_runtime as delta
from benchmarks.common import SEED, SLACK_BYTES, console, train_step, write_docs
from benchmarks.contenders import OFFLOADING, PEERS, HostLink, contender
from delta_runtime import cpu_pool, failed_backward
from delta_runtime.act.links import link_bytes_per_s
from delta_runtime.core.events import Place
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.online.policies import POLICIES
from delta_runtime.plan_cache import STEPS_TO_SETTLE
from delta_runtime.planners.linear_program import SolverFailed
from delta_runtime.planners.window_bound import window_bound
from scripts.points_file import PointsFile
from scripts.workloads import SIZED, SizedWorkload, TrainState

ORDINARY, ACCUMULATION = "ordinary", "accumulation"
SHOWN = (ORDINARY, ACCUMULATION, "checkpoint", "recompute")
FIT_STEPS = 2
ORDINARY_STEPS = {"ordinary": "rows of as many samples, before and behind each step"}
_MOST_FACTOR = 64


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one way to train at one batch and input.

    Args:
        capacity_bytes: the ordinary peak at the ordinary sizes.
        failure: why it does not fit, or "".
        samples_per_s: 0 where it was not timed.
        ordinary_samples_per_s: at the ordinary sizes, around this trial; 0 where it was not timed.
        least_extra: share of an ordinary step of these sizes that recomputing takes at the least, whatever is dropped;
            0 where nothing is known of it.
        speeds: of each timed step of a runtime, in samples, over the ordinary steps right before and behind it; empty
            others.
        bound_s: seconds for which `least_extra` was looked for, at the most.
    """

    model: str
    contender: str
    batch_size: int
    size: int
    capacity_bytes: int
    peak_bytes: int
    failure: str
    samples_per_s: float = 0.0
    ordinary_samples_per_s: float = 0.0
    least_extra: float = 0.0
    speeds: Sequence[float] = ()
    bound_s: float = 0.0


def accumulated(state: TrainState, parts: int) -> Callable[[int], None]:
    """Return a step that runs a batch in parts and adds their gradients up."""

    def step(index: int) -> None:
        batch = state.batch(index)
        state.optimizer.zero_grad(set_to_none=True)
        count = len(next(iter(batch.values())))
        for part in range(parts):
            first, last = count * part // parts, count * (part + 1) // parts
            loss = state.loss({k: v[first:last] for k, v in batch.items()})
            (loss * ((last - first) / count)).backward()
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)

    return step


class AtCapacity:
    """One model at the memory of its ordinary step.

    Args:
        link: between device and host: bytes per second, or a card's name; None for recomputing alone.
        steps: that are timed.
        bound_s: for how long a bound is looked for.
    """

    def __init__(
        self, workload: SizedWorkload, link: str | None, steps: int, bound_s: float = 20.0
    ) -> None:
        self.workload = workload
        self.link = link
        self.steps = steps
        self.bound_s = bound_s
        workload.build(SEED).batch(0)  # data are read once and stay
        gc.collect()
        others_bytes = cpu_pool.allocated_bytes()
        self._state = workload.build(SEED)
        cpu_pool.reset_peak()
        self._ordinary_s(1)
        self.capacity_bytes = cpu_pool.peak_bytes() - others_bytes + SLACK_BYTES

    def _ordinary_s(self, in_a_row: int) -> float:
        """Return the seconds of an ordinary step, of the fastest of some rows of them."""
        return min(self._ordinary_row_s(in_a_row, index) for index in range(self.steps + 1))

    def _ordinary_row_s(self, in_a_row: int, index: int) -> float:
        step = self._step_of(self._state)

        def row(index: int) -> None:
            for each in range(in_a_row):
                step(in_a_row * index + each)

        return self._timed(row, index) / in_a_row

    @staticmethod
    def _timed(step: Callable[[int], None], index: int) -> float:
        begin = time.perf_counter()
        step(index)
        return time.perf_counter() - begin

    @staticmethod
    def _step_of(state: TrainState, runtime: delta.Runtime | None = None) -> Callable[[int], None]:
        return lambda index: train_step(state, state.batch(index), runtime)

    def trial(self, name: str, batch_size: int, size: int, *, timed: bool) -> Trial:
        """Train for a few steps inside the capacity; with `timed`, also the ordinary way.

        Ordinary steps are timed before and after, and around each step of a runtime, in rows that train as many
        samples: what slows the machine down for a while slows neighbours alike.
        """
        in_a_row = max(1, round(batch_size / self.workload.batch_size))
        ordinary_s = self._ordinary_s(in_a_row) if timed else 0.0
        if name == ACCUMULATION and self.part_size == 0:
            told = ("no part of a batch fits", 0.0, self.workload.batch_size / ordinary_s)
            return Trial(self.workload.name, name, batch_size, size, self.capacity_bytes, 0, *told)
        # What the ordinary run holds is no part of the trial.
        gc.collect()
        before_bytes = cpu_pool.allocated_bytes()
        state = self.workload.build(SEED, batch_size, size)
        limit_bytes = before_bytes + self.capacity_bytes
        failure, peak_bytes, graph = "", 0, None
        steps_s: list[float] = []
        rows_s: list[float] = []  # of ordinary steps before the first and behind each of `steps_s`
        with contextlib.ExitStack() as stack:
            runtime = self._runtime(name, limit_bytes)
            if runtime is not None:
                stack.callback(runtime.close)
            try:
                step = self._stepper(name, state, runtime, stack)
                cpu_pool.reset_peak()
                with cpu_pool.capacity(limit_bytes):
                    for index in range(FIT_STEPS):
                        step(index)
                    if timed and runtime is not None:
                        self._settle(step, runtime)
                peak_bytes = cpu_pool.peak_bytes() - before_bytes
                if timed and runtime is not None:  # peers change more than their own steps
                    rows_s.append(self._ordinary_row_s(in_a_row, 0))
                for index in range(2 * (self.steps + 1) if timed else 0):
                    cpu_pool.reset_peak()
                    with cpu_pool.capacity(limit_bytes):
                        steps_s.append(self._timed(step, index))
                    peak_bytes = max(peak_bytes, cpu_pool.peak_bytes() - before_bytes)
                    if rows_s:
                        rows_s.append(self._ordinary_row_s(in_a_row, index + 1))
                if timed:
                    graph = self._recomputing(name, runtime, size)
            except (torch.OutOfMemoryError, delta.DeltaError) as error:
                failure, steps_s = type(error).__name__, []
                failed_backward.release_queue()  # of a rival that has no runtime
        del state
        gc.collect()
        if timed:
            ordinary_s = min(ordinary_s, self._ordinary_s(in_a_row), *rows_s)
        least_extra = least_extra_of(graph, limit_bytes, self.bound_s) if graph is not None else 0.0
        speeds = [
            (batch_size / step_s) * (before_s + behind_s) / 2 / self.workload.batch_size
            for step_s, (before_s, behind_s) in zip(steps_s, itertools.pairwise(rows_s))
        ]
        return Trial(
            self.workload.name,
            name,
            batch_size,
            size,
            self.capacity_bytes,
            peak_bytes,
            failure,
            batch_size / min(steps_s) if steps_s else 0.0,
            self.workload.batch_size / ordinary_s if ordinary_s else 0.0,
            least_extra,
            speeds,
            self.bound_s,
        )

    def _runtime(self, name: str, limit_bytes: int) -> delta.Runtime | None:
        if name not in POLICIES:
            return None
        link = self.link if Place.SWAPPED in POLICIES[name].evicts_to else None
        return delta.Runtime(limit_bytes, device="cpu", policy=name, link_bytes_per_s=link)

    def _recomputing(self, name: str, runtime: delta.Runtime | None, size: int) -> StepGraph | None:
        """Return the step, if it is of the ordinary input, and who trains drops alone."""
        if runtime is None or size != self.workload.size:
            return None
        return runtime.graph() if POLICIES[name].evicts_to == (Place.DROPPED,) else None

    @functools.cached_property
    def part_size(self) -> int:
        """The largest part of a batch that trains with another one's gradients beside it; 0 if none does."""
        whole = self.workload.batch_size
        for part_size in sorted({whole * quarters // 4 for quarters in (1, 2, 3, 4)}, reverse=True):
            before_bytes = cpu_pool.allocated_bytes()
            state = self.workload.build(SEED, 2 * part_size)
            with cpu_pool.capacity(before_bytes + self.capacity_bytes):
                try:
                    accumulated(state, 2)(0)
                    return part_size
                except torch.OutOfMemoryError:
                    pass
            del state
            gc.collect()
        return 0

    def _stepper(
        self,
        name: str,
        state: TrainState,
        runtime: delta.Runtime | None,
        stack: contextlib.ExitStack,
    ) -> Callable[[int], None]:
        if name == ACCUMULATION:
            batch_size = len(next(iter(state.batch(0).values())))
            return accumulated(state, -(-batch_size // self.part_size))
        if name in PEERS:
            link = HostLink(link_bytes_per_s(self.link))
            stack.enter_context(contender(name, state.model, self.workload.blocks, link))
        return self._step_of(state, runtime)

    @staticmethod
    def _settle(step: Callable[[int], None], runtime: delta.Runtime) -> None:
        for index in range(STEPS_TO_SETTLE):
            step(index)
            runtime.wait_for_plan()
            if runtime.settled:
                break


def least_extra_of(graph: StepGraph, limit_bytes: int, time_limit_s: float) -> float:
    """Return the share of an ordinary step that no plan which drops goes below, by its ops' seconds; 0: not known."""
    try:
        bound_s = window_bound(graph, limit_bytes, time_limit_s=time_limit_s)
    except (ImportError, SolverFailed):
        return 0.0
    return (bound_s or 0.0) / graph.seconds


def largest(fits: Callable[[int], bool], low: int, step: int, most: int) -> int:
    """Return the largest multiple of `step` above `low` that fits, by doubling and halving; `low` fits.

    Where sizes do not fit in order, it is one that fits below one that does not.
    """
    high = low
    while high < most and fits(min(2 * high, most)):
        high = min(2 * high, most)
    below, above = high, min(2 * high, most + step)
    while above - below > step:
        middle = (below + above) // 2 // step * step
        if middle <= below:
            break
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below


Record = PointsFile[Trial]


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what a trial's figures depend on beside its sizes."""
    given = {name: getattr(arguments, name) for name in ("link", "steps", "threads")}
    return given | ORDINARY_STEPS


def known_trials(
    record: Record, model: str, contender: str, batch_size: int, size: int, *, timed: bool
) -> list[Trial]:
    """Return the trials of these sizes: those that were to be timed, or those that were not."""
    asked = (model, contender, batch_size, size)

    def is_one(each: Trial) -> bool:
        here = (each.model, each.contender, each.batch_size, each.size)
        return here == asked and (each.ordinary_samples_per_s > 0) == timed

    return [each for each in record.points if is_one(each)]


@dataclass(frozen=True, slots=True)
class Question:
    """What grows: `sizes(workload, n)` are batch and input at `n`, of which `start` is the ordinary one.

    Args:
        growth: of sizes over the ordinary ones, as it is told: batch, tokens, or pixels of the area.
        factors: growths that are timed beside the largest that fits.
    """

    name: str
    start: Callable[[SizedWorkload], int]
    step: Callable[[SizedWorkload], int]
    sizes: Callable[[SizedWorkload, int], tuple[int, int]]
    growth: Callable[[SizedWorkload, int], float]
    factors: Sequence[int]


def answer(question: Question, at: AtCapacity, name: str, record: Record) -> list[Trial]:
    """Find the largest that fits, and time it and the asked growths below it; return those that fitted."""
    workload = at.workload

    def run(n: int, timed: bool) -> Trial:
        sizes = question.sizes(workload, n)
        known = known_trials(record, workload.name, name, *sizes, timed=timed)
        return known[-1] if known else record.add(at.trial(name, *sizes, timed=timed))

    start, step = question.start(workload), question.step(workload)
    if name == ACCUMULATION:  # any batch fits
        most = max(question.factors) * start
    else:
        most = largest(lambda n: not run(n, False).failure, start, step, _MOST_FACTOR * start)
        while most > start and run(most, True).failure:  # two steps fitted, a later one did not
            most -= step
    wanted = {n for n in (factor * start for factor in question.factors) if n < most}
    found = [run(n, True) for n in sorted(wanted | {most})]
    return [each for each in found if not each.failure]


def time_again(question: Question, arguments: argparse.Namespace) -> int:
    """Time the growths of `--only` in turns, `--rounds` times; tell the median of each's steps, and the quartiles.

    Rounds that are in the file are not run again.
    """
    place = f"max_{question.name}_again"
    if arguments.docs and f"<!-- {place}: begin -->" not in arguments.docs.read_text("utf-8"):
        raise SystemExit(f"{arguments.docs} has no place for {place}")
    record = Record(arguments.out, Trial, options_of(arguments))
    _prepare(arguments)
    at: dict[str, AtCapacity] = {}
    asked = list(itertools.product(arguments.models, arguments.contenders, arguments.only))
    for turn, (model, name, factor) in itertools.product(range(arguments.rounds), asked):
        sizes = question.sizes(SIZED[model], factor * question.start(SIZED[model]))
        if len(known_trials(record, model, name, *sizes, timed=True)) > turn:
            continue
        if model not in at:
            at[model] = _at(model, arguments)
        trial = record.add(at[model].trial(name, *sizes, timed=True))
        console.print(f"{model}, {name}: {speeds_of(question, [trial])} {trial.failure}")
    heads = (
        "model",
        "trained by",
        question.name,
        "speed over ordinary",
        "quartiles",
        "by ops' seconds at most",
    )
    table, lines = Table(*heads), [f"| {' | '.join(heads)} |", "|---|---|--:|--:|--:|--:|"]
    for model, name, factor in asked:
        sizes = question.sizes(SIZED[model], factor * question.start(SIZED[model]))
        cells = again_of(question, known_trials(record, model, name, *sizes, timed=True))
        table.add_row(model, name, *cells)
        lines.append(f"| {' | '.join((model, name, *cells))} |")
    console.print(table)
    write_docs(arguments.docs, {place: lines})
    return 0


def again_of(question: Question, trials: Sequence[Trial]) -> tuple[str, str, str, str]:
    """Return what `time_again` tells of the trials of one growth: it, the median speed, the quartiles, the bound."""
    growth = f"{grown(question, trials[0]):.3g}x"
    failed = sum(bool(each.failure) for each in trials)
    if failed:
        return growth, f"did not train in {failed} of {len(trials)} rounds", "", ""
    speeds = [each for trial in trials for each in speeds_in(question, trial)]
    low, middle, high = np.percentile(speeds, (25, 50, 75))
    known = [each.least_extra for each in trials if each.least_extra]
    most = f"{1 / (1 + statistics.median(known)):.1%}" if known else ""
    return growth, f"{middle:.1%}", f"{low:.1%} to {high:.1%}", most


def _at(model: str, arguments: argparse.Namespace) -> AtCapacity:
    return AtCapacity(SIZED[model], arguments.link, arguments.steps, arguments.bound_s)


def _prepare(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    cpu_pool.install()
    warnings.filterwarnings("ignore", message="delta_runtime")


def _growths(text: str) -> list[int]:
    found = [int(word) for word in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def arguments_of(doc: str, argv: Sequence[str] | None, models: Sequence[str]) -> argparse.Namespace:
    """Read the options that both scripts have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    known = (ORDINARY, ACCUMULATION, *PEERS, *POLICIES)
    parser.add_argument("--models", default=",".join(models))
    parser.add_argument("--contenders", default=",".join(SHOWN), help=f"of {', '.join(known)}")
    parser.add_argument("--link", help="bytes per second of each lane, or a card's name")
    parser.add_argument("--steps", type=int, default=2, help="timed ones")
    parser.add_argument("--threads", type=int, default=1)
    bound = "seconds for which a bound is looked for: the longer, the closer it is"
    parser.add_argument("--bound-s", type=float, default=20.0, help=bound)
    growths = "2,4: time these growths alone, in turns, and do not look for the largest"
    parser.add_argument("--only", help=growths, type=_growths)
    parser.add_argument("--rounds", type=int, default=3, help="of --only")
    parser.add_argument("--out", type=Path, help="JSON lines; a run that was cut goes on from them")
    parser.add_argument("--docs", type=Path, help="a page with places for the table")
    arguments = parser.parse_args(argv)
    for option, allowed in (("models", tuple(SIZED)), ("contenders", known)):
        given = [word.strip() for word in getattr(arguments, option).split(",") if word.strip()]
        if unknown := [word for word in given if word not in allowed]:
            parser.error(f"--{option}: {unknown[0]!r} is none of {', '.join(allowed)}")
        setattr(arguments, option, given)
    if arguments.rounds < 1 or arguments.bound_s < 0:
        parser.error("--rounds is at least 1, and --bound-s at least 0")
    needs = [name for name in arguments.contenders if name in OFFLOADING]
    if needs and not arguments.link:
        parser.error(f"--contenders: {needs[0]} needs a --link")
    return arguments


def run_and_tell(question: Question, arguments: argparse.Namespace) -> int:
    """Answer for each model and contender, and show it; return the exit status."""
    if arguments.only:
        return time_again(question, arguments)
    record = Record(arguments.out, Trial, options_of(arguments))
    answers = run_all(question, arguments, record)
    show(question, answers)
    write_docs(arguments.docs, docs_tables(question, answers))
    return 0


def run_all(
    question: Question, arguments: argparse.Namespace, record: Record
) -> list[tuple[str, str, float, list[Trial]]]:
    """Answer for each model and contender; return them with the growth of the largest that fits."""
    _prepare(arguments)
    answers = []
    with Progress(
        *(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()),
        *(TextColumn("left:"), TimeRemainingColumn()),
        console=Console(file=sys.stderr),
    ) as progress:
        task = progress.add_task("", total=len(arguments.models) * len(arguments.contenders))
        for model in arguments.models:
            at = _at(model, arguments)
            for name in arguments.contenders:
                progress.update(task, description=f"{model}, {name}")
                found = answer(question, at, name, record)
                answers.append((model, name, grown(question, found[-1]) if found else 0.0, found))
                progress.advance(task)
            del at
            gc.collect()
    return answers


def grown(question: Question, trial: Trial) -> float:
    """Return how much larger a trial is than the ordinary one."""
    workload = SIZED[trial.model]
    of_input = question.name != "batch"
    return question.growth(workload, trial.size if of_input else trial.batch_size)


def docs_tables(
    question: Question, answers: Sequence[tuple[str, str, float, list[Trial]]]
) -> dict[str, list[str]]:
    """Return the table for a page."""
    lines = [
        f"| model | trained by | largest {question.name} | times the ordinary | speed over ordinary, at |",
        "|---|---|--:|--:|---|",
    ]
    for model, name, growth, trials in answers:
        most, times = largest_of(question, name, growth, trials)
        lines.append(f"| {model} | {name} | {most} | {times} | {speeds_of(question, trials)} |")
    return {f"max_{question.name}": lines}


def largest_of(
    question: Question, name: str, growth: float, trials: Sequence[Trial]
) -> tuple[str, str]:
    """Return the largest that fits, and how many times the ordinary that is, in words."""
    if not trials:
        return "did not train", ""
    if name == ACCUMULATION:
        return "any", ""
    last = trials[-1]
    return str(last.batch_size if question.name == "batch" else last.size), f"{growth:.2f}"


def speeds_of(question: Question, trials: Sequence[Trial]) -> str:
    """Return the speed at each size, over the ordinary one's: in samples; where inputs grow, in tokens or pixels.

    Behind "of": about the most that recomputing allows, by the seconds of its ops, if a sample takes as long as in the
    ordinary batch.
    """

    def most(each: Trial) -> str:
        return f" of {1 / (1 + each.least_extra):.0%}" if each.least_extra else ""

    return ", ".join(
        f"{grown(question, each):.3g}x {speed_of(question, each):.0%}{most(each)}"
        for each in trials
    )


def speed_of(question: Question, trial: Trial) -> float:
    """Return the speed of a timed trial, over the ordinary one's: the median of its steps."""
    return statistics.median(speeds_in(question, trial))


def speeds_in(question: Question, trial: Trial) -> list[float]:
    """Return the speeds of a timed trial's steps; where they were not compared one by one, that of the fastest."""
    grows = 1.0 if question.name == "batch" else grown(question, trial)
    fastest = trial.samples_per_s / trial.ordinary_samples_per_s
    return [grows * each for each in trial.speeds or [fastest]]


def show(question: Question, answers: Sequence[tuple[str, str, float, list[Trial]]]) -> None:
    """Print the table."""
    table = Table(
        *("model", "trained by", f"largest {question.name}", "times the ordinary"),
        *(f"speed over ordinary, by {question.name}", "peak / capacity"),
        title="at the memory of the ordinary step",
        title_justify="left",
    )
    for model, name, growth, trials in answers:
        table.add_row(
            *(model, name, *largest_of(question, name, growth, trials)),
            speeds_of(question, trials),
            f"{max((each.peak_bytes / each.capacity_bytes for each in trials), default=0):.3f}",
        )
    Console(highlight=False, width=max(console.width, 130)).print(table)

"""What does a byte budget cost with a slow or a fast link, or a disk, below: swapping, recomputing, or both?

A benchmark, on the virtual accelerator: the CPU pool is the device, RAM outside of it the host, and the lanes keep the
ratio of link bytes to compute of real cards (delta_runtime/act/links.py). The link "disk" is no link: the plain CPU
device with a spill file in the directory for temporary files, as fast as it is. Trains M1, M2 and M3 of
scripts/workloads.py at several shares of the activations under several policies, with the pool's capacity at the
budget. All policies and links of one budget take turns, in a random order in each round, with ordinary steps after each
round; each timed step comes after another one of its kind that is not timed, for going from one kind to another moves
memory, which no training run does at each step. A ratio is that of the least step of each kind, as timeit has it: what
else happens on a machine makes steps slower, by several per cent, never faster. Who is slower than the fastest of the
first two rounds by more than a quarter of a step is not timed again. Compute runs on one thread, so that a second core
is left for the copies, as an accelerator has copy engines of its own: nothing else should run. Takes 10 to 20 minutes
for each model and share, two to three hours for all; needs no GPU.

    python scripts/bench_swap.py [--models vit,gpt,resnet50] [--links pcie3,pcie4,pcie5,c2c,disk]
        [--shares 0.7,0.5,0.35] [--policies swap,recompute,delta,capuchin,auto] [--rounds 5]
        [--json FILE] [--markdown FILE]

A policy may be bound to one link, as in swap@c2c.

Behind each ratio: seconds of recomputing + seconds of waiting for a lane, as the runtime counted them in that step.
"floor" is what no way of swapping alone can go below: the larger of compute and the seconds that the bytes which have
to be away take in one lane, over compute. What `auto` is, is said by the difference between its ratio and that of the
better of swap and recompute: "worse" where it is more than 1 % of a step, "clearly better" where it saves a fifth of
that one's extra time and more than 1 %. Beside it the difference in per cent, and the median of the differences within
each round, with its quartiles. The last column is the same by the counted seconds (clearly: a fifth, and 0.2 % of a
step). The exit status is by the ratios.

    python scripts/bench_swap.py --read FILE ...       # the table of runs that --json wrote; nothing is timed
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.act.links import PROFILES, flops_per_s, link_bytes_per_s
from delta_runtime.act.spill import measure_disk
from delta_runtime.core.model import Exit
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.decide.known_steps import CALIBRATION_STEPS, MOST_TRIALS, TRIAL_STEPS
from delta_runtime.decide.policies import POLICIES
from delta_runtime.report.step_report import StepTotals
from scripts.bench_recompute import (
    BENCH_WORKLOADS,
    SEED,
    Measured,
    Spread,
    _words,
    console,
    machine,
    measure,
    train_step,
    write_json,
)
from scripts.workloads import TrainState

DISK = "disk"
LINKS = tuple(PROFILES)
SHARES = (0.7, 0.5, 0.35)
SWAPPING = ("swap", "delta", "capuchin", "auto")
NOISE = 0.01
"""Ratios that differ by less are equal."""
CLEARLY = 0.2
"""The share of the extra time that has to be saved to be clearly better."""
SLOW = 0.25
"""Who is slower than the fastest by this share of a step is not timed again."""
LEAST = 0.002
"""The share of a step that has to be saved too, by the counted seconds."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one budget over one link.

    Args:
        link: "" for `recompute`, which has none.
        ratio: step time over that of the ordinary steps around its round, median; None where it ran out of memory.
        floor: the least ratio of any way of swapping alone.
        recompute_s, stall_s: seconds of a timed step, median.
        swapped_bytes, dropped_bytes: of a timed step, median.
        peak_bytes: the highest of all steps.
        host_waste: share of the host memory taken that no block was in at the most.
        rounding_waste: the same if each block were rounded up to a power of two, as torch's pinned allocator does.
        seconds: of the timed steps, by round.
        ordinaries: seconds of the ordinary steps before, between and after the rounds.
    """

    model: str
    link: str
    share: float
    policy: str
    budget_bytes: int
    ratio: Spread | None
    floor: float
    ordinary_s: float
    recompute_s: float
    stall_s: float
    swapped_bytes: float
    dropped_bytes: float
    peak_bytes: int
    host_waste: float
    rounding_waste: float
    failure: str
    seconds: Sequence[float] = ()
    ordinaries: Sequence[float] = ()

    @property
    def extra(self) -> float | None:
        """Seconds of recomputing and waiting, over an ordinary step; None where it ran out of memory."""
        return None if self.ratio is None else (self.recompute_s + self.stall_s) / self.ordinary_s

    @property
    def least_ratio(self) -> float:
        """The least step over the least ordinary one; inf where it ran out of memory."""
        if self.seconds and self.ordinaries:
            return min(self.seconds) / min(self.ordinaries)
        return self.ratio.median if self.ratio else float("inf")

    def text(self) -> str:
        """Extra time in per cent of a step as counted, and the measured ratio."""
        if self.ratio is None or self.extra is None:
            return "failed"
        return f"{self.extra * 100:.1f} ({self.least_ratio:.3f})"


@functools.cache
def bytes_per_s(link: str) -> float:
    """Of a link in one direction; of the disk, in the slower one, as it is without a page cache."""
    if link == DISK:
        return min(measure_disk(tempfile.gettempdir(), 256 << 20, direct=True))
    return link_bytes_per_s(link)


@dataclass(slots=True)
class Contender:
    """A runtime of one policy over one link, and what its steps have shown."""

    link: str
    policy: str
    runtime: delta.Runtime
    seconds: list[float] = field(default_factory=list)
    lasts: list[StepTotals] = field(default_factory=list)
    peak_bytes: int = 0
    failure: str = ""


class Bench:
    """All cells of one workload."""

    def __init__(self, name: str, rounds: int) -> None:
        self.name = name
        self.rounds = rounds
        self.index = 3
        self.state: TrainState = BENCH_WORKLOADS[name].build(SEED)
        self.measured: Measured = measure(self.state)

    def ordinary(self) -> float:
        """Seconds of an ordinary step that comes after another one."""
        seconds = 0.0
        for _ in range(2):
            self.index += 1
            batch = self.state.batch(self.index)
            gc.collect()
            begin = time.perf_counter()
            train_step(self.state, batch)
            seconds = time.perf_counter() - begin
        return seconds

    def managed(self, contender: Contender, budget_bytes: int) -> float:
        """Seconds of a step inside the budget; nan where it ran out of memory, now or before."""
        if contender.failure:
            return float("nan")
        self.index += 1
        batch = self.state.batch(self.index)
        gc.collect()
        cpu_pool.set_capacity(budget_bytes)
        cpu_pool.reset_peak()
        begin = time.perf_counter()
        try:
            train_step(self.state, batch, contender.runtime)
            seconds = time.perf_counter() - begin
        except (torch.OutOfMemoryError, delta.DeltaError) as error:
            contender.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            seconds = float("nan")
        finally:
            cpu_pool.set_capacity(None)
        if contender.failure:
            self.state.optimizer.zero_grad(set_to_none=True)
        contender.peak_bytes = max(contender.peak_bytes, contender.runtime.report().last.peak_bytes)
        return seconds

    def cells(self, share: float, places: Sequence[tuple[str, str]]) -> list[Cell]:
        """Calibrates one runtime for each link and policy, times them in turns, and closes them."""
        budget_bytes = self.measured.budget_bytes(share)
        contenders = [self.start(link, policy, budget_bytes) for link, policy in places]
        ordinaries = [self.ordinary()]
        timed = list(contenders)
        for index in range(self.rounds):
            timed = [c for c in timed if not c.failure]
            if not timed:
                break
            random.Random(f"{self.name} {share} {index}").shuffle(timed)
            for contender in timed:
                self.managed(contender, budget_bytes)
                seconds = self.managed(contender, budget_bytes)
                if not contender.failure:
                    contender.seconds.append(seconds)
                    contender.lasts.append(contender.runtime.report().last)
            ordinaries.append(self.ordinary())
            if index != 1:
                continue
            fastest = min((min(c.seconds) for c in timed if c.seconds), default=0.0)
            limit = fastest + SLOW * min(ordinaries)
            timed = [c for c in timed if c.seconds and min(c.seconds) <= limit]
        return [self.close(c, share, budget_bytes, ordinaries) for c in contenders]

    def start(self, link: str, policy: str, budget_bytes: int) -> Contender:
        """Makes a runtime and lets it see as many steps as it needs for its last plan."""
        below: dict[str, Any] = {}
        if link == DISK:
            below = {
                "spill_dir": tempfile.gettempdir(),
                "disk_budget": self.measured.activation_bytes,
            }
        elif link:
            below = {"link_bytes_per_s": bytes_per_s(link)}
        runtime = delta.Runtime(budget_bytes, device="cpu", policy=policy, **below)
        contender = Contender(link, policy, runtime)
        for index in range(CALIBRATION_STEPS + TRIAL_STEPS * (MOST_TRIALS + 1) + 1):
            self.managed(contender, budget_bytes)
            if index >= 1 and (runtime._known.settled or not POLICIES[policy].plans):
                break
        return contender

    def close(
        self, contender: Contender, share: float, budget_bytes: int, ordinaries: list[float]
    ) -> Cell:
        """What one contender has shown."""
        runtime, lasts = contender.runtime, contender.lasts
        around = [(a + b) / 2 for a, b in itertools.pairwise(ordinaries)]
        ratios = [s / o for s, o in zip(contender.seconds, around, strict=False)]
        host = runtime._session.tiers()[0] if runtime.tiers else None
        foresight = runtime._known.foresight
        swapped = foresight.exits == Exit.SWAP if foresight else np.zeros(0, bool)
        blocks = runtime.graph().value_bytes[swapped] if swapped.any() else np.zeros(0, np.int64)
        rounded = 2 ** np.ceil(np.log2(np.maximum(blocks, 1)))
        runtime.close()
        gc.collect()
        ordinary_s = statistics.median(ordinaries)
        away_bytes = (1 - share) * self.measured.activation_bytes
        lane_s = away_bytes / bytes_per_s(contender.link) if contender.link else 0.0

        def median(numbers: Iterable[float]) -> float:
            return statistics.median(numbers) if lasts else 0.0

        cell = Cell(
            model=self.name,
            link=contender.link,
            share=share,
            policy=contender.policy,
            budget_bytes=budget_bytes,
            ratio=Spread.of(ratios) if ratios else None,
            floor=max(1.0, lane_s / ordinary_s),
            ordinary_s=ordinary_s,
            recompute_s=median(t.rebuild_s for t in lasts),
            stall_s=median(t.out_stall_s + t.in_stall_s for t in lasts),
            swapped_bytes=median(t.swapped_in_bytes for t in lasts),
            dropped_bytes=median(t.dropped_bytes for t in lasts),
            peak_bytes=contender.peak_bytes,
            host_waste=1 - host["peak_used_bytes"] / host["taken_bytes"]
            if host and host["taken_bytes"]
            else 0.0,
            rounding_waste=1 - float(blocks.sum()) / float(rounded.sum()) if len(blocks) else 0.0,
            failure=contender.failure,
            seconds=contender.seconds,
            ordinaries=ordinaries,
        )
        console.print(
            f"  {self.name} {cell.link or '-':6} {share:4.0%} {cell.policy:10} "
            f"{cell.ratio.text() if cell.ratio else cell.failure}  "
            f"(recompute {format_seconds(cell.recompute_s)}, "
            f"swapped {format_bytes(cell.swapped_bytes)}, waited {format_seconds(cell.stall_s)}; "
            f"peak / budget {cell.peak_bytes / budget_bytes:.3f}, host memory wasted {cell.host_waste:.1%}, "
            f"rounded to powers of two {cell.rounding_waste:.1%})",
            markup=False,
        )
        return cell


HEADINGS = ("model", "link", "share", "floor", *SWAPPING[:1], "recompute", *SWAPPING[1:])
HEADINGS += ("auto is, by ratio", "by count")


def verdict(difference: float, best: float, least: float) -> str:
    """What `auto` is.

    Args:
        difference: its extra time less that of the better of swap and recompute, as a share of a step.
        best: the extra time of that one.
        least: what has to be saved at the least to be clearly better.
    """
    if difference > NOISE:
        return "worse"
    return "clearly better" if -difference > max(CLEARLY * best, least) else "as good"


def judged(found: dict[str, Cell | None]) -> tuple[str, str]:
    """What `auto` is at one place by the ratios, with the difference in per cent, and by the count."""
    auto = found["auto"]
    rivals = [c for c in (found["swap"], found["recompute"]) if c is not None and c.ratio]
    if auto is None or not rivals:
        return "", ""
    if not auto.ratio:
        return "worse: failed", "worse: failed"
    best = min(rivals, key=lambda c: c.least_ratio)
    difference = auto.least_ratio - best.least_ratio
    by_ratio = f"{verdict(difference, best.least_ratio - 1, NOISE)} {difference * 100:+.1f}"
    if len(auto.seconds) == len(best.seconds) > 1:
        pairs = zip(auto.seconds, best.seconds, strict=True)
        each = Spread.of([(a - b) / auto.ordinary_s * 100 for a, b in pairs])
        by_ratio += f" ({each.median:+.1f} [{each.q1:+.1f}, {each.q3:+.1f}])"
    auto_s, best_s = auto.extra or 0.0, min(c.extra or 0.0 for c in rivals)
    return by_ratio, verdict(auto_s - best_s, best_s, LEAST)


def show(cells: list[Cell]) -> bool:
    """Prints the table; whether `auto` is worse somewhere, by the ratios."""
    table = Table(title="Extra time in % of a step, counted (measured ratio)", title_justify="left")
    for i, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if i < 2 else "right")
    told = rows(cells)
    for row in told:
        table.add_row(*row)
    Console(highlight=False, width=max(console.width, 160)).print(table)
    for column, way in ((-2, "by ratio"), (-1, "by count")):
        verdicts = [row[column] for row in told if row[column]]
        worse, better = (
            sum(each.startswith(word) for each in verdicts) for word in ("worse", "clearly")
        )
        console.print(
            f"auto, {way}: worse in {worse} of {len(verdicts)} rows, clearly better in {better}"
        )
    return any(row[-2].startswith("worse") for row in told)


def read(paths: list[Path]) -> list[Cell]:
    """The cells of earlier runs."""
    cells = []
    for path in paths:
        for each in json.loads(path.read_text())["cells"]:
            spread = each["ratio"]
            cells.append(Cell(**each | {"ratio": Spread(**spread) if spread else None}))
    return cells


def rows(cells: list[Cell]) -> list[tuple[str, ...]]:
    """One row for each model, link and share."""
    told = []
    by_place = {(c.model, c.link, c.share, c.policy): c for c in cells}
    for model, link, share in dict.fromkeys((c.model, c.link, c.share) for c in cells if c.link):
        found = {p: by_place.get((model, link, share, p)) for p in SWAPPING}
        found["recompute"] = by_place.get((model, "", share, "recompute"))
        floor = next(c.floor for c in found.values() if c is not None and c.link)
        texts = [
            "-" if found[p] is None else found[p].text()
            for p in ("swap", "recompute", "delta", "capuchin", "auto")
        ]
        told.append((model, link, f"{share:.0%}", f"{floor:.2f}", *texts, *judged(found)))
    return told


def markdown(cells: list[Cell]) -> str:
    """The table in Markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(cells)]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=_words, default=["vit", "gpt", "resnet50"])
    parser.add_argument("--links", type=_words, default=list(LINKS))
    parser.add_argument(
        "--shares", type=lambda text: [float(w) for w in _words(text)], default=list(SHARES)
    )
    parser.add_argument("--policies", type=_words, default=["recompute", *SWAPPING])
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each cell")
    parser.add_argument("--threads", type=int, default=1, help="of compute")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", help="files that --json wrote")
    arguments = parser.parse_args(argv)
    if arguments.read:
        cells = read(arguments.read)
        worse = show(cells)
        if arguments.markdown:
            arguments.markdown.write_text(markdown(cells))
        return 1 if worse else 0
    for name in arguments.models:
        if name not in BENCH_WORKLOADS:
            parser.error(f"--models: {name!r} is none of {', '.join(BENCH_WORKLOADS)}")
    for name in arguments.links:
        if name not in (*PROFILES, DISK):
            parser.error(f"--links: {name!r} is none of {', '.join((*PROFILES, DISK))}")
    for name in arguments.policies:
        policy, _, link = name.partition("@")
        if policy not in ("recompute", *SWAPPING) or link not in ("", *LINKS, DISK):
            parser.error(f"--policies: {name!r} is none of recompute, {', '.join(SWAPPING)}")
    torch.set_num_threads(arguments.threads)
    cpu_pool.install()
    console.print(f"compute: {flops_per_s() / 1e9:.1f} GFLOP/s; links in one direction: " + ", ".join(
        f"{name} {bytes_per_s(name) / 1e6:.0f} MB/s" for name in arguments.links
    ))  # fmt: skip
    cells: list[Cell] = []
    for name in arguments.models:
        bench = Bench(name, arguments.rounds)
        m = bench.measured
        console.print(
            f"[bold]{BENCH_WORKLOADS[name].title}[/]: ordinary peak {format_bytes(m.peak_bytes)}, "
            f"activations {m.activation_bytes / m.peak_bytes:.1%} of it"
        )
        swapping = [p.partition("@") for p in arguments.policies if p != "recompute"]
        for share in arguments.shares:
            places = [("", "recompute")] if "recompute" in arguments.policies else []
            places += [
                (link, policy)
                for link in arguments.links
                for policy, _, only in swapping
                if only in ("", link)
            ]
            cells += bench.cells(share, places)
            write_json(
                arguments.json, {"machine": machine(), "cells": [asdict(cell) for cell in cells]}
            )
    worse = show(cells)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(cells))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

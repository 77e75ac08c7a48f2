"""What does a byte budget cost with a slow or a fast link, or a disk, below: swapping, recomputing, or both?

A benchmark, on the virtual accelerator: the CPU pool is the device, RAM outside of it the host, and the lanes keep the
ratio of link bytes to compute of real cards (delta_runtime/act/links.py). The link "disk" is no link: the plain CPU
device with a spill file in the directory for temporary files, as fast as it is. Trains M1, M2 and M3 of
scripts/workloads.py at several shares of the activations under several policies, with the pool's capacity at the
budget. All policies and links of one budget, and ordinary steps, take turns, in a random order in each round; the first
step of a turn is not timed, for going from one kind to another moves memory, which no training run does at each step. A
step's time is put together from the least time of each of its pieces (benchmarks/piecewise.py), for no step of seconds
is undisturbed where others share the machine. Who is slower after two rounds than the fastest over the same link or
none, by more than a quarter of a step, is not timed again; whose plan changes is timed anew. Compute runs on one
thread, so that a second core is left for the copies, as an accelerator has copy engines of its own: nothing of yours
should run beside it. With `--policies recompute,auto,swap@c2c` it takes 8 to 15 minutes for each model and share; needs
no GPU.

    python -m benchmarks.swap [--models vit,gpt,resnet50] [--links pcie3,pcie4,pcie5,c2c,disk]
        [--shares 0.7,0.5,0.35] [--policies swap,recompute,delta,capuchin,auto] [--rounds 4]
        [--steps 3] [--json FILE] [--markdown FILE]

A policy may be bound to one link, as in swap@c2c.

Behind each ratio: seconds of recomputing + seconds of waiting for a lane, as the runtime counted them in that step.
"floor" is what no way of swapping alone can go below: the larger of compute and the seconds that the bytes which have
to be away take in one lane, over compute. What `auto` is, is said by the difference between its ratio and that of the
better of swap and recompute, with the seconds that `auto` waited added once more, for pieces leave out what is now
here and now there: "worse" where it is more than 1 % of a step, "clearly better" where it saves a fifth of that one's
extra time and more than 1 %. Beside it the difference in per cent of a step, and in brackets the same from the first,
third, ... and from the second, fourth, ... rounds alone: noise between rounds, not between plans. The last column is
the same by the counted seconds (clearly: a fifth, and 0.2 % of a step). The exit status is by the ratios.

    python -m benchmarks.swap --read FILE ...       # the table of runs that --json wrote; nothing is timed

Where several of these runs timed a cell, its figures are the means, and in brackets stand the differences of each run.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
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
    SEED,
    Measured,
    Spread,
    console,
    machine,
    measure,
    train_step,
    words,
    write_json,
)
from benchmarks.piecewise import Pieces, PieceTimer, quiet_seconds
from delta_runtime import cpu_pool
from delta_runtime.act.links import PROFILES, flops_per_s, link_bytes_per_s
from delta_runtime.act.spill import measure_disk
from delta_runtime.core.events import Exit
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.online.policies import POLICIES
from delta_runtime.plan_cache import STEPS_TO_SETTLE
from delta_runtime.report.step_report import StepTotals
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
        ratio: timed steps of a round over the ordinary ones of that round, median; None where it ran out of memory.
        floor: the least ratio of any way of swapping alone.
        recompute_s, stall_s: seconds of a timed step, median.
        swapped_bytes, dropped_bytes: of a timed step, median.
        peak_bytes: the highest of all steps.
        host_waste: share of the host memory taken that no block was in at the most.
        rounding_waste: the same if each block were rounded up to a power of two, as torch's pinned allocator does.
        seconds: of the timed steps, in order.
        ordinaries: the same of ordinary steps.
        quiet_s: the sum of the least pieces of the timed steps: of all rounds, the first, third, ..., and the others.
        quiet_ordinary_s: the same of the ordinary steps of these rounds.
        run: which of the files that were read it is from.
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
    quiet_s: Sequence[float] = ()
    quiet_ordinary_s: Sequence[float] = ()
    run: int = 0

    @property
    def extra(self) -> float | None:
        """Seconds of recomputing and waiting, over an ordinary step; None where it ran out of memory."""
        return None if self.ratio is None else (self.recompute_s + self.stall_s) / self.ordinary_s

    @property
    def quiet_ratio(self) -> float:
        """Step time over an ordinary one's, without what disturbed either; inf where it ran out of memory."""
        if self.quiet_s:
            return self.quiet_s[0] / self.quiet_ordinary_s[0]
        if self.seconds and self.ordinaries:  # of a run that did not cut steps into pieces
            return min(self.seconds) / min(self.ordinaries)
        return self.ratio.median if self.ratio else float("inf")

    def ratios(self) -> list[float]:
        """Return the quiet ratio, the seconds that were waited added once more: of all rounds, and of either half."""
        if not self.quiet_s:
            return [self.quiet_ratio]
        waits = self.stall_s / self.ordinary_s
        return [s / o + waits for s, o in zip(self.quiet_s, self.quiet_ordinary_s, strict=True)]


@dataclass(frozen=True, slots=True)
class Findings:
    """One policy at one place.

    Args:
        cells: of one run or of several; not empty.
    """

    cells: Sequence[Cell]

    @classmethod
    def of(cls, cells: Sequence[Cell]) -> Findings:
        """Return the findings of the runs that cut steps into pieces; the last one where none did."""
        return cls([c for c in cells if c.quiet_s] or cells[-1:])

    @property
    def failed(self) -> bool:
        """Whether it ran out of memory in any run."""
        return any(c.ratio is None for c in self.cells)

    @property
    def ratio(self) -> float:
        """Step time over an ordinary one's."""
        return statistics.mean(c.quiet_ratio for c in self.cells)

    @property
    def extra(self) -> float:
        """Seconds of recomputing and waiting, over an ordinary step."""
        return statistics.mean(c.extra or 0.0 for c in self.cells)

    def text(self) -> str:
        """Extra time in per cent of a step as counted, and the measured ratio."""
        return "failed" if self.failed else f"{self.extra * 100:.1f} ({self.ratio:.3f})"

    def over(self, best: Findings) -> list[float]:
        """How much slower it is than another, in ordinary steps: on the whole, then of each run or half of one."""
        by_run = {c.run: c for c in best.cells}
        pairs = [(c, by_run[c.run]) for c in self.cells if c.run in by_run]
        if not pairs:
            return [self.ratio - best.ratio]
        waited = [(mine.ratios(), his.quiet_ratio) for mine, his in pairs]
        differences = [mine[0] - his for mine, his in waited]
        if len(pairs) > 1:
            return [statistics.mean(differences), *differences]
        mine, his = pairs[0]
        if len(mine.quiet_s) != 3 or len(mine.seconds) != len(his.seconds):
            return differences
        halves = zip(mine.ratios()[1:], his.quiet_s[1:], his.quiet_ordinary_s[1:], strict=True)
        return [*differences, *(m - s / o for m, s, o in halves)]


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
    turns: dict[int, list[Pieces]] = field(default_factory=dict)  # by round
    lasts: list[StepTotals] = field(default_factory=list)
    peak_bytes: int = 0
    failure: str = ""


def quiet_by_rounds(turns: Sequence[Sequence[Pieces]]) -> tuple[float, ...]:
    """Seconds of a step by all rounds, by every second from the first on, and by the others."""
    choices = (turns, turns[::2], turns[1::2])
    return tuple(quiet_seconds([*itertools.chain(*chosen)]) for chosen in choices if chosen)


def whole(turns: Sequence[Sequence[Pieces]]) -> list[float]:
    """Seconds of the steps of some turns."""
    return [float(pieces.sum()) for turn in turns for pieces in turn]


class Bench:
    """All cells of one workload."""

    def __init__(self, name: str, rounds: int, steps_per_turn: int) -> None:
        self.name = name
        self.rounds = rounds
        self.steps_per_turn = steps_per_turn
        self.index = 3
        self.state: TrainState = BENCH_WORKLOADS[name].build(SEED)
        self.timer = PieceTimer(self.state.model)
        self.measured: Measured = measure(self.state)

    def ordinary(self) -> Pieces:
        """Run an ordinary step."""
        self.index += 1
        batch = self.state.batch(self.index)
        gc.collect()
        self.timer.begin()
        train_step(self.state, batch)
        return self.timer.end()

    def managed(self, contender: Contender, budget_bytes: int) -> Pieces:
        """Run a step inside the budget; empty where it ran out of memory, now or before."""
        pieces = np.zeros(0)
        if contender.failure:
            return pieces
        self.index += 1
        batch = self.state.batch(self.index)
        gc.collect()
        cpu_pool.set_capacity(budget_bytes)
        cpu_pool.reset_peak()
        self.timer.begin()
        try:
            train_step(self.state, batch, contender.runtime)
            pieces = self.timer.end()
        except (torch.OutOfMemoryError, delta.DeltaError) as error:
            contender.failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        finally:
            cpu_pool.set_capacity(None)
        if contender.failure:
            self.state.optimizer.zero_grad(set_to_none=True)
        contender.peak_bytes = max(contender.peak_bytes, contender.runtime.report().last.peak_bytes)
        return pieces

    def cells(self, share: float, places: Sequence[tuple[str, str]]) -> list[Cell]:
        """Calibrates one runtime for each link and policy, times them in turns, and closes them."""
        budget_bytes = self.measured.budget_bytes(share)
        contenders = [self.start(link, policy, budget_bytes) for link, policy in places]
        ordinaries: list[list[Pieces]] = []
        timed = [c for c in contenders if not c.failure]
        for index in range(2 * self.rounds):
            if index >= self.rounds:  # for those whose plan changed in the last one
                timed = [c for c in timed if not c.turns]
            if index > 0 and not timed:
                break
            turns: list[Contender | None] = [None, *timed]
            random.Random(f"{self.name} {share} {index}").shuffle(turns)
            for contender in turns:
                if contender is not None:
                    self.take_turn(contender, index, budget_bytes)
                    continue
                self.ordinary()
                ordinaries.append([self.ordinary() for _ in range(self.steps_per_turn)])
            timed = [c for c in timed if not c.failure]
            if index == 1:
                timed = self.without_slow(timed, SLOW * quiet_by_rounds(ordinaries)[0])
        return [self.close(c, share, budget_bytes, ordinaries) for c in contenders]

    def take_turn(self, contender: Contender, index: int, budget_bytes: int) -> None:
        """Time some steps of one contender: nothing of them if one fails, nothing before if its plan changes."""
        runtime = contender.runtime
        plan = runtime.plan()
        turn, lasts = [], []
        for step in range(1 + self.steps_per_turn):
            pieces = self.managed(contender, budget_bytes)
            if contender.failure:
                return
            if POLICIES[contender.policy].plans and not (
                runtime.settled and runtime.plan() is plan
            ):
                contender.turns, contender.lasts = {}, []
                self.settle(contender, budget_bytes)
                return
            if step > 0:
                turn.append(pieces)
                lasts.append(contender.runtime.report().last)
        contender.turns[index] = turn
        contender.lasts += lasts

    @staticmethod
    def without_slow(timed: list[Contender], margin_s: float) -> list[Contender]:
        """Those that are not slower by more than a margin than the fastest over their link or none."""
        quiet_s = {id(c): quiet_by_rounds([*c.turns.values()])[0] for c in timed if c.turns}

        def fast(c: Contender) -> bool:
            rivals = [o for o in timed if o.turns and o.link in ("", c.link)]
            return not c.turns or quiet_s[id(c)] <= margin_s + min(quiet_s[id(o)] for o in rivals)

        return [c for c in timed if fast(c)]

    def start(self, link: str, policy: str, budget_bytes: int) -> Contender:
        """Make a runtime and let it see as many steps as it needs for its last plan."""
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
        self.settle(contender, budget_bytes)
        return contender

    def settle(self, contender: Contender, budget_bytes: int) -> None:
        """Run steps until a plan stays, but no more than that takes at the most."""
        for index in range(STEPS_TO_SETTLE):
            self.managed(contender, budget_bytes)
            plans = POLICIES[contender.policy].plans
            if index >= 1 and (contender.runtime.settled or not plans):
                break

    def close(
        self,
        contender: Contender,
        share: float,
        budget_bytes: int,
        ordinaries: list[list[Pieces]],
    ) -> Cell:
        """Return what one contender has shown."""
        runtime, lasts = contender.runtime, contender.lasts
        if not contender.turns and not contender.failure:
            contender.failure = "no plan stayed for a turn"
        turns = [] if contender.failure else [*contender.turns.values()]
        beside = [ordinaries[index] for index in contender.turns]
        ratios = [
            sum(whole([turn])) / sum(whole([ordinary]))
            for turn, ordinary in zip(turns, beside, strict=False)
        ]
        host = runtime.session.tiers()[0] if runtime.tiers else None
        plan = runtime.plan()
        swapped = plan.first_exits() == Exit.SWAP if plan else np.zeros(0, bool)
        blocks = runtime.graph().value_bytes[swapped] if swapped.any() else np.zeros(0, np.int64)
        rounded = 2 ** np.ceil(np.log2(np.maximum(blocks, 1)))
        runtime.close()
        gc.collect()
        ordinary_s = statistics.median(whole(ordinaries))
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
            seconds=whole(turns),
            ordinaries=whole(ordinaries),
            quiet_s=quiet_by_rounds(turns),
            quiet_ordinary_s=quiet_by_rounds(beside if turns else []),
        )
        console.print(
            f"  {self.name} {cell.link or '-':6} {share:4.0%} {cell.policy:10} "
            f"{cell.quiet_ratio:.3f}, {cell.ratio.text() if cell.ratio else cell.failure}  "
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
    """Return what `auto` is.

    Args:
        difference: its extra time less that of the better of swap and recompute, as a share of a step.
        best: the extra time of that one.
        least: what has to be saved at the least to be clearly better.
    """
    if difference > NOISE:
        return "worse"
    return "clearly better" if -difference > max(CLEARLY * best, least) else "as good"


def judged(found: dict[str, Findings | None]) -> tuple[str, str]:
    """Return what `auto` is at one place by the ratios, with the differences in per cent, and by the count."""
    auto = found["auto"]
    rivals = [f for f in (found["swap"], found["recompute"]) if f is not None and not f.failed]
    if auto is None or not rivals:
        return "", ""
    if auto.failed:
        return "worse: failed", "worse: failed"
    best = min(rivals, key=lambda f: f.ratio)
    difference, *each = auto.over(best)
    by_ratio = f"{verdict(difference, best.ratio - 1, NOISE)} {difference * 100:+.1f}"
    if each:
        by_ratio += f" ({', '.join(f'{one * 100:+.1f}' for one in each)})"
    best_extra = min(f.extra for f in rivals)
    return by_ratio, verdict(auto.extra - best_extra, best_extra, LEAST)


def apart(by_ratio: Iterable[str]) -> list[float]:
    """How far the differences in the brackets of each verdict lie apart, in per cent of a step, ascending."""
    found = ([float(n) for n in re.findall(r"[+-]\d+\.\d", told)[1:]] for told in by_ratio)
    return sorted(max(each) - min(each) for each in found if len(each) > 1)


def show(cells: list[Cell]) -> bool:
    """Print the table; whether `auto` is worse somewhere, by the ratios."""
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
    if spreads := apart(row[-2] for row in told):
        console.print(
            f"in the brackets of a row: {statistics.median(spreads):.1f} % of a step apart in the median, "
            f"{spreads[-1]:.1f} % at most"
        )
    return any(row[-2].startswith("worse") for row in told)


def read(paths: list[Path]) -> list[Cell]:
    """Return the cells of earlier runs."""
    cells = []
    for run, path in enumerate(paths):
        for each in json.loads(path.read_text())["cells"]:
            spread = each["ratio"]
            changed = {"ratio": Spread(**spread) if spread else None, "run": run}
            cells.append(Cell(**each | changed))
    return cells


def rows(cells: list[Cell]) -> list[tuple[str, ...]]:
    """One row for each model, link and share."""
    told = []
    by_place: dict[tuple[str, str, float, str], list[Cell]] = {}
    for c in cells:
        by_place.setdefault((c.model, c.link, c.share, c.policy), []).append(c)
    for model, link, share in dict.fromkeys((c.model, c.link, c.share) for c in cells if c.link):
        places = {p: (model, link, share, p) for p in SWAPPING}
        places["recompute"] = (model, "", share, "recompute")
        found = {
            p: Findings.of(by_place[place]) if place in by_place else None
            for p, place in places.items()
        }
        floor = next(f.cells[0].floor for f in found.values() if f and f.cells[0].link)
        texts = [
            each.text() if (each := found[p]) else "-"
            for p in ("swap", "recompute", "delta", "capuchin", "auto")
        ]
        told.append((model, link, f"{share:.0%}", f"{floor:.2f}", *texts, *judged(found)))
    return told


def markdown(cells: list[Cell]) -> str:
    """Return the table in Markdown."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(cells)]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=words, default=["vit", "gpt", "resnet50"])
    parser.add_argument("--links", type=words, default=list(LINKS))
    parser.add_argument(
        "--shares", type=lambda text: [float(w) for w in words(text)], default=list(SHARES)
    )
    parser.add_argument("--policies", type=words, default=["recompute", *SWAPPING])
    parser.add_argument("--rounds", type=int, default=4, help="turns of each policy")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
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
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps: at least 1")
    torch.set_num_threads(arguments.threads)
    cpu_pool.install()
    console.print(f"compute: {flops_per_s() / 1e9:.1f} GFLOP/s; links in one direction: " + ", ".join(
        f"{name} {bytes_per_s(name) / 1e6:.0f} MB/s" for name in arguments.links
    ))  # fmt: skip
    cells: list[Cell] = []
    for name in arguments.models:
        bench = Bench(name, arguments.rounds, arguments.steps)
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

"""What does a byte budget cost with a slow or a fast link, or a disk, below: swapping, recomputing, or both?

A benchmark, on the virtual accelerator: the CPU pool is the device, RAM outside of it the host, and the lanes keep the
ratio of link bytes to compute of real cards (delta_runtime/act/links.py). The link "disk" is no link: the plain CPU
device with a spill file in the directory for temporary files, as fast as it is. Trains M1, M2 and M3 of
scripts/workloads.py at several shares of the activations under several policies, with the pool's capacity at the
budget. Every timed step has an ordinary one before and after it, in one process, and its ratio is to their mean.
Compute runs on one thread, so that a second core is left for the copies, as an accelerator has copy engines of its own.
Takes a minute for each cell, several where `swap` waits for a slow link: some hours for all 153. Needs no GPU.

    python scripts/bench_swap.py [--models vit,gpt,resnet50] [--links pcie3,pcie4,pcie5,c2c,disk]
        [--shares 0.7,0.5,0.35] [--policies swap,recompute,delta,capuchin,auto] [--rounds 1]
        [--json FILE] [--markdown FILE]

Behind each ratio: seconds of recomputing + seconds of waiting for a lane, as the runtime counted them in that step.
"floor" is what no way of swapping alone can go below: the larger of compute and the seconds that the bytes which have
to be away take in one lane, over compute. A row of `auto` is "worse" where its ratio is above that of the better of
swap and recompute by more than 1 %, "clearly better" where it saves at least a fifth of that one's extra time, and 1 %.
Beside it stands the same by the counted seconds (clearly: a fifth, and 0.2 % of a step): on a machine that others use,
ordinary steps alone differ by more than 1 %, and the counts do not. The exit status is by the ratios.

    python scripts/bench_swap.py --read FILE ...       # the table of runs that --json wrote; nothing is timed
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
from delta_runtime.core.model import Exit, Residency
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.decide.known_steps import CALIBRATION_STEPS
from delta_runtime.decide.policies import POLICIES
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
LEAST = 0.002
"""The share of a step that has to be saved too, by the counted seconds."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one budget over one link.

    Args:
        ratio: step time over that of the ordinary steps around it; None where it ran out of memory.
        floor: the least ratio of any way of swapping alone.
        recompute_s, stall_s: seconds of the timed step, median.
        swapped_bytes, dropped_bytes: of the timed step, median.
        peak_bytes: the highest of all steps.
        host_waste: share of the host memory taken that no block was in at the most.
        rounding_waste: the same if each block were rounded up to a power of two, as torch's pinned allocator does.
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

    @property
    def extra(self) -> float | None:
        """Seconds of recomputing and waiting, over an ordinary step; None where it ran out of memory."""
        return None if self.ratio is None else (self.recompute_s + self.stall_s) / self.ordinary_s

    def text(self) -> str:
        """Extra time in per cent of a step as counted, and the measured ratio."""
        if self.ratio is None or self.extra is None:
            return "failed"
        return f"{self.extra * 100:.1f} ({self.ratio.median:.2f})"


@functools.cache
def bytes_per_s(link: str) -> float:
    """Of a link in one direction; of the disk, in the slower one, as it is without a page cache."""
    if link == DISK:
        return min(measure_disk(tempfile.gettempdir(), 256 << 20, direct=True))
    return link_bytes_per_s(link)


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

    def managed(self, runtime: delta.Runtime, budget_bytes: int) -> float:
        """Seconds of a step inside the budget."""
        self.index += 1
        batch = self.state.batch(self.index)
        gc.collect()
        cpu_pool.set_capacity(budget_bytes)
        begin = time.perf_counter()
        try:
            train_step(self.state, batch, runtime)
            return time.perf_counter() - begin
        finally:
            cpu_pool.set_capacity(None)

    def cell(self, link: str, share: float, policy: str) -> Cell:
        """Calibrates one runtime, times it, and closes it."""
        budget_bytes = self.measured.budget_bytes(share)
        speed = bytes_per_s(link)
        below = (
            {"spill_dir": tempfile.gettempdir()} if link == DISK else {"link_bytes_per_s": speed}
        )
        if Residency.HOST not in POLICIES[policy].evicts_to:
            below = {}
        runtime = delta.Runtime(budget_bytes, device="cpu", policy=policy, **below)
        cpu_pool.reset_peak()
        ratios, lasts, peaks, ordinaries = [], [], [], []
        failure = ""
        try:
            for _ in range(CALIBRATION_STEPS + 1 if POLICIES[policy].plans else 2):
                self.managed(runtime, budget_bytes)
                peaks.append(runtime.report().last.peak_bytes)
            before = self.ordinary()
            for _ in range(self.rounds):
                self.managed(runtime, budget_bytes)
                seconds = self.managed(runtime, budget_bytes)
                lasts.append(runtime.report().last)
                peaks.append(lasts[-1].peak_bytes)
                after = self.ordinary()
                ordinaries.append((before + after) / 2)
                ratios.append(seconds / ordinaries[-1])
                before = after
        except (torch.OutOfMemoryError, delta.DeltaError) as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self.state.optimizer.zero_grad(set_to_none=True)
        host = runtime._session.tiers()[0] if runtime.tiers else None
        foresight = runtime._known.foresight
        swapped = foresight.exits == Exit.SWAP if foresight else np.zeros(0, bool)
        blocks = runtime.graph().value_bytes[swapped] if swapped.any() else np.zeros(0, np.int64)
        rounded = 2 ** np.ceil(np.log2(np.maximum(blocks, 1)))
        runtime.close()
        gc.collect()
        ordinary_s = statistics.median(ordinaries) if ordinaries else 0.0
        away_bytes = (1 - share) * self.measured.activation_bytes
        cell = Cell(
            model=self.name,
            link=link,
            share=share,
            policy=policy,
            budget_bytes=budget_bytes,
            ratio=Spread.of(ratios) if ratios else None,
            floor=max(1.0, away_bytes / speed / ordinary_s) if ordinary_s else 1.0,
            ordinary_s=ordinary_s,
            recompute_s=statistics.median(t.rebuild_s for t in lasts) if lasts else 0.0,
            stall_s=statistics.median(t.out_stall_s + t.in_stall_s for t in lasts)
            if lasts
            else 0.0,
            swapped_bytes=statistics.median(t.swapped_in_bytes for t in lasts) if lasts else 0.0,
            dropped_bytes=statistics.median(t.dropped_bytes for t in lasts) if lasts else 0.0,
            peak_bytes=max(peaks, default=0),
            host_waste=1 - host["peak_used_bytes"] / host["taken_bytes"]
            if host and host["taken_bytes"]
            else 0.0,
            rounding_waste=1 - float(blocks.sum()) / float(rounded.sum()) if len(blocks) else 0.0,
            failure=failure,
        )
        told = f"{cell.ratio.median:.3f}" if cell.ratio else failure
        console.print(
            f"  {self.name} {link:6} {share:4.0%} {policy:10} {told}  (recompute {format_seconds(cell.recompute_s)}, "
            f"swapped {format_bytes(cell.swapped_bytes)}, waited {format_seconds(cell.stall_s)}; "
            f"peak / budget {cell.peak_bytes / budget_bytes:.3f}, host memory wasted {cell.host_waste:.1%}, "
            f"rounded to powers of two {cell.rounding_waste:.1%})",
            markup=False,
        )
        return cell


HEADINGS = ("model", "link", "share", "floor", *SWAPPING[:1], "recompute", *SWAPPING[1:])
HEADINGS += ("auto is, by ratio", "by count")


def verdict(extra: dict[str, float | None], least: float) -> str:
    """What `auto` is, by the extra time of each policy as a share of a step; "" where something is missing.

    Args:
        least: what has to be saved at the least to be clearly better.
    """
    rivals = [e for e in (extra["swap"], extra["recompute"]) if e is not None]
    auto = extra["auto"]
    if auto is None or not rivals:
        return ""
    best = min(rivals)
    if auto > best + NOISE:
        return "worse"
    return "clearly better" if best - auto > max(CLEARLY * best, least) else "as good"


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
        judged = [row[column] for row in told if row[column]]
        console.print(
            f"auto, {way}: worse in {judged.count('worse')} of {len(judged)} rows, "
            f"clearly better in {judged.count('clearly better')}"
        )
    return any(row[-2] == "worse" for row in told)


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

        ratios = {p: c.ratio.median - 1 if c and c.ratio else None for p, c in found.items()}
        counted = {p: c.extra if c else None for p, c in found.items()}
        verdicts = verdict(ratios, NOISE), verdict(counted, LEAST)
        floor = next(c.floor for c in found.values() if c is not None and c.link)
        texts = [
            "-" if found[p] is None else found[p].text()
            for p in ("swap", "recompute", "delta", "capuchin", "auto")
        ]
        told.append((model, link, f"{share:.0%}", f"{floor:.2f}", *texts, *verdicts))
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
    parser.add_argument("--rounds", type=int, default=1, help="timed steps of each cell")
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
        if name not in ("recompute", *SWAPPING):
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
        for share in arguments.shares:
            if "recompute" in arguments.policies:
                cell = bench.cell(arguments.links[0], share, "recompute")
                cells.append(replace(cell, link=""))
            for link in arguments.links:
                cells += [
                    bench.cell(link, share, p) for p in arguments.policies if p != "recompute"
                ]
    worse = show(cells)
    write_json(arguments.json, {"machine": machine(), "cells": [asdict(cell) for cell in cells]})
    if arguments.markdown:
        arguments.markdown.write_text(markdown(cells))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

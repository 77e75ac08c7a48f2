"""Does a run of many thousand steps stay as fast, as small and as right as it began?

A stress run, not a benchmark. A byte-level transformer trains inside a budget, on batches whose length changes with
every step, with an evaluation each 50 steps and a checkpoint written each 500. Measured are, each `--steps` / 40:
live bytes of the pool, the resident set, op records, pages, graphs that are known, threads and file descriptors; the
time of steps of one fixed length over that of ordinary ones beside them; and whether a step's gradients are those of an
ordinary one, bit for bit. Flat is what has no slope behind the first fifth: a change over the run below its bound, or
within twice its standard error. Takes about 6 minutes for 20,000 steps on two idle cores; needs no GPU. Exits 1 where
something grew or was wrong.

    python scripts/stress_soak.py [--steps 20000] [--hours H] [--share 0.6] [--seed 0] [--out FILE]

`--hours` goes on until they are over, beyond `--steps`. `--out` appends each point to FILE, a line of JSON each.
tests/scripts/test_soak.py runs a short version.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import io
import json
import os
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import _C, cpu_pool

WIDTH, LAYERS, ROWS = 32, 2, 4
LENGTHS = (16, 24, 32, 48, 64, 96)
FIXED = 64
"""The length whose steps are timed."""
POINTS = 40
TIMED = 12
"""Steps of either kind that are timed at a point, in turns."""
EVALUATE_EACH, SAVE_EACH = 50, 500
WARM_UP_SHARE = 0.2
_FEWEST_POINTS = 5
BOUNDS = {
    "live_bytes": 1 << 12,
    "resident_bytes": 4 << 20,
    "records": 0.5,
    "pages": 8,
    "graphs": 0.5,
    "threads": 0.5,
    "files": 0.5,
    "ratio": 0.03,
}
"""Changes over the whole run that are granted: what the interpreter's tables take, and how well a ratio is known."""


class Net(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embed(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one moment of the run.

    Args:
        steps: that had been run by then.
        live_bytes: of the pool, between two steps.
        resident_bytes: of the process.
        records, pages, graphs: op records, pages of the session, and recorded steps, that are known of.
        threads, files: of the process.
        ratio: of a step's time to an ordinary step's, medians, at the fixed length.
        right: whether the gradients were those of an ordinary step.
    """

    steps: int
    live_bytes: int
    resident_bytes: int
    records: int
    pages: int
    graphs: int
    threads: int
    files: int
    ratio: float
    right: bool


class Soak:
    """A model in training, and the runtime that it trains in."""

    def __init__(self, seed: int, share: float) -> None:
        cpu_pool.install()
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.process = psutil.Process()
        self.steps = 0
        self._train(self.batch(max(LENGTHS)), None)  # makes the optimizer's state
        gc.collect()
        base_bytes = cpu_pool.allocated_bytes()
        cpu_pool.reset_peak()
        self._train(self.batch(max(LENGTHS)), None)
        range_bytes = cpu_pool.peak_bytes() - base_bytes
        budget_bytes = base_bytes + int(share * range_bytes)
        self.runtime = delta.Runtime(budget_bytes, device="cpu", min_bytes=0)

    def batch(self, length: int) -> Tensor:
        """Return random bytes."""
        return torch.randint(0, 256, (ROWS, length + 1))

    def _train(self, tokens: Tensor, runtime: delta.Runtime | None) -> None:
        if runtime is None:
            self.model(tokens).backward()
        else:
            with runtime.step():
                self.model(tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Train one step of a random length; evaluate, or write a checkpoint, when it is time."""
        self.steps += 1
        self._train(self.batch(self.random.choice(LENGTHS)), self.runtime)
        if self.steps % EVALUATE_EACH == 0:
            self.model.eval()
            with torch.no_grad():
                self.model(self.batch(FIXED))
            self.model.train()
        if self.steps % SAVE_EACH == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, io.BytesIO())

    def _gradients(self, tokens: Tensor, runtime: delta.Runtime | None) -> list[Tensor]:
        torch.manual_seed(self.steps)
        if runtime is None:
            self.model(tokens).backward()
        else:
            with runtime.step():
                self.model(tokens).backward()
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return found

    def _seconds(self, tokens: Tensor, runtime: delta.Runtime | None) -> float:
        begin_s = time.perf_counter()
        self._train(tokens, runtime)
        return time.perf_counter() - begin_s

    def measure(self) -> Point:
        """Measure; trains some steps more of the fixed length, on either side of the budget."""
        tokens = self.batch(FIXED)
        self._train(tokens, self.runtime)
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(TIMED):
            for managed in (True, False):
                times[managed].append(self._seconds(tokens, self.runtime if managed else None))
        wanted = self._gradients(tokens, None)
        told = self._gradients(tokens, self.runtime)
        right = len(told) == len(wanted) and all(map(torch.equal, told, wanted))
        del told, wanted, tokens
        gc.collect()
        return Point(
            steps=self.steps,
            live_bytes=cpu_pool.allocated_bytes(),
            resident_bytes=self.process.memory_info().rss,
            records=_C.live_records(),
            pages=self.runtime.session.levels().pages,
            graphs=self.runtime.steps.plans.known_graphs,
            threads=threading.active_count(),
            files=self.process.num_fds(),
            ratio=statistics.median(times[True]) / statistics.median(times[False]),
            right=right,
        )


@dataclass(frozen=True, slots=True)
class Slope:
    """How one figure moved over a run.

    Args:
        name: of the figure.
        first, last: the line through the points, at its two ends.
        error: standard error of the difference.
    """

    name: str
    first: float
    last: float
    error: float

    @property
    def is_flat(self) -> bool:
        """Whether it did not rise: by less than is granted, or than twice its error."""
        return self.last - self.first <= max(BOUNDS[self.name], 2 * self.error)


def slopes(points: Sequence[Point]) -> list[Slope]:
    """Fit a line by least squares to each figure, behind the first fifth of the run."""
    later = [p for p in points if p.steps >= WARM_UP_SHARE * points[-1].steps]
    x = np.array([p.steps for p in later], dtype=float)
    found = []
    for name in BOUNDS:
        y = np.array([getattr(p, name) for p in later], dtype=float)
        slope, base = np.polyfit(x, y, 1)
        apart = y - (slope * x + base)
        spread = np.sqrt((apart**2).sum() / max(1, len(x) - 2) / ((x - x.mean()) ** 2).sum())
        width = x[-1] - x[0]
        ends = (slope * x[0] + base, slope * x[-1] + base)
        found.append(Slope(name, float(ends[0]), float(ends[1]), float(spread * width)))
    return found


def soak(steps: int, hours: float, share: float, seed: int, out: Path | None) -> list[Point]:
    """Run it, and return the points."""
    run = Soak(seed, share)
    points: list[Point] = []
    ends_s = time.monotonic() + 3600 * hours
    each = max(1, steps // POINTS)
    with Progress(transient=True) as bar:
        task = bar.add_task("steps", total=steps if not hours else None)
        while run.steps < steps if not hours else time.monotonic() < ends_s:
            run.step()
            bar.advance(task)
            if run.steps % each == 0:
                points.append(run.measure())
                if out is not None:
                    with out.open("a") as file:
                        file.write(json.dumps(dataclasses.asdict(points[-1])) + "\n")
    run.runtime.close()
    if len(points) < _FEWEST_POINTS:
        raise SystemExit(
            f"{len(points)} points are too few to tell: give more --hours, or fewer --steps"
        )
    totals = run.runtime.report().totals
    if not totals.drops:
        raise SystemExit("nothing was dropped: the budget does not bind")
    return points


def show(points: Sequence[Point], console: Console) -> bool:
    """Print the table; return whether all is flat and right."""
    table = Table(
        *("figure", "a fifth of the run", "its end", "standard error", "granted", "flat"),
        title=f"{points[-1].steps:,} steps, {len(points)} points",
    )
    found = slopes(points)
    for each in found:
        numbers = [f"{number:,.4g}" for number in (each.first, each.last, each.error)]
        table.add_row(
            each.name, *numbers, f"{BOUNDS[each.name]:,.4g}", "yes" if each.is_flat else "NO"
        )
    console.print(table)
    wrong = sum(not p.right for p in points)
    console.print(f"points with other gradients than an ordinary step: {wrong}")
    return wrong == 0 and all(each.is_flat for each in found)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.steps < 10 or not 0 < options.share <= 1:
        parser.error("--steps: 10 or more; --share: above 0, at most 1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begin_s = time.perf_counter()
    points = soak(options.steps, options.hours, options.share, options.seed, options.out)
    console = Console(width=120)
    fine = show(points, console)
    console.print(f"{time.perf_counter() - begin_s:.0f} s")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

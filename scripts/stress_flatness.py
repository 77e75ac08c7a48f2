"""Does memory stay where it is over thousands of steps with ops that are hard to trust, and in loops without one?

A stress run, not a benchmark. Trains a deep and a shallow chain of layers for `--steps` steps each, entered once and
per step, with a custom op and an array of numpy in each layer, and runs `--iterations` iterations without gradients.
Live bytes of the pool must be constant, and the resident set within 1 % (or 1 MiB) of what it was after a fifth. Takes
about five minutes on one idle core; needs no GPU. Exits 1 where memory grew.

    python scripts/stress_flatness.py [--steps 5000] [--iterations 100000]

tests/faults/test_flat_memory.py runs a short version over more kinds of layers.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import cpu_pool

SIDE = 32
MOST_GROWTH = 0.01
"""Of the resident set."""
ROUNDING_BYTES = 1 << 10
"""That live bytes may differ: the pool counts what malloc gives, which is not always the same."""
GRANTED_BYTES = 1 << 20
"""That the resident set may grow by all the same: tables of the interpreter and of malloc."""


@torch.library.custom_op("delta_flatness::smooth", mutates_args=())
def smooth(x: Tensor) -> Tensor:
    return x.sigmoid() * x


smooth.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def chain(depth: int) -> tuple[nn.ModuleList, Callable[[int], Tensor]]:
    """Layers, and their forward: a custom op and an array in each."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(depth))

    def forward(step: int) -> Tensor:
        h = torch.from_numpy(np.full((SIDE, SIDE), 0.01 * (step % 7), dtype=np.float32))
        for layer in layers:
            h = smooth(layer(h)).tanh()
            h = h + torch.from_numpy(np.full((1, SIDE), 0.01, dtype=np.float32))
        return h.square().mean()

    return layers, forward


@dataclass(frozen=True, slots=True)
class Found:
    """Of one run, after a tenth of it and at its end: live bytes of the pool, and the resident set.

    Args:
        live_bytes: the most that was live between steps, in the second tenth and in the last.
        resident_bytes: of the process.
    """

    live_bytes: tuple[int, int]
    resident_bytes: tuple[int, int]

    @property
    def is_flat(self) -> bool:
        before, after = self.resident_bytes
        return (
            self.live_bytes[1] <= self.live_bytes[0] + ROUNDING_BYTES
            and after - before <= before * MOST_GROWTH + GRANTED_BYTES
        )


def observe(once: Callable[[int], None], times: int) -> Found:
    """Run it so many times, and compares the second tenth with the last."""
    process = psutil.Process()
    tenth = max(1, times // 10)
    live = [0, 0]
    resident = [0, 0]
    for k in range(times):
        once(k)
        part = 0 if tenth <= k < 2 * tenth else 1 if k >= times - tenth else None
        if part is not None:
            live[part] = max(live[part], cpu_pool.allocated_bytes())
        if k in (2 * tenth - 1, times - 1):
            gc.collect()
            resident[int(k == times - 1)] = process.memory_info().rss
    return Found((live[0], live[1]), (resident[0], resident[1]))


def training(depth: int, entered: bool, steps: int) -> Found:
    layers, forward = chain(depth)
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0, policy="auto")

    def once(k: int) -> None:
        with contextlib.nullcontext() if entered else runtime.step():
            forward(k).backward()
            layers.zero_grad()

    with runtime if entered else contextlib.nullcontext():
        found = observe(once, steps)
    runtime.close()
    return found


def without_gradients(depth: int, iterations: int) -> Found:
    """Return an evaluation, or a rollout: each iteration reads what the last one made."""
    layers, _ = chain(depth)
    state = torch.zeros(SIDE, SIDE)
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0)

    def once(k: int) -> None:
        nonlocal state
        with torch.no_grad():
            for layer in layers:
                state = (layer(state).tanh() + state) * 0.5

    with runtime:
        found = observe(once, iterations)
    runtime.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--iterations", type=int, default=100_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu_pool.install()
    table = Table("run", "times", "live KiB, early", "late", "resident MiB, early", "late", "flat")
    flat = True
    runs: list[tuple[str, int, Callable[[], Found]]] = [
        (
            f"training, depth {depth}, {'entered' if entered else 'per step'}",
            args.steps,
            lambda depth=depth, entered=entered: training(depth, entered, args.steps),
        )
        for depth in (2, 24)
        for entered in (True, False)
    ]
    runs += [
        (
            f"without gradients, depth {depth}",
            args.iterations,
            lambda depth=depth: without_gradients(depth, args.iterations),
        )
        for depth in (2, 8)
    ]
    for name, times, run in runs:
        found = run()
        flat &= found.is_flat
        table.add_row(
            name,
            f"{times:,}",
            *(f"{size / 1024:,.1f}" for size in found.live_bytes),
            *(f"{size / 2**20:,.1f}" for size in found.resident_bytes),
            "yes" if found.is_flat else "NO",
        )
    Console().print(table)
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())

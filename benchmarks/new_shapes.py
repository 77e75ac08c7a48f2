"""What do shapes cost that nobody has seen, in a program whose batches are of all lengths?

A benchmark, on the CPU pool, one thread. A transformer of 6 layers is trained for 100 steps, on sequences of lengths
drawn evenly from 64 to 512, inside a share of the peak that the longest needs; an ordinary step of the same length
comes before each. Reported are the seconds of all managed steps over those of all ordinary ones, by the clock of the
thread that trains, the share of recomputing in it, rescues, and steps that passed the budget. At most 1.08 of the
ordinary time and 5 rescues in 100 steps are asked for at 60 %. Takes about a minute; needs no GPU. Exits 1 if a
limit is missed.

    python -m benchmarks.new_shapes [--share 0.6] [--policy recompute] [--width 128] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from torch import Tensor, nn

import delta_runtime as delta
from benchmarks.common import SEED, console, machine, write_json
from delta_runtime import cpu_pool

LAYERS, HEADS, BATCH, WORDS = 6, 4, 4, 1000
SHORTEST, LONGEST, STEPS = 64, 512, 100
TIME_LIMIT, RESCUE_LIMIT = 1.08, 5


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.heads = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.heads(self.norms[0](x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """Embedding, blocks, and the loss of the next word."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        told = self.head(self.blocks(self.words(words)))
        return nn.functional.cross_entropy(told.view(-1, WORDS), words.view(-1))


def main(argv: list[str] | None = None) -> int:
    """Train, and print what it came to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.6, help="of the longest step's peak")
    parser.add_argument("--policy", default="recompute")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    cpu_pool.install()
    model = Model(arguments.width)

    def step(length: int, number: int, runtime: delta.Runtime | None = None) -> float:
        model.zero_grad(set_to_none=True)
        words = torch.randint(
            WORDS, (BATCH, length), generator=torch.Generator().manual_seed(number)
        )
        begin_s = time.thread_time()
        with runtime.step() if runtime else contextlib.nullcontext():
            model(words).backward()
        return time.thread_time() - begin_s

    step(LONGEST, 0)
    model.zero_grad(set_to_none=True)
    gc.collect()
    cpu_pool.reset_peak()
    step(LONGEST, 0)
    runtime = delta.Runtime(
        int(arguments.share * cpu_pool.peak_bytes()), device="cpu", policy=arguments.policy
    )
    lengths = random.Random(SEED)
    ordinary_s = managed_s = 0.0
    for number in range(STEPS):
        length = lengths.randint(SHORTEST, LONGEST)
        ordinary_s += step(length, number)
        managed_s += step(length, number, runtime)
    totals = runtime.report().totals
    runtime.close()
    figures = {
        "share": arguments.share,
        "policy": arguments.policy,
        "time_ratio": managed_s / ordinary_s,
        "recompute_share": totals.rebuild_s / ordinary_s,
        "rescues": totals.rescues,
        "over_budget_steps": totals.over_budget_steps,
    }
    for name, value in figures.items():
        console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    write_json(arguments.json, {"machine": machine(), **figures})
    return int(figures["time_ratio"] > TIME_LIMIT or totals.rescues > RESCUE_LIMIT)


if __name__ == "__main__":
    sys.exit(main())

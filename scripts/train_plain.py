"""An ordinary PyTorch training script: what scripts/demo.py runs with and without DELTA_BUDGET.

Question: none by itself. It knows nothing of delta_runtime; that is its point. It prints one line per step with the
loss, also as exact hexadecimal digits, so that two runs can be compared bit for bit. Takes seconds (`tiny`) to about
half a minute on two idle cores; needs no GPU.

    python scripts/train_plain.py --model gpt --steps 6
    DELTA_BUDGET=700MiB python scripts/train_plain.py --model gpt --steps 6
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import nn

from scripts.workloads import WORKLOADS, Batch, TrainState, allocate_adamw_state

THREADS = 2  # the order of sums, and with it the last bit of a loss, depends on their number


class TinyOutput:
    """What the tiny model returns."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


class TinyModel(nn.Module):
    """A few convolutions with batch norm and dropout: trains in milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for i in range(6):
            blocks += [nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16)]
            blocks += [nn.GELU(), nn.Dropout(0.1)]
        self.body = nn.Sequential(*blocks)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> TinyOutput:
        features = self.body(images).mean((2, 3))
        return TinyOutput(F.cross_entropy(self.head(features), labels))


def build_tiny(seed: int) -> TrainState:
    """Build the tiny model, its optimizer and its random images."""
    torch.manual_seed(seed)
    model = TinyModel().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    allocate_adamw_state(optimizer)

    def batch(index: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + index)
        return {
            "images": torch.randn(16, 3, 32, 32, generator=generator),
            "labels": torch.randint(0, 10, (16,), generator=generator),
        }

    return TrainState(model, optimizer, batch)


BUILDERS = {"tiny": build_tiny} | {name: workload.build for name, workload in WORKLOADS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(BUILDERS), default="gpt")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)

    state = BUILDERS[arguments.model](arguments.seed)
    for step in range(arguments.steps):
        batch = state.batch(step)
        state.optimizer.zero_grad()
        loss = state.model(**batch).loss
        loss.backward()
        state.optimizer.step()
        print(f"step {step + 1}  loss {loss.item():.6f}  {loss.item().hex()}", flush=True)


if __name__ == "__main__":
    main()

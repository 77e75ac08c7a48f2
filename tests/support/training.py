"""Trains a model of the zoo for a few steps, ordinary or managed, and records every bit that must not change."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from tests.support.bitwise import (
    Snapshot,
    buffers,
    freeze,
    gradients,
    parameters,
    prefixed,
    random_state,
)
from tests.support.device import device_under_test, moved
from tests.support.managed import Probe, live_bytes, managed, measured
from tests.support.processor import lstm_runs_in_bfloat16
from tests.zoo import ZooEntry

OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a model is trained.

    Args:
        steps: number of steps.
        optimizer: "sgd" (with momentum) or "adamw".
        autocast: forward under bfloat16 autocast, where the processor has the model's kernels in bfloat16.
        seed: of weights and dropout.
    """

    steps: int = 3
    optimizer: str = "adamw"
    autocast: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left behind.

    Args:
        snapshot: losses, gradients and random state of each step; parameters and buffers at the end.
        base_bytes: live bytes before the model was built.
        peak_bytes: highest live bytes of the whole run; 0 where no pool counts them.
        probe: what the runtime did.
    """

    snapshot: Snapshot
    base_bytes: int
    peak_bytes: int
    probe: Probe

    def budget_bytes(self, share: float) -> int:
        """The budget that leaves this run `share` of the peak, on top of what lived before it."""
        return self.base_bytes + int(share * (self.peak_bytes - self.base_bytes))


def train(
    entry: ZooEntry,
    recipe: Recipe,
    mode: str = "ordinary",
    *,
    managed_seed: int = 0,
    budget_bytes: int | None = None,
) -> Run:
    """Trains `entry` by `recipe` under a mode of `managed`."""
    device = device_under_test()
    gc.collect()
    base_bytes = live_bytes()
    snapshot: Snapshot = {}
    with measured() as peak:
        built = entry.build(recipe.seed)
        built.model.to(device)
        optimizer = OPTIMIZERS[recipe.optimizer](built.model.parameters())
        has_lstm = any(isinstance(module, torch.nn.LSTM) for module in built.model.modules())
        autocast = recipe.autocast and (not has_lstm or lstm_runs_in_bfloat16())
        torch.manual_seed(recipe.seed + 1)
        with managed(mode, seed=managed_seed, budget_bytes=budget_bytes) as probe:
            for step in range(recipe.steps):
                optimizer.zero_grad(set_to_none=True)
                with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                    loss = built.loss(moved(built.batch(step)))
                loss.backward()
                snapshot |= prefixed(f"step {step}", {"loss": freeze(loss)})
                snapshot |= prefixed(f"step {step}", gradients(built.model))
                del loss
                optimizer.step()
                snapshot |= prefixed(f"step {step}", random_state())
        snapshot |= prefixed("at the end", parameters(built.model))
        snapshot |= prefixed("at the end", buffers(built.model))
    return Run(snapshot, base_bytes, peak.peak_bytes, probe)

"""Steps that run the same ops on the same shapes and are not the same step: each follows a plan of its own.

Covers programs whose turns begin alike and save other tensors. Does not cover how a plan is made
(tests/planners/test_joint_heuristic.py), nor shapes that change (tests/test_runtime.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.plan_cache import PlanCache
from tests.support.fixtures import one_thread  # noqa: F401

WIDTH = 128
ROWS = 1024
TURNS = 6


def mlp(blocks: int) -> nn.Sequential:
    """Many small values and a few large ones: whoever drops the small ones runs many ops again."""
    small = [part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    large = [
        part
        for _ in range(blocks)
        for part in (nn.Linear(WIDTH, 6 * WIDTH), nn.Tanh(), nn.Linear(6 * WIDTH, WIDTH))
    ]
    return nn.Sequential(*small, *large)


class Program:
    """A generator and a discriminator, and one half of the program's turns: both are trained."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator, self.discriminator = mlp(3), mlp(2)
        parameters = [*self.generator.parameters(), *self.discriminator.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.01)
        self.noise = torch.randn(ROWS, WIDTH)

    def turn(self, forward: Callable[[], torch.Tensor]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        forward().backward()
        self.optimizer.step()

    def trains_both(self) -> torch.Tensor:
        return self.discriminator(self.generator(self.noise)).square().mean()

    def without_gradient(self) -> torch.Tensor:
        with torch.no_grad():
            made = self.generator(self.noise)
        return self.discriminator(made).square().mean()

    def frozen(self) -> torch.Tensor:
        self.generator.requires_grad_(False)
        loss = self.trains_both()
        self.generator.requires_grad_(True)
        return loss

    def checkpointed(self) -> torch.Tensor:
        made = self.noise
        for part in self.generator:
            made = checkpoint(part, made, use_reentrant=False)
        return self.discriminator(made).square().mean()


def rebuilt_bytes(measured: str, between: str | None, budget: int | None) -> tuple[int, int]:
    """The peak of a program that takes two kinds of turns, and the bytes that the last of one made again."""
    program = Program()
    runtime = delta.Runtime(budget or "1GiB", policy="recompute" if budget else "off")
    with runtime:
        for _ in range(TURNS):
            if between is not None:
                program.turn(getattr(program, between))
            before = runtime.session.counters().rebuilt_bytes
            program.turn(getattr(program, measured))
            made = runtime.session.counters().rebuilt_bytes - before
    peak_bytes = runtime.report().totals.peak_bytes
    runtime.close()
    return peak_bytes, made


@pytest.fixture
def seconds_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ops take seconds by the bytes that they read and make: which plan is best does not depend on the clock."""
    learn = PlanCache.learn

    def learn_by_bytes(self: PlanCache, graph: StepGraph, *args: Any) -> StepGraph:
        seconds = 1e-6 + 1e-10 * (graph.op_managed_input_bytes + graph.op_watermark_bytes)
        unknown = np.full(graph.n_ops, np.nan)
        return learn(self, replace(graph, op_seconds=seconds, op_replay_seconds=unknown), *args)

    monkeypatch.setattr(PlanCache, "learn", learn_by_bytes)


@pytest.mark.parametrize(
    ("measured", "between"),
    [
        ("trains_both", "without_gradient"),
        ("trains_both", "frozen"),
        ("checkpointed", "trains_both"),
    ],
)
def test_a_turn_that_saves_other_tensors_costs_the_next_one_nothing(
    measured, between, seconds_by_bytes
):
    cpu_pool.install()
    gc.collect()
    base_bytes = cpu_pool.allocated_bytes()
    ordinary_bytes, _ = rebuilt_bytes(measured, None, None)
    budget = base_bytes + (ordinary_bytes - base_bytes) * 6 // 10
    _, alone = rebuilt_bytes(measured, None, budget)
    peak_bytes, made = rebuilt_bytes(measured, between, budget)
    assert 0 < made <= 1.1 * alone
    assert peak_bytes <= budget

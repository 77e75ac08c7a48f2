"""Steps of known ops on shapes that nobody has seen go by the plan for the nearest ones, with ordinary bits.

Does not cover: how much time that saves; benchmarks/new_shapes.py measures it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from tests.support.fixtures import one_thread  # noqa: F401

WIDTH, LAYERS, MOST_ROWS = 64, 12, 768
KNOWN = (256, 512, 768)
NEW = (640, 300, 700, 513, 256 + 1)


class Net(nn.Module):
    """Cheap ops and dear ones: what leaves first matters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.wide = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.nn.functional.gelu(layer(x)).tanh()
        return self.wide(x).logsumexp(1).mean()


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()

    def step(self, rows: int, runtime: delta.Runtime | None = None) -> list[bytes]:
        """Loss and gradients, bit for bit, outside of the pool."""
        self.net.zero_grad(set_to_none=False)
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        with runtime.step() if runtime else contextlib.nullcontext():
            loss = self.net(x)
            loss.backward()
        return [loss.detach().numpy().tobytes()] + [
            p.grad.numpy().tobytes() for p in self.net.parameters()
        ]


@pytest.fixture
def ordinary() -> Training:
    cpu_pool.install()
    return Training()


@pytest.fixture
def runtime(ordinary: Training) -> Iterator[delta.Runtime]:
    """With room for 60 % of what the largest step needs, and plans for the known shapes."""
    ordinary.step(MOST_ROWS)
    gc.collect()
    base_bytes = cpu_pool.allocated_bytes()
    cpu_pool.reset_peak()
    ordinary.step(MOST_ROWS)
    budget_bytes = base_bytes + int(0.6 * (cpu_pool.peak_bytes() - base_bytes))
    runtime = delta.Runtime(budget_bytes, device="cpu", policy="recompute", min_bytes=0)
    for _ in range(5):
        for rows in KNOWN:
            ordinary.step(rows, runtime)
            runtime.wait_for_plan()
    yield runtime
    runtime.close()


def test_what_leaves_is_that_of_the_nearest_plan(
    ordinary: Training, runtime: delta.Runtime
) -> None:
    for rows in NEW:
        wanted = ordinary.step(rows)
        cpu_pool.reset_peak()
        found = ordinary.step(rows, runtime)
        last = runtime.report().last
        assert found == wanted, rows
        assert cpu_pool.peak_bytes() <= runtime.budget_bytes
        assert last.plan_hits > 0, rows
        assert last.plan_misses == 1, "told once that no plan is for these shapes"
        assert last.rescues == 0, "each op's need was reckoned from other shapes"
        assert (last.drops > 0) == (rows > 500), rows


def test_other_ops_have_no_plan(ordinary: Training, runtime: delta.Runtime) -> None:
    forward = ordinary.net.forward
    ordinary.net.forward = lambda x: forward(x.sin() * ordinary.net.layers[0].bias)
    wanted = ordinary.step(MOST_ROWS)
    assert ordinary.step(MOST_ROWS, runtime) == wanted
    assert runtime.report().last.plan_misses > 1


def test_a_known_shape_still_goes_by_its_own_plan(
    ordinary: Training, runtime: delta.Runtime
) -> None:
    ordinary.step(NEW[0], runtime)
    for rows in KNOWN:
        ordinary.step(rows, runtime)
        assert runtime.report().last.plan_misses == 0, rows

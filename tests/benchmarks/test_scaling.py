"""The benchmark of growth with size: that it measures what it says, and that its fit tells exponents apart."""

from __future__ import annotations

import pytest
import torch

import delta_runtime as delta
from benchmarks.scaling import Chain, Row, exponent, measure, steepest
from delta_runtime import cpu_pool
from tests.support.fixtures import one_thread  # noqa: F401


@pytest.mark.parametrize("power", [0.5, 1.0, 1.5, 2.0])
def test_the_fit_finds_the_exponent(power: float) -> None:
    sizes = [100, 1000, 10_000]
    assert exponent(sizes, [3e-6 * size**power for size in sizes]) == pytest.approx(power)


def test_the_steepest_part_is_not_hidden_by_the_rest() -> None:
    rows = [
        Row(size, 1.0, 1.0 + 1e-6 * size, 2.0, planning_s, 0.6)
        for size, planning_s in ((100, 0.1), (1000, 0.2), (10_000, 20.0))
    ]
    assert steepest(rows) == pytest.approx((1.0, 2.0))


def test_a_chain_saves_what_it_is_asked_for_and_is_planned_for() -> None:
    cpu_pool.install()
    row = measure(200, rounds=1)
    assert row.saved == pytest.approx(200, rel=0.05)
    assert row.planning_s > 0 and row.first_s > 0
    assert row.share <= 0.6


def test_a_chain_is_the_same_with_a_runtime() -> None:
    chain = Chain(50)
    chain.step(None)
    wanted = chain.start.grad
    assert wanted is not None
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0)
    chain.step(runtime)
    assert runtime.report().last.packs >= 50
    runtime.close()
    assert torch.equal(chain.start.grad, wanted)

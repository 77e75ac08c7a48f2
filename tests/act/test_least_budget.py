"""Training at the least memory that swapping needs: all that may leave is swapped, and is back only while it is used.

A hard capacity shows that no byte more is taken. Few plans that also drop, if any, fit there: a value that is made
again needs room for what it is made from. Does not cover where that budget comes from (planners/test_bounds).
"""

from __future__ import annotations

import contextlib
import gc

import pytest

import delta_runtime as delta
from benchmarks.common import SLACK_BYTES
from delta_runtime import cpu_pool
from delta_runtime.planners.bounds import bounds_of
from scripts.workloads import SIZED, TrainState
from tests.support.bitwise import Snapshot, assert_same_bits, freeze, gradients, prefixed
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = [pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]

STEPS = 4


def train(state: TrainState, runtime: delta.Runtime | None = None, steps: int = STEPS) -> Snapshot:
    found: Snapshot = {}
    for index in range(steps):
        state.optimizer.zero_grad(set_to_none=True)
        with runtime.step() if runtime else contextlib.nullcontext():
            loss = state.loss(state.batch(index))
            loss.backward()
        found |= prefixed(f"step {index}", {"loss": freeze(loss)} | gradients(state.model))
        del loss
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        if runtime is not None:
            runtime.wait_for_plan()
    return found


@pytest.mark.parametrize(
    ("name", "batch_size", "size"),
    [
        ("unet", 4, 64),
        pytest.param("resnet50", 8, 128, marks=pytest.mark.slow),
        pytest.param("resnet101", 8, 128, marks=pytest.mark.slow),
        ("gpt", 2, 128),
    ],
)
def test_trains_at_the_least_that_swapping_needs(name: str, batch_size: int, size: int) -> None:
    cpu_pool.install()
    workload = SIZED[name]
    workload.build(0, batch_size, size).batch(0)  # data are read once and stay
    gc.collect()
    others_bytes = cpu_pool.allocated_bytes()
    wanted = train(workload.build(0, batch_size, size))

    with contextlib.closing(delta.Runtime("8GB", device="cpu", policy="recompute")) as runtime:
        train(workload.build(0, batch_size, size), runtime, steps=3)  # with the optimizer's state
        graph = runtime.graph()
    gc.collect()
    assert cpu_pool.allocated_bytes() - others_bytes < 4096
    least_bytes = bounds_of(graph, drops=False).least_bytes
    persistent_bytes = graph.persistent_bytes
    assert least_bytes - persistent_bytes < 0.7 * (graph.peak_bytes - persistent_bytes)

    budget_bytes = least_bytes + SLACK_BYTES
    state = workload.build(0, batch_size, size)
    runtime = delta.Runtime(budget_bytes, device="cpu", policy="auto", link_bytes_per_s="pcie5")
    with contextlib.closing(runtime), cpu_pool.capacity(budget_bytes):
        assert_same_bits(train(state, runtime), wanted)

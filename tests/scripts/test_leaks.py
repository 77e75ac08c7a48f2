"""Nothing is left behind: 300 small steps in which much goes wrong, and that the check for it can fail.

The scenarios and what is compared are scripts/stress_leaks.py's, which runs 2,000 of them.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import delta_runtime as delta
from delta_runtime import _C, cpu_pool
from scripts.stress_leaks import (
    SCENARIOS,
    Footprint,
    World,
    churn,
    footprint,
    plain,
    run_step,
)
from tests.support.fixtures import one_thread  # noqa: F401

SEED = 20


@pytest.fixture
def world():
    world = World(SEED)
    yield world
    world.end()


@pytest.mark.timeout(300)
def test_many_steps_end_where_they_began():
    print(f"seed {SEED}")
    outcome = churn(300, SEED)
    assert outcome.faults == []
    assert outcome.raised > 20
    assert outcome.drops > 1000
    assert outcome.rebuilds > 1000
    assert outcome.swaps > 300
    assert len(outcome.ran) == len(SCENARIOS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_each_scenario_by_itself(scenario, recwarn):
    """So that a leak has a name. `recwarn`: budgets that are passed are no concern of this test."""
    world = World(SEED)
    try:
        found = []
        for turn in range(5):
            world.runtime = delta.Runtime(
                cpu_pool.allocated_bytes() + world.range_bytes // 2,
                device="cpu",
                policy="stress_drop_all" if turn % 2 else "recompute",
            )
            run_step(world, scenario)
            world.end()
            if turn in (1, 4):
                found.append(footprint())
        assert found[1].growth(found[0]) == []
    finally:
        world.end()


@pytest.mark.timeout(60)
def test_a_long_run_of_one_runtime_keeps_nothing_per_step(world):
    """Weights that change, batches that come and go, statistics that count: none may pile up in the session."""
    budget = cpu_pool.allocated_bytes() + world.range_bytes // 2
    world.runtime = delta.Runtime(budget, device="cpu", policy="recompute")
    sizes = []
    for _ in range(12):
        with world.runtime.step():
            plain(world)
        sizes.append((cpu_pool.allocated_bytes(), _C.live_records()))
        levels = world.runtime.session.levels()
        assert (levels.live_tickets, levels.managed_pages) == (0, 0)
    assert world.runtime.report().totals.rebuilds > 0
    assert sizes[-1] == sizes[3]


@pytest.mark.timeout(60)
def test_a_batch_is_not_held_after_its_step(world):
    """What recipes needed goes with them: the user's `del batch` frees it."""
    world.runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    for _ in range(2):
        x = world.x()
        with world.runtime.step():
            world.model(x).backward()
        world.optimizer.zero_grad(set_to_none=True)
        before = cpu_pool.allocated_bytes()
        size = x.untyped_storage().nbytes()
        del x
        gc.collect()
        assert before - cpu_pool.allocated_bytes() >= size
    assert world.runtime.report().totals.rebuilds > 0


@pytest.mark.timeout(60)
def test_a_model_is_not_held_after_it_is_gone():
    base_bytes = None
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    for _ in range(3):
        world = World(SEED)
        with runtime.step():
            world.model(world.x()).backward()
        del world
        with runtime.step():  # a session learns at its next step of what is gone
            torch.ones(2048, requires_grad=True).exp().sum().backward()
        gc.collect()
        if base_bytes is not None:
            assert cpu_pool.allocated_bytes() == base_bytes
        base_bytes = cpu_pool.allocated_bytes()
    runtime.close()


# ----------------------------------------------------------------------- the checks can fail


def test_a_footprint_sees_what_is_held(world):
    world.runtime = delta.Runtime("100%", device="cpu")
    with world.runtime.step():
        plain(world)
    before = footprint()
    with world.runtime.step():
        held = world.model(world.x())
    other = delta.Runtime("100%", device="cpu")
    file = open("/dev/null")  # noqa: SIM115
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        told = " ".join(footprint().growth(before))
    finally:
        stop.set()
        thread.join()
        file.close()
    for name in ("live_bytes", "records", "runtimes", "threads", "tasks", "files"):
        assert name in told
    del held, other


def test_churn_tells_of_a_leak():
    def leak(world: World) -> None:
        with world.entered.step():
            hoard.append(world.model(world.x()))

    hoard: list[torch.Tensor] = []
    SCENARIOS[leak] = ()
    try:
        outcome = churn(6, SEED, check_every=3, scenarios=[leak])
    finally:
        del SCENARIOS[leak]
    told = " ".join(outcome.faults)
    assert "live_bytes" in told
    assert "records" in told


def test_a_footprint_does_not_change_by_itself():
    assert isinstance(footprint(), Footprint)
    assert footprint().growth(footprint()) == []

"""What every policy must keep, whatever it decides: the bits, the budget, and the ways out that it names."""

from __future__ import annotations

import gc

import pytest
import torch

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.core.events import Place
from delta_runtime.online.policies import POLICIES, Stress
from tests.support.bitwise import assert_same_bits
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.swapping import LAYER_BYTES, budget, lanes, ordinary_run, train, walled

pytestmark = pytest.mark.timeout(120)

every_policy = pytest.mark.parametrize("name", POLICIES)
EVICTING = [name for name, policy in POLICIES.items() if policy.evicts_to]
every_evicting_policy = pytest.mark.parametrize("name", EVICTING)
SHARE = 0.7


@pytest.fixture(scope="module")
def ordinary():
    return ordinary_run()


def runtime_with(name: str, budget_bytes: int | str, **more: object) -> delta.Runtime:
    return delta.Runtime(budget_bytes, device="cpu", policy=name, host_budget="1GiB", **more)


@every_evicting_policy
def test_same_bits_inside_the_wall(ordinary, name):
    budget_bytes = budget(ordinary, SHARE)
    runtime = runtime_with(name, budget_bytes)
    with walled(budget_bytes + 5 * LAYER_BYTES):  # the snapshots that this test keeps
        assert_same_bits(train(runtime), ordinary[0], name)
    totals = runtime.report().totals
    assert totals.drops + totals.swap_outs > 0
    runtime.close()


@every_policy
def test_pages_leave_by_the_ways_that_it_names_and_no_other(ordinary, name):
    runtime = runtime_with(name, budget(ordinary, SHARE) if name in EVICTING else "100%")
    assert_same_bits(train(runtime), ordinary[0], name)
    totals, policy = runtime.report().totals, POLICIES[name]
    assert totals.drops == 0 or Place.DROPPED in policy.evicts_to
    assert totals.swap_outs == 0 or Place.SWAPPED in policy.evicts_to
    runtime.close()


@every_policy
def test_without_need_nothing_leaves_but_under_stress(ordinary, name):
    runtime = runtime_with(name, "100%")
    train(runtime, steps=2)
    totals = runtime.report().totals
    stressed = POLICIES[name].stress is not Stress.NONE
    assert (totals.drops + totals.swap_outs > 0) == stressed
    runtime.close()


@every_policy
def test_nothing_is_left_when_it_is_closed(ordinary, name):
    gc.collect()
    before, before_bytes = lanes(), cpu_pool.allocated_bytes()
    runtime = runtime_with(name, budget(ordinary, SHARE) if name in EVICTING else "100%")
    train(runtime, steps=2)
    runtime.close()
    del runtime
    gc.collect()
    assert lanes() == before
    assert cpu_pool.allocated_bytes() <= before_bytes + 64 * 1024


@every_policy
def test_an_exception_in_the_middle_of_a_step_leaves_the_next_one_right(ordinary, name):
    runtime = runtime_with(name, budget(ordinary, SHARE) if name in EVICTING else "100%")

    def broken_step() -> None:
        with runtime.step():
            x = torch.ones(256, 1024, requires_grad=True)
            x.sin().exp().sum().item()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken_step()
    assert_same_bits(train(runtime), ordinary[0], name)
    runtime.close()

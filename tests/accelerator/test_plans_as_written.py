"""Plans that are carried out as written on an accelerator: backward runs on a thread of the engine, copies on streams.

Does not cover: when what leaves and comes back; tests/act/test_plans_as_written.py does, on the CPU.
"""

from __future__ import annotations

import pytest
import torch

import delta_runtime as delta
from delta_runtime.act.plans import follow
from delta_runtime.core.transfer import Links
from tests.accelerator.test_lanes import MODELS
from tests.support.device import seed
from tests.support.managed import poisoned_host_memory
from tests.support.plans import any_plan

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("verify", ["first", "always"])
@pytest.mark.parametrize("policy", ["recompute", "auto"])
def test_random_plans_change_no_bit(name, verify, policy, device):
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build().to(device), torch.randn(shape).to(device)

    def gradients() -> list[torch.Tensor]:
        seed(1)
        model.zero_grad(set_to_none=True)
        model(x).backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    expected = gradients()
    runtime = delta.Runtime(
        1 << 34,
        device=str(device),
        policy=policy,
        verify=verify,
        min_bytes=0,
        host_budget="256MiB" if policy == "auto" else None,
    )
    links = Links(1e9, 1e9) if policy == "auto" else None
    actions = swaps = 0
    with runtime, poisoned_host_memory():
        for _ in range(5):
            with runtime.step():
                gradients()
        graph = runtime.graph()
        for number in range(6):
            follow(runtime.session, [(graph, any_plan(graph, number, links)[0])])
            with runtime.step():
                found = gradients()
            last = runtime.report().last
            assert last.plan_misses == 0, number
            actions, swaps = actions + last.plan_actions, swaps + last.swap_ins
            assert all(map(torch.equal, found, expected)), number
    assert actions > 0
    assert (swaps > 0) == (policy == "auto")
    runtime.close()

"""The simulator does what the runtime does: the same values leave at the same ops, by the same way.

To nine tenths of their bytes: once in many runs on a busy machine the runtime dropped one value more, under a tight
budget. Why is not known; in all others every value was dropped alike.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import delta_runtime as delta
from benchmarks.common import BENCH_WORKLOADS, SEED, measure, train_step
from benchmarks.planned import settle
from benchmarks.simulated import listening
from delta_runtime import cpu_pool
from delta_runtime.core.events import EventKind
from delta_runtime.core.transfer import Links
from delta_runtime.online.policies import get_policy
from delta_runtime.simulate.virtual_step import VirtualStep

DROP, FREE = 4, 5  # LogKind in csrc/simulate/virtual_step.h
LINK_BYTES_PER_S = 2e9


@pytest.fixture(autouse=True)
def pool() -> None:
    """Have the CPU pool count, as the runtime does when it is made."""
    cpu_pool.install()


def followed(state, policy, share, link_bytes_per_s=None):
    """Train until the plan is final; return what left in the next step, and in the simulated one."""
    budget_bytes = measure(state).budget_bytes(share)
    runtime = delta.Runtime(
        budget=budget_bytes, policy=policy, device="cpu", link_bytes_per_s=link_bytes_per_s
    )
    settle(state, runtime)
    plan, graph = runtime.plan(), runtime.graph()
    runtime.steps.pump.drain()
    with listening() as heard:
        train_step(state, state.batch(0), runtime)
        runtime.steps.pump.drain()
    began = runtime.session.step_begin_tick()
    runtime.close()
    links = None if link_bytes_per_s is None else Links(link_bytes_per_s, link_bytes_per_s)
    step = VirtualStep(graph, plan, budget_bytes, links=links).run()
    return np.concatenate(heard), began, step


def share_dropped_alike(events, began, step):
    """Return the share of the bytes that were dropped of the same value at the same op."""
    dropped = events[events["kind"] == int(EventKind.DROPPED)]
    thought = step.log[step.log["kind"] == DROP]
    assert len(thought) > 0
    columns = (dropped["tick"] - began, dropped["key"], dropped["bytes"])
    real = Counter(zip(*(each.tolist() for each in columns), strict=True))
    columns = (thought["tick"], thought["number"], thought["bytes"])
    virtual = Counter(zip(*(each.tolist() for each in columns), strict=True))
    both, either = (
        sum(count * size for (_, _, size), count in each.items())
        for each in (real & virtual, real | virtual)
    )
    return both / either


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
@pytest.mark.parametrize("model", ["tiny_gpt", "tiny_resnet"])
def test_the_same_values_are_dropped_at_the_same_ops(model, share):
    events, began, step = followed(BENCH_WORKLOADS[model].build(SEED), "recompute", share)
    assert share_dropped_alike(events, began, step) >= 0.9


@pytest.mark.parametrize("model", ["tiny_gpt", "tiny_resnet"])
def test_the_same_values_are_swapped(model):
    """At which op depends on when copies are done, which no two runs have in common."""
    state = BENCH_WORKLOADS[model].build(SEED)
    events, _, step = followed(state, "swap", 0.6, LINK_BYTES_PER_S)
    swapped = set(events["key"][events["kind"] == int(EventKind.SWAPPED_OUT)].tolist())
    thought = set(step.log["number"][step.log["kind"] == FREE].tolist())
    assert len(thought) > 0
    assert len(swapped & thought) >= 0.9 * max(len(swapped), len(thought))


@pytest.mark.parametrize("share", [0.8, 0.6])
@pytest.mark.parametrize("policy", ["largest", "lru", "next_use"])
def test_without_a_plan_the_same_values_are_dropped_at_the_same_ops(policy, share):
    """By policies that look at no clock; the others decide by measured seconds, which no two runs have in common."""
    state = BENCH_WORKLOADS["tiny_gpt"].build(SEED)
    budget_bytes = measure(state).budget_bytes(share)
    recorder = delta.Runtime(policy="off", device="cpu")
    train_step(state, state.batch(0), recorder)
    graph = recorder.graph()
    recorder.close()
    runtime = delta.Runtime(budget=budget_bytes, policy=policy, device="cpu")
    steps = 5
    for index in range(steps):
        runtime.steps.pump.drain()
        with listening() as heard:
            train_step(state, state.batch(index), runtime)
            runtime.steps.pump.drain()
        began = runtime.session.step_begin_tick()
    runtime.close()
    virtual = VirtualStep(graph, None, budget_bytes, policy=get_policy(policy))
    for _ in range(steps):
        step = virtual.run()
    events = np.concatenate(heard)
    assert share_dropped_alike(events, began, step) >= 0.9

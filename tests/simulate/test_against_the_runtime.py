"""The simulator does what the runtime does: the same values leave at the same ops, by the same way.

A step in which an allocation itself had to ask for room is left out: the simulator does not know the allocations within
an op. With a little more of a budget there is none.
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
_MOST_ATTEMPTS = 5


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
    with listening(runtime) as heard:
        train_step(state, state.batch(0), runtime)
        runtime.steps.pump.drain()
    began = runtime.session.step_begin_tick()
    runtime.close()
    links = None if link_bytes_per_s is None else Links(link_bytes_per_s, link_bytes_per_s)
    step = VirtualStep(graph, plan, budget_bytes, links=links).run()
    return np.concatenate(heard), began, step


def drops(events, began, step):
    """Return what was dropped, and what was thought to be: ticks of the step and values, in order."""
    dropped = events[events["kind"] == int(EventKind.DROPPED)]
    thought = step.log[step.log["kind"] == DROP]
    assert len(thought) > 0
    return (
        list(zip((dropped["tick"] - began).tolist(), dropped["key"].tolist(), strict=True)),
        list(zip(thought["tick"].tolist(), thought["number"].tolist(), strict=True)),
    )


def first_of_each(drops):
    """Return the first drop of each value, in order."""
    first = {}
    for tick, value in drops:
        first.setdefault(value, (tick, value))
    return list(first.values())


def without_rescue(attempt):
    """Return what the first of a few attempts gives in which no allocation asked for room.

    Args:
        attempt: trains and simulates; its argument counts from 0, and each has another budget.
    """
    for number in range(_MOST_ATTEMPTS):
        events, began, step = attempt(number)
        if not (events["kind"] == int(EventKind.RESCUE)).any():
            return events, began, step
    raise AssertionError("each time an allocation asked for room")


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
@pytest.mark.parametrize("model", ["tiny_gpt", "tiny_resnet"])
def test_the_same_values_are_dropped_at_the_same_ops(model, share):
    state = BENCH_WORKLOADS[model].build(SEED)
    found = without_rescue(lambda number: followed(state, "recompute", share + 0.01 * number))
    dropped, thought = drops(*found)
    assert first_of_each(dropped) == first_of_each(thought)
    # Where ops write in place a rerun asks for room for copies that it may not need: what it has just made can
    # go once more for that. The simulator does not know of writes.
    assert not Counter(thought) - Counter(dropped)


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
    for index in range(steps - 1):  # nobody listens: what came and went is left out of the account
        train_step(state, state.batch(index), runtime)
    with listening(runtime) as heard:
        train_step(state, state.batch(steps - 1), runtime)
        runtime.steps.pump.drain()
    began = runtime.session.step_begin_tick()
    runtime.close()
    virtual = VirtualStep(graph, None, budget_bytes, policy=get_policy(policy))
    for _ in range(steps):
        step = virtual.run()
    dropped, thought = drops(np.concatenate(heard), began, step)
    assert dropped == thought

"""Plans by measurement, in a runtime: which steps are measured, when a step is recorded once more, what is no step.

Covers a small network on the CPU pool. Does not cover: which of several plans stays (test_plan_cache.py).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime.known_step import CALIBRATION_STEPS
from delta_runtime.plan_cache import STEPS_TO_SETTLE
from delta_runtime.plan_trials import TRIAL_STEPS
from delta_runtime.report.step_report import StepTotals
from tests.support.bitwise import Snapshot
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.plans import record_again
from tests.support.swapping import Net, batch, budget, ordinary_run

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def ordinary() -> tuple[Snapshot, int]:
    return ordinary_run()


def step(runtime: delta.Runtime, model: Net, *, backward: bool = True) -> StepTotals:
    """One step, or its first half alone, without an optimizer; what the runtime counted in it."""
    with runtime.step():
        loss = model(batch(0))
        if backward:
            loss.backward()
    model.zero_grad(set_to_none=True)
    return runtime.report().last


@pytest.mark.parametrize(
    "link", [1e9, 1e5], ids=["a plan that swaps", "a plan that only recomputes"]
)
def test_only_whole_steps_that_followed_the_plan_are_measured(ordinary, monkeypatch, link):
    """A forward alone has rebuilt nothing and waited for nothing: no plan is good because of that."""
    runtime = delta.Runtime(
        budget(ordinary, 0.6), device="cpu", policy="auto", link_bytes_per_s=link
    )
    measured = []
    monkeypatch.setattr(
        runtime.steps.plans, "judge", lambda _, *seconds: measured.append(seconds) or False
    )
    torch.manual_seed(0)
    model = Net()
    for _ in range(CALIBRATION_STEPS):
        step(runtime, model)
    assert not measured
    for _ in range(3):
        step(runtime, model, backward=False)
    assert not measured
    step(runtime, model)
    assert len(measured) == 1
    last = runtime.report().last
    assert measured[0] == (last.rebuild_s, last.out_stall_s + last.in_stall_s)
    assert last.swap_ins > 0 if link == 1e9 else last.rebuilds > 0
    runtime.close()


def test_a_plan_that_waits_is_made_again(ordinary, monkeypatch):
    """A plan that reckons with time for the lanes that they do not have waits in each step."""
    runtime = delta.Runtime(
        budget(ordinary, 0.6), device="cpu", policy="auto", link_bytes_per_s=1e8
    )
    learn, runs = runtime.steps.plans.learn, []

    def learn_of_fast_lanes(graph, budget_bytes, links):
        runs.append(links)
        if len(runs) <= CALIBRATION_STEPS:
            links = dataclasses.replace(links, out_bytes_per_s=1e11, in_bytes_per_s=1e11)
        return learn(graph, budget_bytes, links)

    monkeypatch.setattr(runtime.steps.plans, "learn", learn_of_fast_lanes)
    torch.manual_seed(0)
    model = Net()

    def cost_s() -> float:
        last = step(runtime, model)
        return last.rebuild_s + last.out_stall_s + last.in_stall_s

    costs = [cost_s() for _ in range(CALIBRATION_STEPS + TRIAL_STEPS)]
    while not runtime.settled:
        costs.append(cost_s())
        assert len(costs) < 2 * STEPS_TO_SETTLE
    assert len(runs) == CALIBRATION_STEPS + 1, costs
    waited_s = min(costs[CALIBRATION_STEPS : CALIBRATION_STEPS + TRIAL_STEPS])
    assert min(cost_s() for _ in range(3)) < 0.5 * waited_s, costs
    runtime.close()


def fail(_: torch.Tensor) -> None:
    raise ValueError("in backward")


@pytest.mark.parametrize("first", [0, 1, CALIBRATION_STEPS + 1], ids="{} forwards first".format)
def test_a_forward_alone_is_no_step_of_its_own(ordinary, monkeypatch, first):
    """Neither first, nor where a record was asked for; nor is a step that fails in backward."""
    runtime = delta.Runtime(
        budget(ordinary, 0.6), device="cpu", policy="auto", link_bytes_per_s=1e9
    )
    torch.manual_seed(0)
    model = Net()
    for _ in range(first):
        step(runtime, model, backward=False)
    for _ in range(CALIBRATION_STEPS + 1):
        step(runtime, model)
    known = runtime.steps.plans
    assert len(known.plans()) == 1
    assert len(runtime.graph().uses) > 0
    record_again(known)
    for _ in range(2):
        step(runtime, model, backward=False)
        assert known.wants_log(missed=False)
    handle = model.layers[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        step(runtime, model)
    handle.remove()
    model.zero_grad(set_to_none=True)
    assert known.wants_log(missed=False)
    step(runtime, model)
    assert not known.wants_log(missed=False)
    assert len(known.plans()) == 1
    measured = []
    monkeypatch.setattr(known, "judge", lambda *seconds: measured.append(seconds) or False)
    step(runtime, model)
    assert len(measured) == 1
    runtime.close()


def test_backward_outside_of_the_step_is_not_looked_for_in_it_for_ever(ordinary):
    runtime = delta.Runtime(
        budget(ordinary, 0.6), device="cpu", policy="auto", link_bytes_per_s=1e9
    )
    torch.manual_seed(0)
    model = Net()
    for _ in range(4 * CALIBRATION_STEPS):
        with runtime.step():
            loss = model(batch(0))
        loss.backward()
        model.zero_grad(set_to_none=True)
    assert not runtime.steps.plans.wants_log(missed=False, went_on=True)
    runtime.close()


def gan_steps() -> list[Callable[[delta.Runtime], StepTotals]]:
    """A step of each of two networks that train in turns, as those of a GAN do."""
    models = [Net(), Net()]
    models[1].layers[0] = nn.Sequential(models[1].layers[0], nn.ReLU())  # another graph
    return [functools.partial(step, model=model) for model in models]


def accumulation_steps() -> list[Callable[[delta.Runtime], StepTotals]]:
    """Steps that add to gradients; before the first of them there are none, and its ops are others."""
    model = Net()

    def part(runtime: delta.Runtime, *, last: bool) -> StepTotals:
        with runtime.step():
            model(batch(0)).backward()
        if last:
            model.zero_grad(set_to_none=True)
        return runtime.report().last

    return [functools.partial(part, last=last) for last in (False, False, True)]


@pytest.mark.parametrize("program", [gan_steps, accumulation_steps], ids=["gan", "accumulation"])
def test_each_graph_of_several_is_judged_by_its_own_steps(ordinary, monkeypatch, program):
    """Plans that reckon with faster lanes than there are wait at first; others come in their place."""
    runtime = delta.Runtime(
        budget(ordinary, 0.6), device="cpu", policy="auto", link_bytes_per_s=1e8
    )
    torch.manual_seed(0)
    steps = program()
    learn, runs = runtime.steps.plans.learn, collections.Counter()

    def learn_of_fast_lanes(graph, budget_bytes, links):
        key = (graph.fingerprint, graph.op_name)
        runs[key] += 1
        if runs[key] <= CALIBRATION_STEPS:
            links = dataclasses.replace(links, out_bytes_per_s=1e11, in_bytes_per_s=1e11)
        return learn(graph, budget_bytes, links)

    monkeypatch.setattr(runtime.steps.plans, "learn", learn_of_fast_lanes)
    judge, judged, graph_now = runtime.steps.plans.judge, [], [0]

    def note_judged(plan, *seconds):
        judged.append((plan, graph_now[0]))
        return judge(plan, *seconds)

    monkeypatch.setattr(runtime.steps.plans, "judge", note_judged)
    costs: list[list[float]] = []
    for _ in range(STEPS_TO_SETTLE + 4):
        each = []
        for number, take in enumerate(steps):
            graph_now[0] = min(number, 1)  # the second step and the third are of one graph
            each.append(take(runtime))
        assert runtime.wait_for_plan()
        costs.append([last.rebuild_s + last.out_stall_s + last.in_stall_s for last in each])
    assert len(runs) == 2, "graphs"
    graphs_of = collections.defaultdict(set)
    for plan, graph in judged:
        graphs_of[id(plan)].add(graph)
    assert all(len(graphs) == 1 for graphs in graphs_of.values())
    runtime.close()
    for of_step in zip(*costs, strict=True):
        assert min(of_step[-4:]) < 0.2 * max(of_step), of_step

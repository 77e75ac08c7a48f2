"""Which steps are left alone, by their costs; and that nothing is managed, lost or left behind in those.

Does not cover: how long observing takes; scripts/check_least_budgets.py measures that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime.known_step import StepCost
from delta_runtime.standing_aside import StandingAside

TINY_OPS = StepCost(
    fingerprint=7, ops=5000, begin_bytes=0, peak_bytes=0, seconds=0.16, rebuild_s=0.0, whole=True
)
"""Of an op's 32 us the observer's are about 10."""
BIG_OPS = replace(TINY_OPS, ops=500)


def course(aside: StandingAside, cost: StepCost, alone_s: float, steps: int) -> list[bool]:
    """Which steps are left alone, of so many that are all alike."""
    left = []
    for _ in range(steps):
        left.append(aside.leaves_next)
        if aside.leaves_next:
            aside.was_alone(alone_s)
        else:
            aside.saw(cost, settled=True)
    return left


def test_what_is_dear_to_observe_is_left_alone_and_looked_at_again() -> None:
    left = course(StandingAside(), TINY_OPS, alone_s=0.08, steps=2 + 2 + 16 + 1 + 16 + 1)
    assert left == [False] * 2 + [True] * 18 + [False] + [True] * 16 + [False]


def test_a_trial_shows_that_it_is_bearable() -> None:
    aside = StandingAside()
    assert (
        course(aside, TINY_OPS, alone_s=0.12, steps=20) == [False] * 2 + [True] * 2 + [False] * 16
    )
    other = replace(TINY_OPS, fingerprint=8)
    assert course(aside, other, alone_s=0.08, steps=5) == [False] * 2 + [True] * 3


@pytest.mark.parametrize(
    ("cost", "settled"),
    [(BIG_OPS, True), (TINY_OPS, False), (replace(TINY_OPS, whole=False), True)],
)
def test_others_are_never_left_alone(cost: StepCost, settled: bool) -> None:
    aside = StandingAside()
    for _ in range(10):
        aside.saw(cost, settled=settled)
        assert not aside.leaves_next


def test_what_entering_and_leaving_take_counts() -> None:
    """Of a step of a few milliseconds it is much, and no clock inside of the step shows it."""
    short = replace(TINY_OPS, ops=100, seconds=0.0042)
    times = dict.fromkeys((0.0, 0.001), 0)
    for around_s in times:
        cost = replace(short, around_s=around_s)
        times[around_s] = sum(course(StandingAside(), cost, alone_s=0.003, steps=40))
    assert times[0.0] <= 2 and times[0.001] > 30, times


def test_steps_of_changing_shapes_are_not_left_alone() -> None:
    aside = StandingAside()
    for i in range(20):
        aside.saw(replace(TINY_OPS, fingerprint=i % 2), settled=True)
        assert not aside.leaves_next


def test_another_step_in_between_ends_it() -> None:
    """What is looked at again is no step like those before."""
    aside = StandingAside()
    course(aside, TINY_OPS, alone_s=0.08, steps=20)
    assert not aside.leaves_next
    aside.saw(replace(TINY_OPS, ops=TINY_OPS.ops + 1), settled=True)
    assert not aside.leaves_next


# ---------------------------------------------------------------- in the runtime


@pytest.fixture
def runtime() -> Iterator[delta.Runtime]:
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all", min_bytes=0)
    yield runtime
    runtime.close()


def leave_alone(runtime: delta.Runtime, steps: int) -> None:
    """As if the costs of the steps before had said so; then all are observed again."""
    runtime.steps.aside = StandingAside()
    runtime.steps.aside._observed.append(replace(TINY_OPS, seconds=0.0))
    runtime.steps.aside._left = steps


def train(runtime: delta.Runtime | None, alone: frozenset[int] = frozenset()) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    results = []
    for step in range(8):
        x = torch.randn(64, 32)
        if runtime is None:
            loss = model(x).square().mean()
            loss.backward()
        else:
            if step in alone:
                leave_alone(runtime, 1)
            drops = runtime.session.counters().drops
            with runtime.step():
                loss = model(x).square().mean()
                loss.backward()
            assert (runtime.session.counters().drops == drops) == (step in alone), step
        optimizer.step()
        optimizer.zero_grad()
        results += [loss.detach(), *(p.detach().clone() for p in model.parameters())]
    return results


def test_the_bits_are_the_same_and_the_report_says_it(runtime: delta.Runtime) -> None:
    ours, ordinary = train(runtime, frozenset({2, 3, 6})), train(None)
    assert all(torch.equal(a, b) for a, b in zip(ours, ordinary, strict=True))
    totals = runtime.report().totals
    assert totals.steps == 8 and totals.alone_steps == 3
    assert totals.peak_bytes > 0


def test_with_something_dropped_no_step_is_left_alone(runtime: delta.Runtime) -> None:
    """A graph goes on into the next step, which writes to what its values are made again from."""
    w = torch.linspace(-1, 1, 4096).requires_grad_()
    x = torch.linspace(0, 1, 4096)
    right = (x * 2.0).sin().cos()
    with runtime.step():
        loss = ((x * 2.0).sin().cos() * w).sum()
        torch.ones(4).add(1)
    leave_alone(runtime, 1)
    with runtime.step():
        x.mul_(3.0)
        loss.backward()
    assert w.grad is not None and torch.equal(w.grad, right)
    assert runtime.report().totals.alone_steps == 0 and runtime.steps.aside.leaves_next
    with runtime.step():
        (w * 2.0).sum().backward()
    assert runtime.report().totals.alone_steps == 1


def test_errors_and_nesting_leave_nothing_behind(runtime: delta.Runtime) -> None:
    def failing() -> None:
        with runtime.step():
            assert not runtime.hooks.are_attached
            raise ZeroDivisionError

    leave_alone(runtime, 2)
    with pytest.raises(ZeroDivisionError):
        failing()
    assert runtime.steps.aside.leaves_next, "a step that raised says nothing of the time"
    other = delta.Runtime("100%", device="cpu")
    with runtime.step():
        with pytest.raises(delta.UsageError, match="inside"):
            runtime.step().__enter__()
        with pytest.raises(delta.UsageError, match="another runtime"):
            other.__enter__()
        with delta.disable():
            torch.ones(2).sum()
    with other:
        torch.ones(2).sum()
    other.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    leave_alone(runtime, 0)
    train(runtime)


def test_it_can_be_closed_within(runtime: delta.Runtime) -> None:
    leave_alone(runtime, 1)
    with runtime.step():
        runtime.close()
    with delta.Runtime("100%", device="cpu") as other:
        torch.ones(2).sum()
    other.close()

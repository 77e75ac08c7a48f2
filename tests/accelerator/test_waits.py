"""What an accelerator waits for lanes, and what it recomputes, is seen by its own clock; plans are changed by that.

Does not cover: how trials choose among plans (tests/test_plan_trials.py).
"""

from __future__ import annotations

import gc
import statistics

import pytest
import torch
from torch import nn

import delta_runtime as delta
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

LAYERS, WIDTH, ROWS = 12, 256, 2048
FAST = 2e9
"""Bytes per second of the lanes: what leaves has the time for it."""


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Training:
    """A chain in training, with room for half of what it saves."""

    def __init__(self, device: torch.device, policy: str) -> None:
        torch.manual_seed(0)
        self.model = Chain().to(device)
        self.x = torch.randn(ROWS, WIDTH, device=device)
        self.runtime: delta.Runtime | None = None
        self.step()
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        base_bytes = torch.accelerator.memory_allocated()
        self.step()
        range_bytes = torch.accelerator.max_memory_allocated() - base_bytes
        self.runtime = delta.Runtime(
            base_bytes + range_bytes // 2,
            device=str(device),
            policy=policy,
            min_bytes=0,
            host_budget="256MiB",
        )

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        if self.runtime is None:
            self.model(self.x).backward()
        else:
            with self.runtime.step():
                self.model(self.x).backward()
        torch.accelerator.synchronize()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            self.runtime.wait_for_plan()

    @property
    def waited_s(self) -> float:
        totals = self.runtime.report().totals
        return totals.out_stall_s + totals.in_stall_s


@pytest.fixture
def fake(controls):
    if not controls.simulated:
        pytest.skip("what a stream waited in truth, the simulated device alone can tell")
    return controls.fake


def test_the_seconds_of_each_step_are_told_once(device, controls, fake):
    controls.slow_copies(FAST / 40)
    training = Training(device, "swap")
    training.train(8)
    session = training.runtime.session
    told: dict[int, float] = {}
    truth: dict[int, float] = {}
    training.runtime.steps._session = _Listening(session, told)
    before_s = training.waited_s
    for _ in range(6):
        truth_before_s = fake.blocked_s(0)
        training.step()
        truth[session.step()] = fake.blocked_s(0) - truth_before_s
    both = sorted(told.keys() & truth.keys())
    assert len(both) >= 4
    assert all(truth[step] > 0.01 for step in both)
    for step in both:
        assert told[step] == pytest.approx(truth[step], rel=0.05)
    assert training.waited_s - before_s == pytest.approx(sum(told.values()), rel=0.05)
    training.runtime.close()


class _Listening:
    """A session that tells what it was asked for."""

    def __init__(self, session, told: dict[int, float]) -> None:
        self._of = session
        self._told = told

    def __getattr__(self, name: str):
        return getattr(self._of, name)

    def take_device_seconds(self):
        steps = self._of.take_device_seconds()
        for step, _, out_wait_s, in_wait_s in steps:
            assert step not in self._told
            self._told[step] = out_wait_s + in_wait_s
        return steps


def test_reruns_are_timed_by_the_device(device, controls):
    """The host is done with launching an op long before the device is with running it."""
    training = Training(device, "recompute")
    training.train(8)
    before_s, rebuilds = training.runtime.report().totals.rebuild_s, 0
    for _ in range(5):
        controls.delay(0.02)
        training.step()
        rebuilds += training.runtime.report().last.rebuilds
    assert rebuilds > 0
    assert training.runtime.report().totals.rebuild_s > before_s
    training.runtime.close()


def test_a_link_that_becomes_slower_is_noticed_and_the_plan_changed(device, controls, fake):
    """In one of three runs: other work on the machine may hide it, or seem one itself."""
    assert any(is_noticed(device, controls, fake) for _ in range(3))


def is_noticed(device, controls, fake) -> bool:
    """Whether it was within 10 steps, and the device waits for less under the plan that came of it."""
    controls.slow_copies(FAST)
    training = Training(device, "auto")
    training.train(50)
    before = training.runtime.plan()
    swaps = training.runtime.report().last.swap_outs
    controls.slow_copies(FAST / 20)
    noticed, waits_s = 0, []
    for number in range(1, 40):
        truth_s = fake.blocked_s(0)
        training.train(1)
        waits_s.append(fake.blocked_s(0) - truth_s)
        if not noticed and not training.runtime.settled:
            noticed = number
        if noticed and training.runtime.settled and training.runtime.plan() is not before:
            break
    changed = training.runtime.plan() is not before
    after_s = []
    for _ in range(5):
        truth_s = fake.blocked_s(0)
        training.step()
        after_s.append(fake.blocked_s(0) - truth_s)
    training.runtime.close()
    if not 0 < noticed <= 10:
        return False
    less = statistics.median(after_s) < 0.7 * statistics.median(waits_s[:noticed])
    return swaps > 0 and changed and less

"""Idle steps on an accelerator: nothing is observed in them, and a step that is another keeps to the budget.

Does not cover: which steps are idle, and everything that goes on around them (tests/test_idle_steps.py).
"""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

import delta_runtime as delta
from delta_runtime.idle_steps import QUIET_STEPS
from delta_runtime.known_step import CALIBRATION_STEPS
from delta_runtime.torch_hooks import any_hooks
from tests.support.fixtures import one_thread  # noqa: F401
from tests.test_idle_steps import WIDTH, Net

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

ROWS = 512
SETTLED = CALIBRATION_STEPS + QUIET_STEPS + 8
"""Steps, at most, before the first idle one: in the first eight, ops that run out of memory are looked for."""


class Training:
    """The net in training, with room for 1.4 times what a step of ROWS rows needs; or without a runtime."""

    def __init__(self, device: torch.device, *, managed: bool) -> None:
        torch.manual_seed(0)
        self.device = device
        self.net = Net().to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.runtime: delta.Runtime | None = None
        self.step()
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        base_bytes = torch.accelerator.memory_allocated()
        self.step()
        range_bytes = torch.accelerator.max_memory_allocated() - base_bytes
        self.budget_bytes = base_bytes + int(1.4 * range_bytes)
        if managed:
            self.runtime = delta.Runtime(
                self.budget_bytes, device=str(device), policy="recompute", min_bytes=0
            )

    def step(self, rows: int = ROWS) -> list[bytes]:
        """Loss and gradients, bit for bit."""
        torch.manual_seed(rows)
        x = torch.randn(rows, WIDTH).to(self.device)
        with self.runtime.step() if self.runtime else contextlib.nullcontext():
            loss = self.net(x)
            loss.backward()
        found = [loss.detach(), *(p.grad for p in self.net.parameters())]
        told = [each.cpu().numpy().tobytes() for each in found]
        del loss, found
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return told

    @property
    def idle_steps(self) -> int:
        return self.runtime.report().totals.idle_steps


def ordinary(device: torch.device, steps: list[tuple[int, int]]) -> list[list[bytes]]:
    """What a net in training comes to without a runtime.

    Args:
        steps: of each, how many rows it has, and how often the last layers are run.
    """
    training = Training(device, managed=False)
    return trained(training, steps)


def trained(training: Training, steps: list[tuple[int, int]]) -> list[list[bytes]]:
    found = []
    for rows, training.net.again in steps:
        found.append(training.step(rows))
    return found


@pytest.fixture
def make(device):
    """Makes the training, behind whatever ran without a runtime."""
    made: list[Training] = []

    def make() -> Training:
        gc.collect()
        torch.accelerator.synchronize()
        made.append(Training(device, managed=True))
        return made[-1]

    yield make
    for training in made:
        training.runtime.close()
    assert not any_hooks()


USUAL = (ROWS, 1)


def test_idle_steps_are_not_observed_and_change_no_bit(device, make):
    wanted = ordinary(device, [USUAL] * (SETTLED + 10))
    training = make()
    found = trained(training, [USUAL] * SETTLED)
    idle_steps, ops = training.idle_steps, training.runtime.session.counters().ops
    found += trained(training, [USUAL] * 10)
    assert found == wanted
    assert training.idle_steps == idle_steps + 10
    assert training.runtime.session.counters().ops == ops


def test_a_step_that_is_larger_from_its_first_op_stays_inside_the_budget(device, make):
    larger = [(2 * ROWS, 1), USUAL, (2 * ROWS, 1)]
    wanted = ordinary(device, [USUAL] * (SETTLED + 1) + larger)
    training = make()
    found = trained(training, [USUAL] * (SETTLED + 1))
    assert training.idle_steps > 0
    torch.accelerator.reset_peak_memory_stats()
    drops = training.runtime.session.counters().drops
    found += trained(training, larger)
    assert found == wanted
    assert training.runtime.session.counters().drops > drops
    assert torch.accelerator.max_memory_allocated() <= training.budget_bytes


@pytest.mark.filterwarnings("ignore:.*the budget of .* was passed:RuntimeWarning")
def test_a_step_that_grows_later_wakes_up(device, make):
    grown = [(ROWS, 5)] * 2
    wanted = ordinary(device, [USUAL] * (SETTLED + 1) + grown)
    training = make()
    found = trained(training, [USUAL] * (SETTLED + 1))
    packs, idle_steps = training.runtime.session.packs(), training.idle_steps
    found += trained(training, grown)
    assert found == wanted
    assert training.idle_steps == idle_steps and training.runtime.session.packs() > packs

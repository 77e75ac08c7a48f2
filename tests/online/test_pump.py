"""The pump between session and ledger: what it leaves out of the account, nobody who ranks can see."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import delta_runtime as delta
from delta_runtime import pump
from delta_runtime.core.events import EVENT_DTYPE, EventKind, Events
from delta_runtime.record.step_log import drain_events
from tests.support.nets import net

MIB = 1024**2
STEPS = 6
ROOMY_BYTES = 1024 * MIB


@dataclass
class Trained:
    """A net that trains by a policy; one step makes a second graph that stays, which later steps use.

    Args:
        policy: of the runtime.
        listens: whether all events are heard, so that none may be left out.
        stays_from: the step that makes the second graph.
    """

    policy: str
    listens: bool = False
    stays_from: int = 2
    budget_bytes: int = ROOMY_BYTES
    heard: list[Events] = field(default_factory=list)
    stays: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.model, self.x = net(128, 8), torch.randn(2048, 128)
        self.runtime = delta.Runtime(self.budget_bytes, policy=self.policy, device="cpu")
        self.pump = self.runtime.steps.pump
        if self.listens:
            self.pump.listener = self.heard.append
        for index in range(STEPS):
            with self.runtime.step():
                self.model(self.x).sum().backward()
                if index == self.stays_from:
                    self.stays = self.model(self.x[:512])
                elif self.stays is not None:
                    self.stays.sum().backward(retain_graph=True)

    @property
    def ledger(self) -> object:
        return self.pump._ledger

    def waiting(self) -> Events:
        """Return the events that wait for the next drain; they are taken out by that."""
        return np.frombuffer(self.runtime.session.drain_events(), EVENT_DTYPE)


def needed_bytes(policy: str) -> int:
    """Return the peak where there is room."""
    trained = Trained(policy)
    trained.runtime.close()
    return trained.runtime.report().totals.peak_bytes


@pytest.mark.parametrize("policy", ["largest", "lru"])  # which look at no clock
def test_with_what_came_and_went_left_out_the_ranking_is_that_of_all_events(policy):
    budget_bytes = needed_bytes(policy) - 5 * MIB
    both = [Trained(policy, each, budget_bytes=budget_bytes) for each in (True, False)]
    ranked = []
    for each in both:
        assert each.runtime.report().totals.drops > STEPS
        each.pump.drain()
        each.ledger.check()
        ranked.append(each.ledger.rank(int(each.runtime.session.tick())))
    assert len(ranked[0].pages) > 4
    for name in ("pages", "weights", "exits"):
        assert np.array_equal(getattr(ranked[0], name), getattr(ranked[1], name))
    packed = [each.ledger._counts[EventKind.PACKED] for each in both]
    assert packed[1] < packed[0]
    for each in both:
        each.stays = None  # its pages were told of before, and go now
        each.pump.drain()
        each.ledger.check()
        assert each.ledger.resident_bytes == each.ledger.dropped_bytes == 0
        each.runtime.close()


def test_only_what_is_still_there_waits_for_the_next_drain():
    trained = Trained("largest", stays_from=STEPS - 1)
    waiting = trained.waiting()
    packed = waiting["page"][waiting["kind"] == EventKind.PACKED]
    assert len(packed) > 4 and set(waiting["page"].tolist()) == set(packed.tolist())
    assert not (waiting["kind"] == EventKind.RELEASED).any()
    trained.stays = None
    gone = trained.waiting()
    assert set(gone["page"].tolist()) == set(packed.tolist())
    trained.runtime.close()


@pytest.mark.parametrize("policy", ["next_use", "dtr"])
def test_a_ledger_that_needs_all_events_gets_them(policy):
    trained = Trained(policy)
    assert trained.ledger.needs_all
    assert len(trained.waiting()) == 0
    trained.runtime.close()


def test_all_requests_that_were_not_met_are_told(monkeypatch):
    told = []

    def drained(session: object) -> Events:
        told.append(drain_events(session))
        return told[-1]

    monkeypatch.setattr(pump, "drain_events", drained)
    with pytest.warns(RuntimeWarning, match="was passed"):
        trained = Trained("largest", budget_bytes=needed_bytes("largest") - 19 * MIB)
    unmet = np.concatenate(told)
    unmet = unmet[unmet["kind"] == EventKind.SHORTFALL]
    assert len(unmet) == trained.runtime.session.counters().shortfalls > 0
    shortfall = trained.runtime.steps.shortfall
    assert shortfall is not None and shortfall.missing_bytes == unmet["bytes"].max()
    trained.runtime.close()


def test_many_events_do_not_wait():
    runtime = delta.Runtime("100%", policy="largest", device="cpu", min_bytes=0)
    x = torch.ones(4, requires_grad=True)
    with runtime.step():
        y = x
        for _ in range(5000):
            y = y.exp()
    assert len(runtime.session.drain_events()) == 0
    assert runtime.steps.pump._ledger.resident_bytes > 0
    runtime.close()

"""The pump between session and ledger: what it leaves out of the account, nobody who ranks can see."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import delta_runtime as delta
from delta_runtime.core.events import EVENT_DTYPE, EventKind, Events
from tests.support.nets import net

STEPS = 6


def trained(
    policy: str, *, stays_from: int = 2, heard: list[Events] | None = None
) -> tuple[delta.Runtime, object]:
    """Train for some steps, one of which has a second graph that stays; return that graph's output, too."""
    torch.manual_seed(0)
    model, x = net(32, 4), torch.randn(64, 32)
    runtime = delta.Runtime("100%", policy=policy, device="cpu", min_bytes=0)
    if heard is not None:
        runtime.steps.pump.listener = lambda events: heard.append(events.copy())
    stays = None
    for index in range(STEPS):
        with runtime.step():
            model(x).sum().backward()
            stays = model(x) if index == stays_from else stays
    return runtime, stays


def left(runtime: delta.Runtime) -> Events:
    """Return the events that wait, which are taken out by that."""
    return np.frombuffer(runtime.session.drain_events(), EVENT_DTYPE)


def test_what_came_and_went_is_left_out_and_the_ranking_is_that_of_all_events():
    heard: list[Events] = []
    (all_in, stays), (some_in, stays_too) = trained("largest", heard=heard), trained("largest")
    ranked = []
    for runtime in (all_in, some_in):
        ledger = runtime.steps.pump._ledger
        runtime.steps.pump.drain()
        ledger.check()
        ranked.append(ledger.rank(int(runtime.session.tick())))
        assert ledger.resident_bytes > 0
    assert len(ranked[0].pages) > 0
    for name in ("pages", "weights", "exits"):
        assert np.array_equal(getattr(ranked[0], name), getattr(ranked[1], name))
    of_all = np.concatenate(heard)
    assert (of_all["kind"] == EventKind.RELEASED).sum() > 4 * STEPS
    del stays, stays_too  # its pages were told of before, and go now
    for runtime in (all_in, some_in):
        runtime.steps.pump.drain()
        runtime.steps.pump._ledger.check()
        assert runtime.steps.pump._ledger.resident_bytes == 0
        runtime.close()


def test_only_what_is_still_there_waits_for_the_next_drain():
    runtime, stays = trained("largest", stays_from=STEPS - 1)
    waiting = left(runtime)
    pages = np.unique(waiting["page"])
    packed = waiting["page"][waiting["kind"] == EventKind.PACKED]
    assert len(packed) > 0 and set(pages.tolist()) == set(packed.tolist())
    assert not (waiting["kind"] == EventKind.RELEASED).any()
    del stays
    gone = left(runtime)
    assert set(gone["page"].tolist()) == set(packed.tolist())
    runtime.close()


@pytest.mark.parametrize("policy", ["next_use", "dtr"])
def test_a_ledger_that_learns_from_the_past_gets_all_of_it(policy):
    runtime, stays = trained(policy)
    assert runtime.steps.pump._ledger.learns and stays is not None
    assert len(left(runtime)) == 0
    runtime.close()


def test_a_request_that_was_not_met_is_told_with_what_was_there_then():
    torch.manual_seed(0)
    model, x = net(256, 2), torch.randn(2**13, 256)
    runtime = delta.Runtime("10MiB", policy="largest", device="cpu")
    with pytest.warns(RuntimeWarning, match="was passed"), runtime.step():
        model(x).sum().backward()
    shortfall = runtime.steps.shortfall
    assert shortfall is not None and shortfall.missing_bytes > 0
    assert len(left(runtime)) == 0
    runtime.close()


def test_many_events_do_not_wait():
    runtime = delta.Runtime("100%", policy="largest", device="cpu", min_bytes=0)
    x = torch.ones(4, requires_grad=True)
    with runtime.step():
        y = x
        for _ in range(5000):
            y = y.exp()
    assert len(left(runtime)) == 0
    assert runtime.steps.pump._ledger.resident_bytes > 0
    runtime.close()

"""A step under a policy by name: a plan that waits where none fits without."""

from __future__ import annotations

import pytest

from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.transfer import Links
from delta_runtime.simulate.under_policy import (
    simulated_policies,
    under_policy,
    within_under_policy,
)
from tests.support.fixtures import short_search  # noqa: F401
from tests.support.step_graphs import chain

MIB = 1024**2
GRAPH = chain([8 * MIB] * 12, [0.01] * 12)
BUDGET = GRAPH.peak_bytes - GRAPH.activation_bytes * 7 // 10


def test_where_copies_come_too_late_the_step_waits() -> None:
    """No plan of swaps alone fits lanes as slow as these without waiting."""
    slow = Links(4e8, 4e8)
    found = under_policy("swap", GRAPH, BUDGET, slow)
    assert found.step is not None
    assert found.step.peak_bytes <= BUDGET
    assert found.step.stall_s > 0
    assert found.step.dropped_bytes == 0


def test_auto_is_never_worse_than_swaps_or_reruns_alone() -> None:
    for speed in (2e8, 1e9, 5e9, 5e10):
        links = Links(speed, speed)
        seconds = {}
        for name in ("auto", "recompute", "swap"):
            step = under_policy(name, GRAPH, BUDGET, links).step
            assert step is not None
            seconds[name] = step.seconds
        assert seconds["auto"] <= 1.002 * min(seconds.values()), speed


def test_without_lanes_nothing_is_swapped() -> None:
    found = under_policy("auto", GRAPH, BUDGET, None)
    assert found.step is not None
    assert found.step.swapped_out_bytes == 0 < found.step.dropped_bytes
    assert under_policy("swap", GRAPH, BUDGET, None).step is None


@pytest.mark.parametrize("name", simulated_policies())
def test_below_the_least_budget_it_is_said_or_shows(name: str) -> None:
    found = under_policy(name, GRAPH, 4 * MIB, Links(1e9, 1e9))
    if found.step is None:
        assert "no plan" in found.why_not
    else:
        assert found.step.peak_bytes > 4 * MIB


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("speed", [2e7, 1e9, 1e12])
@pytest.mark.parametrize("name", simulated_policies())
def test_what_fits_is_known_without_the_fastest_plan(name: str, speed: float) -> None:
    graph = chain([8 * MIB] * 5, [0.01, 0.2, 0.01, 0.05, 0.01])
    links, recipes = Links(speed, speed), recipes_of(graph)
    most = graph.peak_bytes
    fitted = []
    for budget in (*range(4 * MIB, most, 5 * MIB), most):
        found = under_policy(name, graph, budget, links).step
        step = within_under_policy(name, graph, budget, links, recipes=recipes)
        assert (step is not None) == (found is not None and found.peak_bytes <= budget)
        assert step is None or step.peak_bytes <= budget
        fitted.append(step is not None)
    assert not fitted[0] and fitted[-1]

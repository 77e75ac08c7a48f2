"""The bound on seconds: no plan that fits is below it, and on steps that are simple enough it is reached."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.bounds import bounds_of
from delta_runtime.planners.least_seconds import least_seconds
from delta_runtime.planners.presence import Presence
from delta_runtime.planners.validate import validate
from tests.planners.random_plans import (
    blocks,
    dropping,
    dropping_and_copying,
    graphs,
    masks,
    random_presence,
    speeds,
    with_backward_workspaces,
    with_other_asks,
)
from tests.support.recorded_steps import WORKLOADS, recorded
from tests.support.step_graphs import MIB, TINY, chain

pytest.importorskip("scipy")


@settings(max_examples=200, deadline=None)
@given(graphs(), masks, masks)
def test_no_plan_that_drops_is_below_it(graph, dropped, dropped_twice):
    verdict = validate(dropping(graph, dropped, dropped_twice).plan, graph)
    bound = least_seconds(graph, verdict.peak_bytes)
    assert bound is not None
    assert bound <= verdict.rebuild_s + 1e-6


@settings(max_examples=200, deadline=None)
@given(st.one_of(graphs(), blocks()), st.integers(0, 2**32 - 1))
def test_no_plan_that_drops_several_times_is_below_it(graph, seed):
    rng = np.random.default_rng(seed)
    graph = with_other_asks(with_backward_workspaces(graph, rng), rng)
    presence = Presence(graph)
    for _ in range(3):
        verdict = validate(presence.plan(random_presence(presence, rng)), graph)
        bound = least_seconds(graph, verdict.peak_bytes)
        assert bound is not None
        assert bound <= verdict.rebuild_s + 1e-6


@settings(max_examples=150, deadline=None)
@given(graphs(), masks, masks, speeds)
def test_no_plan_that_copies_is_below_it(graph, dropped, swapped, speed):
    links = Links(speed, speed)
    verdict = validate(dropping_and_copying(graph, dropped, swapped, links).plan, graph, links)
    bound = least_seconds(graph, verdict.peak_bytes, links=links)
    assert bound is not None
    assert bound <= verdict.rebuild_s + verdict.stall_s + 1e-6


@pytest.mark.parametrize("graph", TINY.values(), ids=TINY)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_it_is_at_most_the_best_of_all_choices(graph, share):
    lower = bounds_of(graph).lower_bytes
    budget = int(lower + share * (graph.peak_bytes - lower))
    n = len(graph.saved)
    seconds = []
    for dropped in itertools.product([False, True], repeat=n):
        verdict = validate(dropping(graph, list(dropped), [False] * n).plan, graph)
        if verdict.peak_bytes <= budget:
            seconds.append(verdict.rebuild_s)
    bound = least_seconds(graph, budget)
    if seconds:
        assert bound is not None
        assert bound <= min(seconds) + 1e-9
    if share == 1.0:
        assert bound == 0


def test_it_is_reached_where_single_values_are_dropped():
    """Every other value of a chain may be rebuilt from its neighbour: the bound is what that takes."""
    graph = chain([8 * MIB] * 8, [0.01, 0.02, 0.01, 0.02, 0.01, 0.02, 0.01, 0.02])
    budget = graph.peak_bytes - 16 * MIB
    plan = joint_heuristic.plan(graph, budget, effort=10)
    verdict = validate(plan, graph)
    assert verdict.peak_bytes <= budget
    assert least_seconds(graph, budget) == pytest.approx(verdict.rebuild_s)


def test_it_is_the_time_of_a_lane_where_all_must_cross_it():
    graph = chain([8 * MIB] * 8, [1e-6] * 8)
    lower = bounds_of(graph, drops=False).lower_bytes
    slow = Links(8 * MIB, 8 * MIB)  # a second for each value
    bound = least_seconds(graph, lower, drops=False, links=slow)
    plan = joint_heuristic.plan(graph, lower, drops=False, links=slow)
    assert bound is not None
    assert 3 < bound <= validate(plan, graph, slow).stall_s


@pytest.mark.parametrize("name", WORKLOADS)
def test_of_real_steps_it_is_below_the_plan_and_falls_with_the_budget(name):
    graph = recorded(name)
    low, high = bounds_of(graph).least_bytes, graph.peak_bytes
    budgets = [int(low + share * (high - low)) for share in (0.3, 0.6, 0.9)]
    found = [least_seconds(graph, budget) for budget in budgets]
    assert found == sorted(found, reverse=True)
    assert found[0] > 0
    plan = joint_heuristic.plan(graph, budgets[0], effort=1.0, most_work=1_000_000)
    assert found[0] <= plan.predicted_seconds


def test_none_where_nothing_fits():
    graph = TINY["chain"]
    assert least_seconds(graph, bounds_of(graph).lower_bytes // 4) is None
    assert least_seconds(graph, bounds_of(graph).lower_bytes, drops=False) is None

"""The bound that knows what is rebuilt from what: no plan that drops is below it, and it is no lower than the other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Interval, Plan
from delta_runtime.planners import joint_heuristic, window_bound
from delta_runtime.planners.bounds import bounds_of
from delta_runtime.planners.contraction import by_size
from delta_runtime.planners.least_seconds import least_seconds
from delta_runtime.planners.linear_program import LinearProgram, SolverFailed
from delta_runtime.planners.presence import Presence
from delta_runtime.planners.step_program import StepProgram
from delta_runtime.planners.validate import validate
from tests.planners.random_plans import (
    blocks,
    dropping,
    graphs,
    masks,
    random_presence,
    with_backward_workspaces,
    with_other_asks,
)
from tests.support.recorded_steps import recorded
from tests.support.step_graphs import MIB, TINY, chain

pytest.importorskip("scipy")


@pytest.fixture(params=[2, 3, 5, 1000])
def windows(request, monkeypatch):
    """At the most so many: a thousand are as many as there are ops behind which anything is asked for."""
    monkeypatch.setattr(window_bound, "_WINDOWS", (request.param,))
    return request.param


class Failing(LinearProgram):
    """Finds nothing."""

    def solve(self, **_):
        """Fail."""
        raise SolverFailed("It failed.")


def checked(graph, plans):
    """Check the bound at the peak of each plan."""
    for plan in plans:
        verdict = validate(plan, graph)
        bound = window_bound.window_bound(graph, verdict.peak_bytes)
        assert bound is not None
        assert bound <= verdict.rebuild_s + 1e-6


@pytest.mark.usefixtures("windows")
def test_no_plan_that_drops_is_below_it():
    @settings(max_examples=60, deadline=None)
    @given(graphs(), masks, masks)
    def check(graph, dropped, dropped_twice):
        checked(graph, [dropping(graph, dropped, dropped_twice).plan])

    check()


@pytest.mark.usefixtures("windows")
def test_no_plan_that_drops_several_times_is_below_it():
    @settings(max_examples=60, deadline=None)
    @given(st.one_of(graphs(), blocks()), st.integers(0, 2**32 - 1))
    def check(graph, seed):
        rng = np.random.default_rng(seed)
        graph = with_other_asks(with_backward_workspaces(graph, rng), rng)
        presence = Presence(graph)
        checked(graph, [presence.plan(random_presence(presence, rng)) for _ in range(3)])

    check()


@pytest.mark.parametrize("graph", TINY.values(), ids=TINY)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_it_lies_between_the_other_bound_and_the_best_of_all_choices(graph, share, windows):
    lower = bounds_of(graph).lower_bytes
    budget = int(lower + share * (graph.peak_bytes - lower))
    none = [False] * len(graph.saved)
    verdicts = [
        validate(dropping(graph, list(dropped), none).plan, graph)
        for dropped in itertools.product([False, True], repeat=len(none))
    ]
    seconds = [each.rebuild_s for each in verdicts if each.peak_bytes <= budget]
    bound = window_bound.window_bound(graph, budget)
    if bound is None:
        assert not seconds
        return
    assert bound >= least_seconds(graph, budget)
    if seconds:
        assert bound <= min(seconds) + 1e-9


def test_it_is_no_higher_than_the_optimum():
    """Of contracted steps the optimum is known."""
    rng = np.random.default_rng(5)
    proved = 0
    for number in range(12):
        n = 7 + number % 3
        graph = chain((rng.integers(1, 9, n) * MIB).tolist(), rng.uniform(1e-2, 5e-2, n).tolist())
        small = by_size(graph).graph
        low = bounds_of(small).lower_bytes
        for share in (0.2, 0.5):
            budget = int(low + share * (small.peak_bytes - low))
            exact = StepProgram(small, budget).fastest(30.0, 1e-4)
            bound = window_bound.window_bound(small, budget)
            if exact.plan is not None:
                proved += 1
                assert bound is not None
                assert bound <= exact.plan.predicted_seconds + 1e-9
    assert proved > 12


def test_it_knows_that_what_is_rebuilt_needs_what_it_is_rebuilt_from():
    """There is room for three of twelve values: some are rebuilt for others, and once more for themselves."""
    graph = chain([8 * MIB] * 12, [0.01] * 12)
    budget = graph.peak_bytes - 9 * 8 * MIB
    assert least_seconds(graph, budget) == pytest.approx(0.09)
    assert window_bound.window_bound(graph, budget) == pytest.approx(0.12, rel=1e-4)


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_real_steps_are_planned_near_it(name):
    graph = recorded(name)
    budget = int(graph.peak_bytes - 0.65 * graph.activation_bytes)
    plan = joint_heuristic.plan(graph, budget, effort=4.0, most_work=24_000_000)
    assert validate(plan, graph).peak_bytes <= budget
    bound = window_bound.window_bound(graph, budget, time_limit_s=10.0)
    assert bound is not None
    assert least_seconds(graph, budget) < bound <= plan.predicted_seconds <= 1.03 * bound


def test_what_was_saved_between_two_ops_may_leave_at_the_second(windows):
    graph = chain([8, 80, 8, 90], [0.01] * 4)
    graph = replace(
        graph,
        saved_at=np.array([3, 5, 7, 9]),
        alone_at=np.array([4, 6, 8, 10]),
        **{name: 2 * getattr(graph, name) for name in ("op_tick", "released_at", "uses", "ticks")},
    )
    asked = int(graph.uses[1])
    intervals = [[Interval(2 * op, graph.ticks)] for op in range(4)]
    intervals += [[] for _ in range(graph.n_values - 4)]
    intervals[1] = [Interval(2, 6, Exit.DROP), Interval(asked, graph.ticks)]
    weights = np.ones(graph.n_values)
    plan = Plan.of(intervals, weights=weights, predicted_seconds=0.0, predicted_peak_bytes=0)
    checked(graph, [plan])
    assert windows


def test_a_solver_that_fails_leaves_the_other_bound(monkeypatch):
    graph = TINY["chain"]
    budget = (bounds_of(graph).lower_bytes + graph.peak_bytes) // 2
    monkeypatch.setattr(window_bound, "LinearProgram", Failing)
    assert window_bound.window_bound(graph, budget) == least_seconds(graph, budget)


def test_without_time_it_is_the_other_bound():
    graph = TINY["chain"]
    budget = (bounds_of(graph).lower_bytes + graph.peak_bytes) // 2
    bound = window_bound.window_bound(graph, budget, time_limit_s=0.0)
    assert bound == least_seconds(graph, budget)


def test_none_where_nothing_fits():
    graph = TINY["chain"]
    assert window_bound.window_bound(graph, bounds_of(graph).lower_bytes // 4) is None


def test_nothing_where_everything_fits():
    graph = TINY["chain"]
    assert window_bound.window_bound(graph, graph.peak_bytes) == 0.0

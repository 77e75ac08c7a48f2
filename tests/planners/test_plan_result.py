"""What all planners return, and the search for a plan that uses the budget."""

from __future__ import annotations

import time

import numpy as np
import pytest

from delta_runtime.core.plan import Plan
from delta_runtime.planners.plan_result import fit, judged, moving_nothing, result_of
from delta_runtime.planners.presence import Presence
from tests.support.step_graphs import MIB, TINY, step_graph

CHAIN = TINY["chain"]  # eight values of 8 MiB: 64 MiB with all of them


def dropping(count: int) -> Plan:
    """The plan that drops the first values: each holds 8 MiB."""
    there = np.ones((CHAIN.n_ops, 8), bool)
    there[:, :count] = False
    return Presence(CHAIN).plan(there)


def test_the_judge_writes_into_a_plan_what_it_expects():
    found = judged(dropping(2), CHAIN)
    assert found.plan.predicted_seconds == found.seconds == pytest.approx(0.03)
    assert found.plan.predicted_peak_bytes == found.verdict.peak_bytes < CHAIN.peak_bytes


def test_a_coarse_planner_is_asked_for_more_until_its_plan_uses_the_budget():
    """Its account counts twice what the judge does."""
    asked: list[float] = []

    def at(memory: float) -> Plan | None:
        asked.append(memory)
        fitting = [
            n for n in range(6) if 2 * judged(dropping(n), CHAIN).verdict.peak_bytes <= memory
        ]
        return dropping(fitting[0]) if fitting else None

    found = fit(CHAIN, 56 * MIB, at, lambda: None)
    assert asked[0] == 56 * MIB and len(asked) > 1
    assert found.feasible and found.peak_bytes == 56 * MIB
    assert found.seconds == pytest.approx(0.01)


def test_the_fastest_that_fits_is_taken():
    plans = iter([dropping(3), dropping(1), dropping(2), None, None, None])
    found = fit(CHAIN, 60 * MIB, lambda memory: next(plans), lambda: None)
    assert found.seconds == pytest.approx(0.01)


def test_what_does_not_fit_names_a_budget_that_works():
    def small() -> Plan:
        return dropping(2)

    found = fit(CHAIN, 10 * MIB, lambda memory: None, small)
    assert (found.feasible, found.peak_bytes, found.seconds) == (False, 0, float("inf"))
    assert found.least_budget_bytes == judged(dropping(2), CHAIN).verdict.peak_bytes
    again = fit(CHAIN, found.least_budget_bytes, lambda memory: None, small)
    assert again.feasible and again.peak_bytes == found.least_budget_bytes
    none = fit(CHAIN, 10 * MIB, lambda memory: None, lambda: None)
    assert none.least_budget_bytes == CHAIN.peak_bytes, "what moves nothing fits there"


def test_where_all_fits_nobody_is_asked():
    def never(*_: object) -> Plan | None:
        raise AssertionError

    found = fit(CHAIN, CHAIN.peak_bytes, never, never)
    assert (found.seconds, found.bound_s, found.peak_bytes) == (0, 0, CHAIN.peak_bytes)


@pytest.mark.parametrize("budget_bytes", [0, 1])
def test_a_budget_of_nothing(budget_bytes):
    found = fit(CHAIN, budget_bytes, lambda memory: dropping(1), lambda: dropping(2))
    assert not found.feasible and found.least_budget_bytes is not None
    nothing = step_graph([])
    assert fit(nothing, budget_bytes, lambda memory: None, lambda: None).feasible
    assert moving_nothing(nothing, budget_bytes, time.perf_counter()).peak_bytes == 0


def test_a_bound_that_the_plan_is_below_is_not_told():
    found = judged(dropping(1), CHAIN)
    for bound_s, told in ((0.005, 0.005), (0.01, 0.01), (0.02, None)):
        result = result_of(found, CHAIN.peak_bytes, time.perf_counter(), bound_s=bound_s)
        assert result.bound_s == told
    assert result.solver_s >= 0

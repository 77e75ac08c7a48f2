"""What every planner must keep, on graphs of a few ops: its plans work, fit where it says so, and take what it says."""

from __future__ import annotations

import pytest

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.bounds import bounds_of
from delta_runtime.planners.validate import validate
from tests.support.step_graphs import MIB, TINY

SHARES = (0.0, 0.4, 0.6, 0.8, 1.0)
FAST, SLOW = Links(1e12, 1e12), Links(4e8, 4e8)


def _drops(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    return joint_heuristic.plan(graph, budget_bytes, effort=10)


def _drops_and_swaps(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    return joint_heuristic.plan(graph, budget_bytes, effort=10, links=links)


def _swaps(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    return joint_heuristic.plan(graph, budget_bytes, drops=False, links=links)


PLANNERS = {
    "joint heuristic, drops": _drops,
    "joint heuristic": _drops_and_swaps,
    "joint heuristic, swaps": _swaps,
}
every_planner = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
every_graph = pytest.mark.parametrize("graph", TINY.values(), ids=TINY)
every_lane = pytest.mark.parametrize("links", [FAST, SLOW], ids=["fast", "slow"])


def budgets(graph: StepGraph) -> list[int]:
    lower_bytes = bounds_of(graph).lower_bytes
    return [int(lower_bytes + share * (graph.peak_bytes - lower_bytes)) for share in SHARES]


@every_planner
@every_graph
@every_lane
def test_plans_work_and_peak_no_higher_than_they_say(planner, graph, links):
    for budget_bytes in budgets(graph):
        plan = planner(graph, budget_bytes, links)
        verdict = validate(plan, graph, links)
        assert verdict.peak_bytes <= plan.predicted_peak_bytes
        assert verdict.rebuild_s <= plan.predicted_seconds + 1e-9


@every_graph
def test_what_only_drops_takes_what_it_says(graph):
    for budget_bytes in budgets(graph):
        plan = _drops(graph, budget_bytes, None)
        verdict = validate(plan, graph)
        assert verdict.peak_bytes == plan.predicted_peak_bytes
        assert verdict.rebuild_s == pytest.approx(plan.predicted_seconds)


@every_planner
@every_graph
def test_nothing_leaves_where_all_fits(planner, graph):
    plan = planner(graph, graph.peak_bytes, FAST)
    assert (plan.first_exits() == Exit.STAYS).all()
    assert validate(plan, graph, FAST).peak_bytes == graph.peak_bytes


@every_planner
@every_graph
def test_with_lanes_that_take_no_time_a_step_that_can_fit_does(planner, graph):
    """Where nothing that is saved can stay, only what no planner moves is left."""
    budget_bytes = budgets(graph)[3]
    plan = planner(graph, budget_bytes, FAST)
    if planner is not _drops:
        assert validate(plan, graph, FAST).peak_bytes <= budget_bytes


@every_planner
@every_graph
def test_equal_arguments_give_equal_plans_and_plans_go_through_json(planner, graph):
    budget_bytes = budgets(graph)[2]
    plans = [planner(graph, budget_bytes, SLOW).to_json() for _ in range(2)]
    assert plans[0] == plans[1]
    assert Plan.from_json(plans[0]).to_json() == plans[0]


def test_a_chain_is_planned_as_by_hand():
    """Eight values of 8 MiB; at 48 MiB the step has to do without the first two."""
    graph = TINY["chain"]
    plan = _drops(graph, 48 * MIB, None)
    verdict = validate(plan, graph)
    assert verdict.peak_bytes <= 48 * MIB < graph.peak_bytes
    assert 0 < verdict.rebuild_s < 0.05

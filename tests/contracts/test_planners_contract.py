"""What every planner must keep, on graphs of a few ops: its plans work, fit where it says so, and take what it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint, joint_heuristic, min_peak, rotor
from delta_runtime.planners.bounds import bounds_of
from delta_runtime.planners.plan_result import PlanResult
from delta_runtime.planners.registry import PLANNERS
from delta_runtime.planners.validate import validate
from tests.support.fixtures import short_search  # noqa: F401
from tests.support.step_graphs import MIB, TINY, Op, step_graph

SHARES = (0.0, 0.4, 0.6, 0.8, 1.0)
FAST, SLOW = Links(1e12, 1e12), Links(4e8, 4e8)


def _drops(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    return joint_heuristic.plan(graph, budget_bytes, effort=10)


def _drops_and_swaps(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    return joint_heuristic.plan(graph, budget_bytes, effort=10, links=links)


def _swaps(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    return joint_heuristic.plan(graph, budget_bytes, drops=False, links=links)


HEURISTICS = {
    "joint heuristic, drops": _drops,
    "joint heuristic": _drops_and_swaps,
    "joint heuristic, swaps": _swaps,
}
every_planner = pytest.mark.parametrize("planner", HEURISTICS.values(), ids=HEURISTICS)
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


# ---------------------------------------------------------------- one signature: plan(graph, budget_bytes, tiers)


def _by_name(name: str) -> Callable[[StepGraph, int], PlanResult]:
    def plan(graph: StepGraph, budget_bytes: int) -> PlanResult:
        if name == "checkmate":
            pytest.importorskip("scipy")
        return PLANNERS[name].plan(graph, budget_bytes, SLOW)

    return plan


def _without_lanes(graph: StepGraph, budget_bytes: int) -> PlanResult:
    return joint.plan(graph, budget_bytes)


def _seeded(graph: StepGraph, budget_bytes: int) -> PlanResult:
    other = min_peak.plan(graph, budget_bytes).plan
    return joint.plan(graph, budget_bytes, seeds=[other] if other else [])


SIGNED = {name: _by_name(name) for name in PLANNERS} | {
    "joint, no lanes": _without_lanes,
    "joint, seeded": _seeded,
}
"""Every planner of the registry, and other ways to call joint."""
ODD = {
    "no ops": step_graph([]),
    "nothing saved": step_graph([Op((), (8,), ()), Op((0,), (8,), ())]),
    "no backward": step_graph([Op((), (8,), (0,), asked=False), Op((0,), (8,), (1,), asked=False)]),
    "two ops of one tick": replace(
        TINY["chain"], op_tick=np.array([0, 1, 2, 2, *range(4, 16)], np.int64)
    ),
    "asked for before its first op": replace(TINY["chain"], uses=np.full(8, -1, np.int64)),
    "asked for in forward": replace(
        TINY["chain"], uses=np.array([14, 13, 12, 11, 6, 9, 8, 7], np.int64)
    ),
    "exabytes": replace(
        TINY["chain"],
        value_bytes=TINY["chain"].value_bytes << 30,
        op_watermark_bytes=TINY["chain"].op_watermark_bytes << 30,
        op_ordinary_bytes=TINY["chain"].op_ordinary_bytes << 30,
    ),
    "no seconds": replace(TINY["chain"], op_seconds=np.zeros(16)),
    "no bytes": replace(
        TINY["chain"],
        value_bytes=np.zeros(8, np.int64),
        op_watermark_bytes=np.zeros(16, np.int64),
        op_ordinary_bytes=np.zeros(16, np.int64),
    ),
    "never let go of": replace(TINY["chain"], released_at=np.full(8, 99, np.int64)),
    "always held": replace(TINY["chain"], alone_at=np.full(8, 99, np.int64)),
    "outputs of one op apart": step_graph(
        [
            Op((), (8, 8, 8), (0, 1, 2)),
            Op((0, 1), (8, 8), (3, 4)),
            Op((3, 4), (8, 8), (5, 6)),
            Op((5,), (8,), (7,)),
            Op((7,), (8,), (8,)),
        ]
    ),
}
"""Steps that no model makes, or seldom."""
AS_LONG_WITH_JOINT = [SIGNED[name] for name in ("joint, seeded", "recompute", "checkmate")]
every_signed = pytest.mark.parametrize("planner", SIGNED.values(), ids=SIGNED)
every_step = pytest.mark.parametrize("graph", [*TINY.values(), *ODD.values()], ids=[*TINY, *ODD])


def assert_holds(result: PlanResult, graph: StepGraph, budget_bytes: int) -> None:
    assert result.plan is not None and result.feasible
    verdict = validate(result.plan, graph, SLOW)
    assert verdict.peak_bytes == result.peak_bytes == result.plan.predicted_peak_bytes
    assert result.peak_bytes <= budget_bytes
    assert verdict.rebuild_s + verdict.stall_s == pytest.approx(result.seconds)
    assert result.plan.predicted_seconds == result.seconds
    assert result.least_budget_bytes is None
    if result.bound_s is not None:
        assert result.bound_s <= result.seconds + 1e-9


@every_signed
@every_step
def test_what_is_feasible_holds_and_what_is_not_names_a_budget_that_is(planner, graph, request):
    if planner in AS_LONG_WITH_JOINT:  # which is searched with as long as it ever is
        request.getfixturevalue("short_search")
    for share in (0.0, 0.5, 0.8, 0.95):
        budget_bytes = int(share * graph.peak_bytes)
        result = planner(graph, budget_bytes)
        assert result.solver_s >= 0
        if result.feasible:
            assert_holds(result, graph, budget_bytes)
            continue
        assert (result.plan, result.peak_bytes, result.seconds) == (None, 0, float("inf"))
        least_bytes = result.least_budget_bytes
        assert budget_bytes < least_bytes <= graph.peak_bytes
        assert_holds(planner(graph, least_bytes), graph, least_bytes)


@pytest.mark.parametrize("name", [each for each in SIGNED if each != "drop_all"])
@every_step
def test_where_all_fits_nothing_moves(name, graph):
    for budget_bytes in (graph.peak_bytes, 2 * graph.peak_bytes + 1):
        result = SIGNED[name](graph, budget_bytes)
        assert result.feasible
        assert result.seconds == 0
        assert (result.plan.first_exits() == Exit.STAYS).all()


@every_signed
@pytest.mark.parametrize("name", ["chain", "residual", "multi-output"])
def test_equal_arguments_give_equal_results(planner, name):
    budget_bytes = int(0.8 * TINY[name].peak_bytes)
    one, two = (planner(TINY[name], budget_bytes) for _ in range(2))
    assert (one.plan and one.plan.to_json()) == (two.plan and two.plan.to_json())
    for field in ("peak_bytes", "seconds", "bound_s", "least_budget_bytes", "fallback"):
        assert getattr(one, field) == getattr(two, field)


def test_the_seeded_joint_planner_is_no_slower_than_its_seeds():
    graph = TINY["chain"]
    for share in (0.75, 0.85):
        budget_bytes = int(share * graph.peak_bytes)
        seed = rotor.plan(graph, budget_bytes)
        assert seed.plan is not None
        found = joint.plan(graph, budget_bytes, seeds=[seed.plan])
        assert found.seconds <= seed.seconds

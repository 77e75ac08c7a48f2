"""Which of several plans of one graph stays (the one that has cost least, by measurement), and which budgets do."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from delta_runtime import plan_cache
from delta_runtime.affordable_peak import MOST_MORE, AffordablePeak, affordable_s, bearable_s
from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.known_step import CALIBRATION_STEPS, StepCost
from delta_runtime.plan_cache import (
    LONG_EFFORT,
    LONG_FROM_S,
    LONG_SEARCH,
    MOST_GRAPHS,
    SEARCH_EFFORT,
    STEPS_TO_SETTLE,
    PlanCache,
)
from delta_runtime.plan_trials import MOST_TRIALS, TRIAL_STEPS, WATCH_STEPS
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.bounds import bounds_of
from delta_runtime.planners.linear_program import SolverFailed
from delta_runtime.planners.plan_result import PlanResult
from delta_runtime.planners.registry import Planner
from delta_runtime.planning_time import PlanningTime
from delta_runtime.plans_beside import PlansBeside
from tests.support.step_graphs import chain

MIB = 1024**2
GRAPH = chain([8 * MIB] * 12, [1e-2] * 12)
LINKS = Links(out_bytes_per_s=4000 * MIB, in_bytes_per_s=4000 * MIB)
LONG_S = 0.1 * GRAPH.seconds


def slower(graph: StepGraph, by: float) -> StepGraph:
    """The same step on a machine that was busy otherwise."""
    return dataclasses.replace(graph, op_seconds=graph.op_seconds * by)


def learn(known: PlanCache, graph: StepGraph = GRAPH, share: float = 0.5) -> None:
    known.learn(graph, int(share * GRAPH.peak_bytes), LINKS)


def calibrated(graph: StepGraph = GRAPH, **what: bool) -> PlanCache:
    known = PlanCache(**{"plans": True, "drops": True, "swaps": True} | what)
    for _ in range(CALIBRATION_STEPS):
        assert not known.judge(known.plan, 0.0, LONG_S)  # not the final plan yet
        learn(known, graph)
    return known


def recorded_again(graph: StepGraph = GRAPH) -> PlanCache:
    """A graph whose plan waited, and that was recorded once more for that."""
    known = calibrated(graph)
    assert not judge(known, 0.01, 1000.0)
    assert known.wants_log(missed=False) and not known.settled
    assert not known.judge(known.plan, 0.0, LONG_S)
    learn(known)
    assert not known.wants_log(missed=False) and not known.settled
    return known


def swapped_bytes(known: PlanCache) -> int:
    assert known.plan is not None
    return int(GRAPH.value_bytes[known.plan.first_exits() == Exit.SWAP].sum())


def exits(known: PlanCache) -> list[int]:
    assert known.plan is not None
    return known.plan.first_exits().tolist()


def judge(known: PlanCache, rebuild_s: float, wait_s: float) -> bool:
    """What one trial comes to; the least of its steps counts."""
    for _ in range(TRIAL_STEPS - 1):
        assert not known.judge(known.plan, rebuild_s + 1.0, wait_s + 1.0)
    return known.judge(known.plan, rebuild_s, wait_s)


def test_a_plan_that_waits_for_nothing_stays():
    known = calibrated()
    plan = known.plan
    assert swapped_bytes(known) > 0 and not known.settled
    assert not judge(known, 0.01, 0.0)
    assert known.settled and known.plan is plan
    assert not judge(known, 0.01, LONG_S), "once settled, a slow step changes nothing"
    assert known.plan is plan and not known.wants_log(missed=False)


def test_a_plan_that_waits_gives_way_to_one_that_asks_less_of_the_lanes():
    known = recorded_again()
    first_bytes = swapped_bytes(known)
    assert judge(known, 0.01, LONG_S)
    assert 0 < swapped_bytes(known) <= first_bytes
    second = known.plan
    assert not judge(known, 0.02, 0.0)
    assert known.settled and known.plan is second


def test_the_least_measured_seconds_win():
    known = recorded_again()
    first = known.plan
    assert judge(known, 0.01, 0.01)
    assert judge(known, 0.03, 0.0)  # no wait, and yet dearer than the first
    assert known.settled and known.plan is first


def test_at_last_a_plan_without_lanes_is_tried():
    known = recorded_again()
    plans = []
    for _ in range(MOST_TRIALS - 1):
        plans.append(known.plan)
        assert judge(known, 0.0, 100.0)
    assert swapped_bytes(known) == 0 and Exit.DROP in exits(known)
    recompute = known.plan
    assert not judge(known, 0.05, 0.0)
    assert known.settled and known.plan is recompute
    assert recompute not in plans


def test_a_plan_without_lanes_that_cannot_be_better_is_not_tried():
    known = recorded_again()
    plans = []
    waits = [0.004, 0.003, 0.002, 0.0015]
    assert 1 + len(waits) == MOST_TRIALS and waits[-1] > 0.002 * GRAPH.seconds
    for wait_s in waits:
        plans.append(known.plan)
        judge(known, 0.0, wait_s)
    assert known.settled and known.plan is plans[-1]


def test_a_step_that_was_calibrated_while_the_machine_was_slow_is_recorded_once_more():
    """Its ops seemed to leave the lanes more time than they do."""
    slow = calibrated(slower(GRAPH, 5.0))
    known = recorded_again(slower(GRAPH, 5.0))
    right = calibrated()
    assert swapped_bytes(slow) > swapped_bytes(right)
    assert exits(known) == exits(right)


def test_a_plan_that_comes_to_wait_is_made_again():
    known = calibrated(slower(GRAPH, 5.0))
    assert not judge(known, 0.01, 0.0)
    first = exits(known)
    assert known.settled
    for _ in range(WATCH_STEPS):
        assert not known.wants_log(missed=False)
        assert not known.judge(known.plan, 0.01, LONG_S) and exits(known) == first
    assert known.wants_log(missed=False) and not known.settled
    learn(known)
    assert exits(known) != first
    assert not judge(known, 0.01, 0.0)
    assert known.settled and exits(known) != first


def test_a_plan_that_was_made_again_stays_only_if_it_is_better():
    known = calibrated(slower(GRAPH, 5.0))
    judge(known, 0.01, 0.0)
    first = known.plan
    for _ in range(WATCH_STEPS):
        known.judge(known.plan, 0.01, LONG_S)
    learn(known)
    assert known.plan is not first
    assert judge(known, LONG_S + 0.02, 0.0)
    assert known.settled and known.plan is first


def test_each_time_it_takes_twice_as_many_steps():
    known = calibrated()
    judge(known, 0.01, 0.0)
    for turn in range(4):
        steps = 0
        while not known.wants_log(missed=False):
            known.judge(known.plan, 0.01, LONG_S)
            steps += 1
        assert steps == WATCH_STEPS * 2**turn
        learn(known)
        assert not judge(known, 0.01, 0.0) and known.settled


@pytest.mark.parametrize(
    "steps",
    [
        [(0.01, LONG_S)] * (WATCH_STEPS - 1) + [(0.01, 0.0)],
        [(LONG_S, 0.0)] * WATCH_STEPS,
        [(0.01, 0.005 * GRAPH.seconds)] * WATCH_STEPS,
    ],
    ids=["not each step waits", "slow, but no waits", "waits of half a per cent"],
)
def test_a_plan_in_place_stays_unless_each_step_waits(steps):
    known = calibrated()
    assert not judge(known, 0.01, 0.0)
    plan = known.plan
    for _ in range(4):
        for step in steps:
            assert not known.judge(known.plan, *step)
            assert known.settled and known.plan is plan and not known.wants_log(missed=False)


def settled_on_a_plan_that_waits() -> tuple[PlanCache, float]:
    known = recorded_again()
    waits = [0.02, 0.01, 0.03, 0.04]
    assert 1 + len(waits) == MOST_TRIALS
    plans = []
    for wait_s in waits:
        plans.append(known.plan)
        assert judge(known, 0.01, wait_s)
    if not known.settled:
        assert judge(known, 0.5, 0.0)  # the plan without lanes
    assert known.settled and known.plan is plans[1]
    return known, waits[1]


def test_a_plan_that_waits_no_longer_than_when_it_was_chosen_stays():
    known, wait_s = settled_on_a_plan_that_waits()
    plan = known.plan
    for _ in range(3 * WATCH_STEPS):
        assert not known.judge(known.plan, LONG_S, wait_s)
    assert not known.wants_log(missed=False) and known.plan is plan


def test_a_plan_that_was_chosen_while_all_waited_has_to_keep_what_it_showed_later():
    known, wait_s = settled_on_a_plan_that_waits()
    for _ in range(WATCH_STEPS):
        known.judge(known.plan, 0.01, 0.0)
    for _ in range(WATCH_STEPS):
        assert not known.wants_log(missed=False)
        known.judge(known.plan, 0.01, wait_s)
    assert known.wants_log(missed=False)


@pytest.mark.parametrize("busy_steps", [12, 18, 60])
def test_what_keeps_the_lanes_busy_for_a_while_costs_no_plan_for_good(busy_steps):
    known = calibrated()
    quiet_s = known.plan.predicted_seconds

    def steps(count: int, wait_s_per_mib: float) -> None:
        for _ in range(count):
            if known.wants_log(missed=False):
                learn(known)
            else:
                waits = wait_s_per_mib * swapped_bytes(known) / MIB
                known.judge(known.plan, known.plan.predicted_seconds, waits)

    steps(STEPS_TO_SETTLE, 0.0)
    assert known.settled and swapped_bytes(known) > 0
    steps(busy_steps, 0.004)
    worse_s = known.plan.predicted_seconds
    assert worse_s > quiet_s + 0.01 * GRAPH.seconds
    steps(10 * busy_steps + 40, 0.0)
    assert known.settled
    assert known.plan.predicted_seconds == pytest.approx(quiet_s)


OTHER = chain([4 * MIB] * 8, [1e-2] * 8)


@pytest.mark.parametrize("logged_first", [False, True])
def test_a_second_graph_while_one_is_recorded_again_changes_nothing_for_it(logged_first):
    known = calibrated()
    assert not judge(known, 0.01, 0.0)
    measured = known.plan
    for _ in range(WATCH_STEPS):
        known.judge(known.plan, 0.01, LONG_S)
    assert known.wants_log(missed=False)
    if logged_first:
        learn(known)
        assert known.plan is not measured
    for _ in range(CALIBRATION_STEPS):
        learn(known, OTHER)
        learn(known)
    assert known.plan is not measured and not known.settled
    assert not judge(known, 0.01, 0.0)
    assert known.settled


def test_the_whole_of_a_forward_alone_is_looked_for_but_not_for_ever():
    known = PlanCache(plans=True, drops=True, swaps=True)
    forward = dataclasses.replace(
        GRAPH, uses=GRAPH.uses[:0], use_offsets=np.zeros_like(GRAPH.use_offsets)
    )
    for _ in range(CALIBRATION_STEPS):
        learn(known, forward)
    assert not known.wants_log(missed=False)
    logged = 0
    while known.wants_log(missed=False, went_on=True):
        learn(known, forward)
        logged += 1
    assert 1 <= logged <= CALIBRATION_STEPS
    assert len(known.plans()) == 1
    learn(known)  # here it is, after all
    assert len(known.plans()) == 1
    for _ in range(CALIBRATION_STEPS - 1):
        assert known.wants_log(missed=False)
        learn(known)
    assert not known.wants_log(missed=False, went_on=True)
    assert known.plan is not None and known.plan.predicted_seconds > 0


def test_trials_end_within_the_steps_that_are_said():
    known = PlanCache(plans=True, drops=True, swaps=True)
    for _ in range(STEPS_TO_SETTLE):
        assert not known.settled
        if known.wants_log(missed=False):
            learn(known)
        else:
            known.judge(known.plan, 0.0, 100.0)
    assert known.settled


@pytest.mark.parametrize("what", [{"plans": False}, {"drops": False}, {"swaps": False}], ids=str)
def test_without_a_choice_there_is_nothing_to_judge(what):
    known = calibrated(**what)
    assert known.settled
    before = known.plan
    assert not judge(known, 0.0, LONG_S)
    assert known.plan is before


def plan_of(known: PlanCache, graph: StepGraph) -> Plan:
    return next(plan for each, plan in known.plans() if each.fingerprint == graph.fingerprint)


def test_of_several_graphs_each_has_trials_of_its_own():
    """Their steps come in turns, and what one comes to counts for its own plan alone."""
    graphs = [GRAPH, dataclasses.replace(GRAPH, fingerprint=100)]
    known = PlanCache(plans=True, drops=True, swaps=True)
    logged(known, graphs * (2 * CALIBRATION_STEPS))
    first = [plan_of(known, graph) for graph in graphs]

    def steps(waits: Sequence[float]) -> None:
        for _ in range(TRIAL_STEPS):
            for graph, wait_s in zip(graphs, waits, strict=True):
                known.judge(plan_of(known, graph), 0.0, wait_s * graph.seconds)

    steps([0.1, 0.0])  # the second is settled by that, and not looked at any more for now
    logged(known, graphs * (2 * CALIBRATION_STEPS))  # the first is recorded once more
    steps([0.2, 0.0])
    second = [plan_of(known, graph) for graph in graphs]
    assert second[0] is not first[0] and second[1] is first[1]
    steps([0.3, 0.0])
    steps([0.0, 0.0])
    assert plan_of(known, graphs[1]) is first[1]
    assert plan_of(known, graphs[0]) not in (first[0], second[0])
    in_place = [plan_of(known, graph) for graph in graphs]
    steps([0.3, 0.3])
    assert [plan_of(known, graph) for graph in graphs] == in_place


def test_a_graph_that_is_to_be_recorded_again_and_is_not_stays_with_what_was_measured():
    """Beside more graphs than are remembered none is waited for."""
    known = PlanCache(plans=True, drops=True, swaps=True)
    for index in range(MOST_GRAPHS + 1):
        learn(known, dataclasses.replace(GRAPH, fingerprint=100 + index))
    first, second = (dataclasses.replace(GRAPH, fingerprint=500 + index) for index in range(2))
    for graph in (first, second):
        for _ in range(CALIBRATION_STEPS):
            learn(known, graph)
    waits = plan_of(known, first)
    for _ in range(TRIAL_STEPS):
        known.judge(waits, 0.0, LONG_S)
    assert logged(known, [first, second] * 10) == []
    assert plan_of(known, first) is waits
    assert judged_again(known, waits), "it is watched"


def judged_again(known: PlanCache, plan: Plan) -> bool:
    """Whether the plan is looked at: it is left where each step waits longer than before."""
    for _ in range(WATCH_STEPS):
        known.judge(plan, 0.0, 2 * LONG_S)
    return any(each.runs < CALIBRATION_STEPS for each in known._known.values() if each.plan is plan)


def test_without_time_a_graph_beside_others_stays_with_the_best_that_was_tried():
    graphs = [GRAPH, dataclasses.replace(GRAPH, fingerprint=100)]
    planning = PlanningTime(clock=lambda: 0.0)
    known = PlanCache(plans=True, drops=True, swaps=True, planning=planning)
    logged(known, graphs * (2 * CALIBRATION_STEPS))
    for wait_s in (LONG_S, 2 * LONG_S):
        before = plan_of(known, GRAPH)
        for _ in range(TRIAL_STEPS):
            known.judge(plan_of(known, GRAPH), 0.0, wait_s)
        logged(known, graphs * (2 * CALIBRATION_STEPS))
        planning.planned_beside(1000.0)
    assert plan_of(known, GRAPH) is not before  # the first one
    stays = plan_of(known, GRAPH)
    for _ in range(TRIAL_STEPS):
        assert not known.judge(stays, 0.0, 2 * LONG_S)
    assert plan_of(known, GRAPH) is stays


def test_the_same_values_saved_by_other_ops_are_another_graph():
    """Accumulating gradients adds ops: each of two kinds of steps in turns has its own record."""
    known = PlanCache(plans=True, drops=True, swaps=True)
    accumulating = dataclasses.replace(GRAPH, op_name=(*GRAPH.op_name[:-1], "add_"))
    for _ in range(CALIBRATION_STEPS):
        assert known.wants_log(missed=False)
        for graph in (GRAPH, accumulating):
            learn(known, graph)
    assert not known.wants_log(missed=False)
    assert [graph.op_name for graph, _ in known.plans()] == [accumulating.op_name, GRAPH.op_name]
    assert not judge(known, 0.01, 0.0) and known.settled


def logged(known: PlanCache, graphs: Sequence[StepGraph]) -> list[StepGraph]:
    """Take steps of these graphs. Return those that were logged."""
    found = []
    for graph in graphs:
        wanted = known.wants_log(missed=False)
        known.saw(cost(graph, GRAPH.peak_bytes, 0.0))
        if wanted:
            learn(known, graph)
            found.append(graph)
        else:
            known.tend(GRAPH.peak_bytes // 2, LINKS)
    return found


@pytest.mark.parametrize("kinds", [2, 3])
def test_of_graphs_in_turns_each_is_logged_until_its_plan_is_final(kinds):
    graphs = [dataclasses.replace(GRAPH, fingerprint=100 + i) for i in range(kinds)]
    known = PlanCache(plans=True, drops=True)
    found = logged(known, graphs * (2 * CALIBRATION_STEPS))
    for graph in graphs:
        assert sum(each is graph for each in found) >= CALIBRATION_STEPS
    assert logged(known, graphs * 10) == []


def test_for_a_graph_that_comes_seldom_others_are_not_logged_for_ever():
    seldom = dataclasses.replace(GRAPH, fingerprint=100)
    known = PlanCache(plans=True, drops=True)
    assert len(logged(known, [seldom, *[GRAPH] * 100])) == 1 + CALIBRATION_STEPS
    found = logged(known, [seldom, *[GRAPH] * 9] * 10)
    assert len(found) == CALIBRATION_STEPS * 3 and seldom not in found
    assert logged(known, [seldom, *[GRAPH] * 9] * 10) == []


def test_more_graphs_than_are_remembered_are_not_logged_for_ever():
    graphs = [dataclasses.replace(GRAPH, fingerprint=100 + i) for i in range(MOST_GRAPHS + 2)]
    known = PlanCache(plans=True, drops=True)
    logged(known, graphs * 10)
    assert logged(known, graphs * 10) == []


def test_steps_that_nothing_is_learned_from_end_the_wait_for_a_graph():
    graphs = [dataclasses.replace(GRAPH, fingerprint=100 + i) for i in range(2)]
    known = PlanCache(plans=True, drops=True)
    logged(known, [graphs[0], *[graphs[1]] * CALIBRATION_STEPS, graphs[0]])
    assert known.wants_log(missed=False)
    for _ in range(3):
        known.saw(cost(dataclasses.replace(GRAPH, fingerprint=0), GRAPH.peak_bytes, 0.0))
    assert not known.wants_log(missed=False)


def test_another_budget_begins_anew():
    known = calibrated()
    assert not judge(known, 0.01, 0.0)
    assert known.settled
    learn(known, share=0.6)
    assert not known.settled
    assert np.isfinite(known.plan.predicted_seconds)


def cost(graph: StepGraph, peak_bytes: int, rebuild_s: float) -> StepCost:
    seconds = graph.seconds + rebuild_s
    return StepCost(graph.fingerprint, graph.n_ops, 0, peak_bytes, seconds, rebuild_s, whole=True)


@pytest.mark.parametrize("dear", [False, True])
def test_a_budget_below_the_least_one_that_is_met_is_given_up_where_it_is_dear(dear: bool):
    budget_bytes = bounds_of(GRAPH).least_bytes - MIB
    known = PlanCache(plans=True, yields=True)
    step = cost(GRAPH, budget_bytes, (0.6 if dear else 0.1) * GRAPH.seconds)
    known.saw(step)
    known.learn(GRAPH, budget_bytes)
    assert not known.yielded, "one step may have been slowed down by others"
    known.saw(step)
    known.learn(GRAPH, budget_bytes)
    assert known.yielded == dear
    assert (known.limit_bytes(budget_bytes) > budget_bytes) == dear
    if dear:
        assert known.plan is not None
        assert known.plan.predicted_seconds <= affordable_s(GRAPH)


def test_a_dear_budget_above_the_least_one_is_kept():
    budget_bytes = bounds_of(GRAPH).least_bytes
    known = PlanCache(plans=True, yields=True)
    known.saw(cost(GRAPH, budget_bytes, 2.0 * GRAPH.seconds))
    known.learn(GRAPH, budget_bytes)
    assert not known.yielded


def test_graphs_that_never_come_again_are_neither_planned_for_nor_always_logged():
    known = PlanCache(plans=True, yields=True)
    budget_bytes = GRAPH.peak_bytes // 2
    graphs = [dataclasses.replace(GRAPH, fingerprint=100 + i) for i in range(8)]
    for i, graph in enumerate(graphs[:5]):
        assert known.wants_log(missed=True) == (i < 4)
        known.saw(cost(graph, budget_bytes, 0.0))
        known.learn(graph, budget_bytes)
        assert (known.plan is not None) == (i < 3)
    for _ in range(20):
        if known.wants_log(missed=True):
            break
        known.saw(cost(graphs[6], budget_bytes, 0.0))
        known.tend(budget_bytes)
    assert known.wants_log(missed=True), "now and then it is looked whether one comes again"
    known.saw(cost(graphs[4], budget_bytes, 0.0))
    known.learn(graphs[4], budget_bytes)
    assert known.plan is not None
    assert known.wants_log(missed=True)


def test_steps_of_unknown_graphs_that_are_dear_raise_what_is_kept():
    known = PlanCache(plans=True, yields=True)
    budget_bytes = bounds_of(GRAPH).lower_bytes
    for i in range(6):
        graph = dataclasses.replace(GRAPH, fingerprint=100 + i)
        known.saw(cost(graph, 2 * budget_bytes, 0.0))
        known.learn(graph, budget_bytes)
    assert known.yielded
    before = known.limit_bytes(budget_bytes)
    for i in range(2):
        known.saw(cost(dataclasses.replace(GRAPH, fingerprint=200 + i), before, GRAPH.seconds))
        known.tend(budget_bytes)
    assert known.limit_bytes(budget_bytes) > before


def test_a_relief_holds_for_as_long_as_what_persists_does():
    """An optimizer's state comes after the first step, and a record without it names bounds that are too low."""
    budget_bytes = bounds_of(GRAPH).least_bytes - MIB
    later = chain([8 * MIB] * 12, [1e-2] * 12, persistent_bytes=16 * MIB)
    known = PlanCache(plans=True, yields=True)
    step = cost(GRAPH, 2 * budget_bytes, 0.0)
    known.saw(step)
    known.learn(GRAPH, budget_bytes)
    assert known.yielded and known.relieved and not known.wants_log(missed=False)
    step = dataclasses.replace(step, begin_bytes=later.persistent_bytes)
    for _ in range(3):
        known.saw(step)
        assert not known.relieved
        if known.wants_log(missed=False):
            known.learn(later, budget_bytes)
            break
        known.tend(budget_bytes)
    assert known.relieved, "it was recorded again"
    assert known.bounds is not None
    assert known.bounds.least_bytes >= bounds_of(later).least_bytes - MIB


def test_what_observing_takes_leaves_less_for_recomputing():
    """Both together may add a third of an ordinary step to it; a tenth may always be recomputed."""
    assert bearable_s(1.0, 0) == pytest.approx(MOST_MORE)
    assert bearable_s(1.0, 10_000) == pytest.approx(MOST_MORE * 0.9 - 0.1)
    assert bearable_s(1.0, 30_000) == pytest.approx(0.1 * 0.7)
    assert bearable_s(1.0, 10**6) == pytest.approx(0.1 * 0.5)


def test_recomputing_outside_of_a_step_is_no_reason_to_give_more_up():
    """Backward on another thread may recompute for longer than the step takes that it is counted in."""
    budget_bytes = bounds_of(GRAPH).least_bytes - MIB
    known = PlanCache(plans=True, yields=True)
    step = cost(GRAPH, budget_bytes, 0.6 * GRAPH.seconds)
    for _ in range(2):
        known.saw(step)
        known.learn(GRAPH, budget_bytes)
    assert known.yielded
    limit_bytes = known.limit_bytes(budget_bytes)
    odd = dataclasses.replace(step, seconds=0.001, rebuild_s=1.0)
    none = dataclasses.replace(step, rebuild_s=0.0)
    for each in (odd, none) * 6:
        known.saw(each)
        known.tend(budget_bytes)
    assert known.limit_bytes(budget_bytes) == limit_bytes


@pytest.mark.parametrize(("times", "share"), [(1.1, 0.25), (2.0, 0.5), (8.0, 0.875)])
def test_what_was_too_dear_is_given_up_in_one_go(times: float, share: float):
    budgets: list[int] = []

    def make_plan(graph: StepGraph, budget_bytes: int) -> Plan:
        budgets.append(budget_bytes)
        return joint_heuristic.plan(graph, budget_bytes)

    limit_bytes = GRAPH.peak_bytes // 2
    relief = AffordablePeak(limit_bytes, GRAPH, make_plan, hopeless=True, share=0.0)
    relief.too_dear(GRAPH, PlanningTime(), times)
    left_bytes = GRAPH.peak_bytes - limit_bytes
    assert relief.peak_bytes == pytest.approx(limit_bytes + share * left_bytes, abs=2)
    assert budgets == [relief.peak_bytes] and relief.is_over


# ---------------------------------------------------------------- a planner by name


def named(monkeypatch: pytest.MonkeyPatch, *answers: PlanResult | Exception) -> list[int]:
    """Have the planner "rotor" answer so, one answer after the other; returns the budgets that it is asked for."""
    asked: list[int] = []
    left = list(answers)

    def plan(graph: StepGraph, budget_bytes: int, tiers: Links | None = None, /) -> PlanResult:
        asked.append(budget_bytes)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(plan_cache, "PLANNERS", {"rotor": Planner(plan, "")})
    return asked


def answer_of(plan: Plan | None, least_bytes: int | None = None) -> PlanResult:
    return PlanResult(plan, 1, 1.0, None, 0.0, least_bytes)


def test_a_planner_by_name_makes_the_final_plan_alone(monkeypatch):
    plan = Plan.moving_nothing(GRAPH)
    asked = named(monkeypatch, answer_of(plan))
    known = PlanCache(plans=True, planner="rotor")
    for _ in range(CALIBRATION_STEPS - 1):
        learn(known)
    assert known.plan is not None and not asked  # joint's
    learn(known)
    assert (known.plan is plan, len(asked), known.refusal) == (True, 1, None)


@pytest.mark.parametrize("beside", [False, True])
def test_a_planner_that_fails_is_not_asked_again(monkeypatch, beside):
    asked = named(monkeypatch, SolverFailed())
    plans = PlansBeside() if beside else None
    known = PlanCache(plans=True, planner="rotor", beside=plans)

    def step() -> None:
        if plans is not None:
            plans.wait()
            known.take_made()
        learn(known)

    for _ in range(CALIBRATION_STEPS - 1 + beside):
        step()
    with pytest.raises(SolverFailed):
        step()
    first = known.plan
    for _ in range(3):
        step()
        known.tend(int(0.5 * GRAPH.peak_bytes), LINKS)
    assert len(asked) == 1
    assert known.plan is first is not None


def test_a_refusal_ends_with_the_budget_that_it_is_for(monkeypatch):
    plan = Plan.moving_nothing(GRAPH)
    asked = named(monkeypatch, answer_of(None, 77), answer_of(plan))
    known = PlanCache(plans=True, planner="rotor")
    for _ in range(CALIBRATION_STEPS):
        learn(known)
    assert known.refusal is not None
    assert known.refusal.least_budget_bytes == 77
    assert known.plan is not None  # joint's
    learn(known)
    assert len(asked) == 1
    learn(known, share=0.7)
    assert (known.plan is plan, known.refusal, len(asked)) == (True, None, 2)


@pytest.mark.parametrize(
    ("rebuild_s", "idles", "trained_s", "effort"),
    [
        (LONG_FROM_S, True, 100.0, LONG_EFFORT),
        (LONG_FROM_S, False, 100.0, SEARCH_EFFORT),
        (LONG_FROM_S, True, 1.0, SEARCH_EFFORT),  # there is no time for more
        (0.9 * LONG_FROM_S, True, 100.0, SEARCH_EFFORT),
    ],
)
def test_the_last_search_is_longer_where_a_core_idles_and_much_is_rebuilt(
    monkeypatch, rebuild_s, idles, trained_s, effort
):
    efforts = []

    def plan(graph, budget_bytes, *, effort, most_search, **_):
        efforts.append((effort, most_search))
        return dataclasses.replace(Plan.moving_nothing(graph), predicted_seconds=rebuild_s)

    monkeypatch.setattr(joint_heuristic, "plan", plan)
    planning = PlanningTime(clock=lambda: 0.0, core_idles=lambda: idles)
    planning.trained(trained_s)
    plans = PlansBeside()
    cache = PlanCache(plans=True, planning=planning, beside=plans)
    for _ in range(CALIBRATION_STEPS + 1):
        learn(cache)
        assert plans.wait(60.0)
        cache.take_made()
    assert cache.settled
    most_search = LONG_SEARCH if effort == LONG_EFFORT else joint_heuristic.MOST_TO_SEARCH
    assert {each for each, _ in efforts[:-1]} == {0.0}
    assert efforts[-1] == (effort, most_search)


def test_plans_made_beside_training_may_take_half_of_the_time_that_a_core_idled():
    idles = False
    planning = PlanningTime(clock=lambda: 0.0, core_idles=lambda: idles)
    planning.trained(10.0)
    assert (planning.left_s, planning.left_beside_s) == pytest.approx((1.5, 1.5))
    idles = True
    planning.trained(10.0)
    assert (planning.left_s, planning.left_beside_s) == pytest.approx((2.0, 6.5))
    idles = False  # what it had then stays
    planning.planned_beside(4.0)
    assert (planning.left_s, planning.left_beside_s) == pytest.approx((2.0, 2.5))
    planning.planned_beside(100.0, free=True)
    planning.planned_beside(1.5)
    assert (planning.left_s, planning.left_beside_s) == pytest.approx((1.0, 1.0))


def test_looking_longer_begins_as_soon_as_there_is_time_for_it():
    """The clock stands still: planning takes nothing, and there is one second for it, with 5 % of what is trained."""
    planning = PlanningTime(clock=lambda: 0.0)
    cache = PlanCache(plans=True, planning=planning)
    graph = chain([8 * MIB] * 16, [0.3] * 16)
    budget_bytes = int(0.6 * graph.peak_bytes)
    for _ in range(CALIBRATION_STEPS + 1):
        cache.learn(graph, budget_bytes)
    search_s = joint_heuristic.search_seconds(SEARCH_EFFORT, cache.plan.predicted_seconds)
    assert search_s > 1.0
    assert not cache.settled
    planning.trained((search_s - 1.0) / 0.05 - 0.1)
    cache.learn(graph, budget_bytes)
    assert not cache.settled
    planning.trained(0.2)
    cache.learn(graph, budget_bytes)
    assert cache.settled

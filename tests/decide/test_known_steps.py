"""Which of several plans of one graph stays: the one that has cost least, by measurement."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from delta_runtime.core.graph import StepGraph
from delta_runtime.core.model import Exit
from delta_runtime.decide.director import Links
from delta_runtime.decide.known_steps import (
    CALIBRATION_STEPS,
    MOST_TRIALS,
    STEPS_TO_SETTLE,
    TRIAL_STEPS,
    WATCH_STEPS,
    KnownSteps,
)
from tests.support.step_graphs import chain

MIB = 1024**2
GRAPH = chain([8 * MIB] * 12, [1e-2] * 12)
LINKS = Links(out_bytes_per_s=4000 * MIB, in_bytes_per_s=4000 * MIB)
LONG_S = 0.1 * GRAPH.seconds


def slower(graph: StepGraph, by: float) -> StepGraph:
    """The same step on a machine that was busy otherwise."""
    return dataclasses.replace(graph, op_seconds=graph.op_seconds * by)


def learn(known: KnownSteps, graph: StepGraph = GRAPH, share: float = 0.5) -> None:
    known.learn(graph, int(share * GRAPH.peak_bytes), LINKS)


def calibrated(graph: StepGraph = GRAPH, **what: bool) -> KnownSteps:
    known = KnownSteps(**{"plans": True, "drops": True, "swaps": True} | what)
    for _ in range(CALIBRATION_STEPS):
        assert not known.judge(0.0, LONG_S)  # not the final plan yet
        learn(known, graph)
    return known


def recorded_again(graph: StepGraph = GRAPH) -> KnownSteps:
    """A graph whose plan waited, and that was recorded once more for that."""
    known = calibrated(graph)
    assert not judge(known, 0.01, LONG_S)
    assert known.wants_log(missed=False) and not known.settled
    assert not known.judge(0.0, LONG_S)
    learn(known)
    assert not known.wants_log(missed=False) and not known.settled
    return known


def swapped_bytes(known: KnownSteps) -> int:
    assert known.foresight is not None
    return int(GRAPH.value_bytes[known.foresight.exits == Exit.SWAP].sum())


def judge(known: KnownSteps, rebuild_s: float, wait_s: float) -> bool:
    """What one trial comes to; the least of its steps counts."""
    for _ in range(TRIAL_STEPS - 1):
        assert not known.judge(rebuild_s + 1.0, wait_s + 1.0)
    return known.judge(rebuild_s, wait_s)


def test_a_plan_that_waits_for_nothing_stays():
    known = calibrated()
    plan = known.foresight
    assert swapped_bytes(known) > 0 and not known.settled
    assert not judge(known, 0.01, 0.0)
    assert known.settled and known.foresight is plan
    assert not judge(known, 0.01, LONG_S), "once settled, a slow step changes nothing"
    assert known.foresight is plan and not known.wants_log(missed=False)


def test_a_plan_that_waits_gives_way_to_one_that_asks_less_of_the_lanes():
    known = recorded_again()
    first_bytes = swapped_bytes(known)
    assert judge(known, 0.01, LONG_S)
    assert 0 < swapped_bytes(known) <= first_bytes
    second = known.foresight
    assert not judge(known, 0.02, 0.0)
    assert known.settled and known.foresight is second


def test_the_least_measured_seconds_win():
    known = recorded_again()
    first = known.foresight
    assert judge(known, 0.01, 0.01)
    assert judge(known, 0.03, 0.0)  # no wait, and yet dearer than the first
    assert known.settled and known.foresight is first


def test_at_last_a_plan_without_lanes_is_tried():
    known = recorded_again()
    plans = []
    for _ in range(MOST_TRIALS):
        plans.append(known.foresight)
        assert judge(known, 0.0, 100.0)
    assert swapped_bytes(known) == 0 and known.foresight.planned.any()
    recompute = known.foresight
    assert not judge(known, 0.05, 0.0)
    assert known.settled and known.foresight is recompute
    assert recompute not in plans


def test_a_plan_without_lanes_that_cannot_be_better_is_not_tried():
    known = recorded_again()
    plans = []
    waits = [0.004, 0.003, 0.002, 0.0015]
    assert len(waits) == MOST_TRIALS and waits[-1] > 0.002 * GRAPH.seconds
    for wait_s in waits:
        plans.append(known.foresight)
        judge(known, 0.0, wait_s)
    assert known.settled and known.foresight is plans[-1]


def test_a_step_that_was_calibrated_while_the_machine_was_slow_is_recorded_once_more():
    """Its ops seemed to leave the lanes more time than they do."""
    slow = calibrated(slower(GRAPH, 20.0))
    known = recorded_again(slower(GRAPH, 20.0))
    assert known.foresight is not None and slow.foresight is not None
    right = calibrated()
    assert swapped_bytes(slow) > swapped_bytes(right)
    assert np.array_equal(known.foresight.exits, right.foresight.exits)
    assert np.array_equal(known.foresight.prefetch_at, right.foresight.prefetch_at)


def test_a_plan_that_comes_to_wait_step_after_step_is_made_again():
    known = calibrated(slower(GRAPH, 20.0))
    assert not judge(known, 0.01, 0.0)
    plan = known.foresight
    assert known.settled
    wait_steps = WATCH_STEPS
    for _ in range(3):
        for index in range(wait_steps):
            assert not known.wants_log(missed=False), index
            assert not known.judge(0.01, LONG_S) and known.foresight is plan
        assert known.wants_log(missed=False) and not known.settled
        learn(known)
        assert known.foresight is not plan
        assert not judge(known, 0.01, 0.0)
        assert known.settled
        plan = known.foresight
        wait_steps *= 2


@pytest.mark.parametrize(
    "good", [(0.01, 0.0), (0.01 + LONG_S, 0.0)], ids=["one step of five", "without waits"]
)
def test_a_plan_in_place_stays_where_waits_are_not_what_is_slow(good):
    known = calibrated()
    assert not judge(known, 0.01, 0.0)
    plan = known.foresight
    for _ in range(4):
        for _ in range(WATCH_STEPS - 1):
            assert not known.judge(*(good if good[0] > 0.01 else (0.01, LONG_S)))
        assert not known.judge(*good)
    assert known.settled and known.foresight is plan and not known.wants_log(missed=False)


def test_a_plan_that_waits_no_longer_than_when_it_was_chosen_stays():
    known = recorded_again()
    waits = [0.02, 0.01, 0.03, 0.04]
    assert len(waits) == MOST_TRIALS
    plans = []
    for wait_s in waits:
        plans.append(known.foresight)
        assert judge(known, 0.01, wait_s)
    if not known.settled:
        judge(known, 0.5, 0.0)  # the plan without lanes
    assert known.settled and known.foresight is plans[1]
    for _ in range(3 * WATCH_STEPS):
        assert not known.judge(0.01, 0.01)
    assert not known.wants_log(missed=False) and known.foresight is plans[1]


def test_trials_end_within_the_steps_that_are_said():
    known = KnownSteps(plans=True, drops=True, swaps=True)
    for _ in range(STEPS_TO_SETTLE):
        assert not known.settled
        if known.wants_log(missed=False):
            learn(known)
        else:
            known.judge(0.0, 100.0)
    assert known.settled


@pytest.mark.parametrize("what", [{"plans": False}, {"drops": False}, {"swaps": False}], ids=str)
def test_without_a_choice_there_is_nothing_to_judge(what):
    known = calibrated(**what)
    assert known.settled
    before = known.foresight
    assert not judge(known, 0.0, LONG_S)
    assert known.foresight is before


def test_a_second_graph_ends_the_trials_with_the_best_of_them():
    """Nobody knows any more whose seconds a step's were."""
    known = recorded_again()
    first = known.foresight
    assert judge(known, 0.0, 0.01)
    assert judge(known, 0.0, 0.05)
    assert known.foresight is not first
    other = chain([4 * MIB] * 8, [1e-2] * 8)
    learn(known, other)
    assert np.array_equal(known.tables()[1].exits, first.exits)
    before = [table.exits.tolist() for table in known.tables()]
    assert not judge(known, 0.0, LONG_S)
    assert [table.exits.tolist() for table in known.tables()] == before
    for _ in range(CALIBRATION_STEPS - 1):
        learn(known, other)
    assert known.settled


def test_the_same_values_saved_by_other_ops_are_another_graph():
    """Accumulating gradients adds ops: each of two kinds of steps in turns has its own record."""
    known = KnownSteps(plans=True, drops=True, swaps=True)
    accumulating = dataclasses.replace(GRAPH, op_name=(*GRAPH.op_name[:-1], "add_"))
    for _ in range(CALIBRATION_STEPS):
        assert known.wants_log(missed=False)
        for graph in (GRAPH, accumulating):
            learn(known, graph)
    assert not known.wants_log(missed=False) and known.settled


def test_another_budget_begins_anew():
    known = calibrated()
    assert not judge(known, 0.01, 0.0)
    assert known.settled
    learn(known, share=0.6)
    assert not known.settled
    assert np.isfinite(known.foresight.predicted_seconds)

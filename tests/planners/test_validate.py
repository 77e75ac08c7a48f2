"""The judge of plans: it agrees with the planners' own evaluation, and refuses plans that cannot work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import NEVER, Interval, Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners.validate import InvalidPlan, Verdict, validate
from tests.planners.random_plans import (
    dropping,
    dropping_and_copying,
    graphs,
    masks,
    speeds,
    with_backward_workspaces,
    with_other_asks,
)
from tests.support.recorded_steps import WORKLOADS, recorded
from tests.support.step_graphs import MIB, TINY, Op, asked_for_again, step_graph

LANE = Links(1e9, 1e9)


@settings(max_examples=300, deadline=None)
@given(graphs(), masks, masks, st.integers(0, 2**32 - 1))
def test_evaluation_and_judge_agree_at_each_op(graph, dropped, dropped_twice, seed):
    rng = np.random.default_rng(seed)
    graph = with_other_asks(with_backward_workspaces(graph, rng), rng)
    choice = dropping(graph, dropped, dropped_twice)
    verdict = validate(choice.plan, graph)
    evaluation = choice.evictions.evaluation
    np.testing.assert_allclose(verdict.live_bytes, evaluation.excess, atol=1e-6)
    assert verdict.rebuild_s == pytest.approx(evaluation.seconds)
    assert verdict.stall_s == 0


@settings(max_examples=100, deadline=None)
@given(graphs(), masks, masks, speeds, st.integers(0, 2**32 - 1))
def test_with_lanes_the_judge_is_never_above_the_evaluation(graph, dropped, swapped, speed, seed):
    """A copy back that waits for room is away for longer than the evaluation counts on."""
    graph = with_other_asks(graph, np.random.default_rng(seed))
    links = Links(speed, speed)
    choice = dropping_and_copying(graph, dropped, swapped, links)
    verdict = validate(choice.plan, graph, links)
    assert (verdict.live_bytes <= choice.evictions.evaluation.excess + 1e-6).all()
    assert verdict.rebuild_s <= choice.evictions.evaluation.seconds + 1e-9


@pytest.mark.parametrize("name", WORKLOADS)
def test_they_agree_on_recorded_steps(name):
    graph = recorded(name)
    rng = np.random.default_rng(0)
    dropped, dropped_twice = rng.random((2, len(graph.saved))) < 0.4
    choice = dropping(graph, dropped.tolist(), dropped_twice.tolist())
    verdict = validate(choice.plan, graph)
    evaluation = choice.evictions.evaluation
    np.testing.assert_allclose(verdict.live_bytes, evaluation.excess, atol=1e-3)
    assert verdict.rebuild_s == pytest.approx(evaluation.seconds)


# ---------------------------------------------------------------- what a chain comes to, by hand

CHAIN = TINY[
    "chain"
]  # eight values of 8 MiB, made at ticks 0 to 7; value v is asked for at tick 14 - v
TICKS = CHAIN.ticks
TWICE = asked_for_again(CHAIN, 1, 9)


def planned(changes: dict[int, list[Interval]]) -> Plan:
    """The plan that keeps all of the chain, but for these values."""
    plan = Plan.moving_nothing(CHAIN)
    intervals = [changes.get(value, kept) for value, kept in enumerate(plan.intervals())]
    return Plan.of(intervals, weights=plan.weights, predicted_seconds=0.0, predicted_peak_bytes=0)


def judged(changes: dict[int, list[Interval]], links: Links | None = LANE) -> Verdict:
    return validate(planned(changes), CHAIN, links)


DROP = [Interval(1, 3, Exit.DROP), Interval(13, TICKS)]
SWAP = [Interval(1, 4, Exit.SWAP, 9), Interval(13, TICKS)]


def test_what_stays_takes_what_an_ordinary_step_takes():
    verdict = judged({})
    assert (verdict.peak_bytes, verdict.rebuild_s, verdict.stall_s) == (CHAIN.peak_bytes, 0, 0)


def test_a_drop_takes_its_op_once_more_and_its_bytes_off():
    verdict = judged({1: DROP})
    ordinary = CHAIN.op_ordinary_bytes + CHAIN.op_watermark_bytes
    away = [tick for tick in range(len(ordinary)) if verdict.live_bytes[tick] < ordinary[tick]]
    assert away == list(range(3, 13))
    assert verdict.rebuild_s == pytest.approx(1e-2)


def test_what_a_dropped_value_is_rebuilt_from_is_passed_through_if_it_has_no_interval():
    both = {
        1: [Interval(1, 3, Exit.DROP), Interval(13, TICKS)],
        2: [Interval(2, 4, Exit.DROP), Interval(12, TICKS)],
    }
    verdict = judged(both)
    assert verdict.rebuild_s == pytest.approx(3e-2)  # value 1 twice: for value 2, and for itself
    assert verdict.live_bytes[12] == CHAIN.op_ordinary_bytes[12] - 8 * MIB + 8 * MIB
    early = {**both, 1: [Interval(1, 3, Exit.DROP), Interval(12, TICKS)]}
    assert judged(early).rebuild_s == pytest.approx(2e-2)


def test_a_copy_takes_room_from_when_it_starts_and_the_step_waits_for_a_late_one():
    verdict = judged({1: SWAP})
    ordinary = CHAIN.op_ordinary_bytes + CHAIN.op_watermark_bytes
    away = [tick for tick in range(len(ordinary)) if verdict.live_bytes[tick] < ordinary[tick]]
    assert away == [4, 5, 6, 7, 8]
    assert verdict.stall_s == 0 and verdict.rebuild_s == 0
    # 8 MiB take 8.4 s a way: a copy out has 1e-2 s (one op) until it is waited for, one back four ops.
    slow = judged({1: SWAP}, Links(1e6, 1e6))
    assert slow.stall_s == pytest.approx(2 * 8 * MIB / 1e6 - 1e-2 - 5e-2, abs=1e-6)


def test_the_node_that_asked_holds_a_value_until_another_one_asks_whatever_the_plan_says():
    """Value 1 is asked for at tick 9 too, and value 4 at tick 10."""
    early = [Interval(1, 3, Exit.DROP), Interval(9, 10, Exit.DROP), Interval(13, TICKS)]
    verdict = validate(planned({1: early}), TWICE)
    ordinary = TWICE.op_ordinary_bytes + TWICE.op_watermark_bytes
    away = [tick for tick in range(len(ordinary)) if verdict.live_bytes[tick] < ordinary[tick]]
    assert away == [3, 4, 5, 6, 7, 8, 11, 12]
    within = validate(planned({1: early}), replace(TWICE, contracted=True))
    assert within.live_bytes[10] == ordinary[10] - 8 * MIB


def test_what_a_rebuild_holds_for_a_moment_is_charged_when_the_op_before_has_let_go_of_its_own():
    """Rebuilding value 2 passes through value 1. 32 MiB are live before tick 12 and 24 behind it, and 8 may just go."""
    both = {
        1: [Interval(1, 3, Exit.DROP), Interval(13, TICKS)],
        2: [Interval(2, 4, Exit.DROP), Interval(12, TICKS)],
    }
    for workspace, live in ((0, 32), (4, 32), (8, 32), (12, 36)):
        more = np.where(np.arange(CHAIN.n_ops) == 12, workspace * MIB, 0)
        graph = replace(CHAIN, op_watermark_bytes=CHAIN.op_watermark_bytes + more)
        verdict = validate(planned(both), graph)
        assert verdict.live_bytes[12] == live * MIB, workspace
    behind = np.where(np.arange(CHAIN.n_ops) == 13, 64 * MIB, 0)  # of the next op: no use here
    graph = replace(CHAIN, op_watermark_bytes=CHAIN.op_watermark_bytes + behind)
    assert validate(planned(both), graph).live_bytes[12] == 32 * MIB


def test_what_stays_takes_no_room_before_it_is_made():
    """Rebuilding value 3 passes through values 1 and 2, and value 3 is made when value 1 has gone."""
    drops = {
        value: [Interval(value, value + 2, Exit.DROP), Interval(14 - value, TICKS)]
        for value in (1, 2, 3)
    }
    ordinary = int(CHAIN.op_ordinary_bytes[11])
    assert judged(drops).live_bytes[11] == ordinary - 16 * MIB + 8 * MIB
    contracted = validate(planned(drops), replace(CHAIN, contracted=True))
    assert contracted.live_bytes[11] == ordinary - 16 * MIB + 16 * MIB


def test_what_is_back_early_takes_no_room_while_that_is_made_which_is_asked_for():
    """Rebuilding value 4 passes through value 3; value 1 is made behind that."""
    late = [Interval(1, 3, Exit.DROP), Interval(13, TICKS)]
    early = [Interval(1, 3, Exit.DROP), Interval(10, TICKS)]
    others = {
        3: [Interval(3, 5, Exit.DROP), Interval(11, TICKS)],
        4: [Interval(4, 6, Exit.DROP), Interval(10, TICKS)],
    }
    ordinary = int(CHAIN.op_ordinary_bytes[10])
    assert judged({**others, 1: late}).live_bytes[10] == ordinary - 16 * MIB + 8 * MIB
    assert judged({**others, 1: early}).live_bytes[10] == ordinary - 8 * MIB


def dropped_and_back(graph: StepGraph, times: dict[int, tuple[int, int]]) -> Plan:
    """The plan that keeps all, but for values that leave at one tick and are back at another."""
    plan = Plan.moving_nothing(graph)
    intervals = plan.intervals()
    for value, (leaves, back) in times.items():
        begin = int(graph.op_tick[graph.value_op[value]])
        intervals[value] = [Interval(begin, leaves, Exit.DROP), Interval(back, graph.ticks)]
    return Plan.of(intervals, weights=plan.weights, predicted_seconds=0.0, predicted_peak_bytes=0)


def first_asked(graph: StepGraph) -> dict[int, int]:
    """The tick at which backward asks for each saved value first."""
    return dict(zip(graph.saved.tolist(), graph.first_use.tolist(), strict=True))


def op_of(graph: StepGraph, tick: int) -> int:
    return int(np.searchsorted(graph.op_tick, tick, side="right")) - 1


def test_an_op_that_ran_again_may_have_left_what_it_makes():
    """Op 1 makes values 1 and 2. To rebuild value 4, which is asked for, it runs; value 2 is to be back then too."""
    graph = step_graph(
        [
            Op((), (8,), (0,)),
            Op((0,), (8, 32), (1, 2)),
            Op((1,), (8,), (), workspace_bytes=64),
            Op((3,), (8,), (4,)),
            *(Op((value,), (8,), (kept,)) for value, kept in ((4, 4), (5, 6), (6, 7))),
        ]
    )
    asked = first_asked(graph)
    others = {4: (6, asked[4]), 1: (3, asked[1])}
    op = op_of(graph, asked[4])
    late = validate(dropped_and_back(graph, {**others, 2: (3, asked[2])}), graph)
    early = validate(dropped_and_back(graph, {**others, 2: (3, asked[4])}), graph)
    assert early.live_bytes[op] >= late.live_bytes[op] + 32


@pytest.mark.parametrize("saves", [(2, 3), (3, 2)])
def test_in_what_order_values_are_asked_for_behind_one_op_makes_no_difference(saves):
    """Value 2 is rebuilt through 100 bytes, value 3 takes 50: it may be there by then."""
    graph = step_graph(
        [
            Op((), (8,), (0,)),
            Op((0,), (100,), ()),
            Op((1,), (8,), ()),
            Op((0,), (50,), ()),
            Op((2, 3), (8,), saves),
            Op((4,), (8,), (5,)),
        ]
    )
    at = first_asked(graph)[2]
    verdict = validate(dropped_and_back(graph, {2: (5, at), 3: (5, at)}), graph)
    op = op_of(graph, at)
    assert verdict.live_bytes[op] == graph.op_ordinary_bytes[op] + 100


def test_what_was_let_go_of_before_an_op_is_not_found_by_a_rebuild_behind_it():
    """Value 0 goes behind op 4; value 1 is rebuilt from it behind op 5, and what goes behind that is found."""
    for gone_behind, runs in ((4, 2), (5, 1)):
        graph = step_graph([Op((), (8,), (0,)), Op((0,), (8,), (1,)), Op((1,), (8,), (2,))])
        graph = replace(
            graph,
            uses=np.array([3, 5, 3], np.int64),
            released_at=np.array([gone_behind, 6, 4], np.int64),
            alone_at=np.array([2, 3, 3], np.int64),
        )
        intervals = Plan.moving_nothing(graph).intervals()
        intervals[1] = [Interval(1, 3, Exit.DROP), Interval(5, graph.ticks)]
        plan = Plan.of(intervals, weights=np.ones(3), predicted_seconds=0, predicted_peak_bytes=0)
        assert validate(plan, graph).rebuild_s == pytest.approx(runs * 1e-2)


# ---------------------------------------------------------------- plans that cannot work

CORRUPT = {
    "an interval that ends before it begins": {1: [Interval(1, 3, Exit.DROP), Interval(13, 12)]},
    "an interval before the value is made": {1: [Interval(0, TICKS)]},
    "an interval that begins after the value is made": {1: [Interval(2, TICKS)]},
    "intervals out of order": {1: [Interval(1, 13, Exit.DROP), Interval(3, TICKS)]},
    "a tick that no op has": {1: [Interval(1, 3, Exit.DROP), Interval(13, TICKS + 5)]},
    "a value that is missing": {1: []},
    "a value that never comes back": {1: [Interval(1, 3, Exit.DROP)]},
    "a value that comes back too late": {1: [Interval(1, 3, Exit.DROP), Interval(14, TICKS)]},
    "a value that leaves while forward reads it": {
        1: [Interval(1, 2, Exit.DROP), Interval(13, TICKS)]
    },
    "a copy that leaves while forward reads it": {
        1: [Interval(1, 2, Exit.SWAP, 9), Interval(13, TICKS)]
    },
    "a gap without a way back": {1: [Interval(1, 3, Exit.STAYS), Interval(13, TICKS)]},
    "a last interval that ends for no reason": {1: [Interval(1, 3)]},
    "an exit that does not exist": {1: [Interval(1, 3, 7), Interval(13, TICKS)]},
    "a copy that does not start": {1: [Interval(1, 3, Exit.SWAP), Interval(13, TICKS)]},
    "a copy back before the value has left": {
        1: [Interval(1, 5, Exit.SWAP, 4), Interval(13, TICKS)]
    },
    "a copy back after it is needed": {1: [Interval(1, 5, Exit.SWAP, 14), Interval(13, TICKS)]},
    "a copy back of what was dropped": {1: [Interval(1, 3, Exit.DROP, 9), Interval(13, TICKS)]},
    "a rebuild from what is in a tier below": {
        1: [Interval(1, 4, Exit.SWAP, 13), Interval(13, TICKS)],
        2: [Interval(2, 5, Exit.DROP), Interval(12, TICKS)],
    },
}


@pytest.mark.parametrize("changes", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupted_plan_is_refused(changes):
    with pytest.raises(InvalidPlan):
        judged(changes)


def test_the_refusal_names_the_value():
    with pytest.raises(InvalidPlan, match="value 1"):
        judged({1: [Interval(1, 3, Exit.DROP), Interval(14, TICKS)]})


def test_a_swap_without_lanes_is_refused():
    judged({1: SWAP})
    for links in (None, Links()):
        with pytest.raises(InvalidPlan, match="lane"):
            judged({1: SWAP}, links)


def test_what_does_not_repeat_is_not_dropped():
    graph = TINY["what does not repeat"]
    intervals = Plan.moving_nothing(graph).intervals()
    intervals[1] = [Interval(1, 3, Exit.DROP), Interval(5, graph.ticks)]
    plan = Plan.of(intervals, weights=np.ones(4), predicted_seconds=0, predicted_peak_bytes=0)
    with pytest.raises(InvalidPlan, match="bit for bit"):
        validate(plan, graph)


@pytest.mark.parametrize("name", ["begins", "ends", "exits", "copy_back_at", "interval_offsets"])
def test_columns_that_do_not_fit_are_refused(name):
    plan = planned({})
    with pytest.raises(InvalidPlan):
        validate(replace(plan, **{name: getattr(plan, name)[:-1]}), CHAIN)


def test_a_value_that_is_not_saved_has_no_interval():
    graph = TINY["residual"]  # its third value is not saved
    intervals = Plan.moving_nothing(graph).intervals()
    intervals[2] = [Interval(2, graph.ticks)]
    plan = Plan.of(
        intervals, weights=np.ones(len(intervals)), predicted_seconds=0, predicted_peak_bytes=0
    )
    with pytest.raises(InvalidPlan, match="not saved"):
        validate(plan, graph)
    assert plan.copy_back_at.max() == NEVER

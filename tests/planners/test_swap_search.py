"""Plans with lanes: they fit, never cost more than plans without, and keep to what the lanes can carry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.bounds import is_met_by_swaps, not_made_again
from delta_runtime.planners.greedy_drops import GreedyCover
from delta_runtime.planners.transfer_schedule import LaneTimes
from tests.support.step_graphs import chain

MIB = 1024**2
PLENTY = Links(out_bytes_per_s=1e12, in_bytes_per_s=1e12)
CRAWL = Links(out_bytes_per_s=1e3, in_bytes_per_s=1e3)


def lane_speed(mib_per_s: float) -> Links:
    return Links(out_bytes_per_s=mib_per_s * MIB, in_bytes_per_s=mib_per_s * MIB)


def dropped(plan: Plan) -> list[int]:
    return np.flatnonzero(plan.first_exits() == Exit.DROP).tolist()


def swapped(plan: Plan) -> list[int]:
    return np.flatnonzero(plan.first_exits() == Exit.SWAP).tolist()


@st.composite
def any_chain(draw):
    """A chain of 6 to 14 ops of different sizes and seconds."""
    sizes = draw(st.lists(st.integers(1, 16), min_size=6, max_size=14), label="MiB")
    each = st.floats(1e-3, 5e-2)
    seconds = draw(st.lists(each, min_size=len(sizes), max_size=len(sizes)), label="seconds")
    return chain([size * MIB for size in sizes], seconds)


def test_with_fast_lanes_nothing_is_recomputed():
    graph = chain([8 * MIB] * 12, [1e-2] * 12)
    budget_bytes = int(0.5 * graph.peak_bytes)
    without = joint_heuristic.plan(graph, budget_bytes)
    plan = joint_heuristic.plan(graph, budget_bytes, links=PLENTY)
    assert dropped(without) and without.predicted_seconds > 0
    assert not dropped(plan) and swapped(plan)
    assert plan.predicted_peak_bytes <= budget_bytes
    assert plan.predicted_seconds < 0.01 * without.predicted_seconds


def test_with_hopeless_lanes_the_plan_is_the_one_without():
    graph = chain([8 * MIB] * 12, [1e-2] * 12)
    budget_bytes = int(0.5 * graph.peak_bytes)
    without, plan = (
        joint_heuristic.plan(graph, budget_bytes),
        joint_heuristic.plan(graph, budget_bytes, links=CRAWL),
    )
    assert not swapped(plan)
    assert np.array_equal(plan.weights, without.weights)


@settings(max_examples=60, deadline=None)
@given(
    graph=any_chain(),
    speed=st.floats(10, 5000),
    share=st.floats(0.5, 0.95),
)
def test_lanes_never_make_a_plan_worse(graph, speed, share):
    budget_bytes = int(share * graph.peak_bytes)
    without = joint_heuristic.plan(graph, budget_bytes)
    plan = joint_heuristic.plan(graph, budget_bytes, links=lane_speed(speed))
    over = max(0, without.predicted_peak_bytes - budget_bytes)
    cover = GreedyCover(graph, budget_bytes, recipes_of(graph))
    if plan.predicted_peak_bytes > budget_bytes and is_met_by_swaps(cover):
        # What could not be made again is swapped, which may look worse; what it is chosen from does not.
        lost = graph.saved[not_made_again(cover)].tolist()
        assert set(lost) <= set(swapped(plan))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(joint_heuristic, "is_met_by_swaps", lambda _: False)
            plan = joint_heuristic.plan(graph, budget_bytes, links=lane_speed(speed))
    assert max(0, plan.predicted_peak_bytes - budget_bytes) <= over
    if over == 0:
        assert plan.predicted_seconds <= without.predicted_seconds + 1e-12


@settings(max_examples=60, deadline=None)
@given(
    graph=any_chain(),
    speed=st.floats(500, 50000),
    share=st.floats(0.4, 0.95),
)
def test_where_swapping_alone_is_free_nothing_is_recomputed(graph, speed, share):
    budget_bytes = int(share * graph.peak_bytes)
    alone = joint_heuristic.plan(graph, budget_bytes, drops=False, links=lane_speed(speed))
    plan = joint_heuristic.plan(graph, budget_bytes, links=lane_speed(speed))
    if alone.predicted_peak_bytes <= budget_bytes:
        assert plan.predicted_peak_bytes <= budget_bytes
        assert plan.predicted_seconds <= alone.predicted_seconds + 1e-12


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 16), min_size=4, max_size=14),
    speed=st.floats(10, 5000),
    share=st.floats(0.4, 0.95),
)
def test_the_lanes_carry_one_copy_at_a_time_and_in_time(sizes, speed, share):
    """By the clock of the recorded ops: no two copies of a lane overlap, none is late or early."""
    graph = chain([size * MIB for size in sizes], [1e-2] * len(sizes))
    cover = GreedyCover(graph, int(share * graph.peak_bytes), recipes_of(graph))
    links = lane_speed(speed)
    lanes = LaneTimes(cover, links)
    need = cover.own_need.tolist()
    rows = list(range(len(graph.saved)))
    spans = lanes.spans(rows, need)
    clock = np.concatenate([[0.0], np.cumsum(graph.op_seconds)])
    # Whoever is away was copied out before, once forward had read it last, behind those that were free earlier.
    free_s = 0.0
    for row in sorted(rows, key=lambda each: cover.begin[each]):
        out_s = graph.saved_bytes[row] / links.out_bytes_per_s
        free_s = max(free_s, clock[cover.begin[row]]) + out_s
        if spans[row].begin < spans[row].end:
            assert clock[spans[row].begin] >= free_s - 1e-9
    # And it is back in time, with all that is needed before it.
    back_s = {row: clock[max(spans[row].end, 0)] for row in rows}
    done_s = 0.0
    for row in sorted(rows, key=lambda each: need[each]):
        if spans[row].end <= 0:
            continue  # it would have to begin before the step does
        in_s = graph.saved_bytes[row] / links.in_bytes_per_s
        done_s = max(done_s, back_s[row]) + in_s
        assert done_s <= clock[need[row] + 1] + 1e-9


def test_only_swaps_begins_with_what_was_saved_first():
    graph = chain([8 * MIB] * 12, [1e-2] * 12)
    plan = joint_heuristic.plan(graph, int(0.6 * graph.peak_bytes), drops=False, links=PLENTY)
    assert swapped(plan) == list(range(len(swapped(plan))))
    assert plan.predicted_peak_bytes <= int(0.6 * graph.peak_bytes)
    assert not dropped(plan)


def test_only_swaps_plans_for_waiting_where_the_lanes_are_too_slow():
    graph = chain([8 * MIB] * 12, [1e-2] * 12)
    plan = joint_heuristic.plan(
        graph, int(0.5 * graph.peak_bytes), drops=False, links=lane_speed(20)
    )
    assert len(swapped(plan)) >= 5
    backward = graph.op_tick[np.argmax(graph.op_backward)]
    assert all(plan.intervals()[value][0].copy_back_at >= backward for value in swapped(plan))


@pytest.mark.parametrize("speed", [100.0, 1000.0, 1e6])
def test_what_comes_back_early_fits(speed):
    """At each op, what has come back by then has room beside all that is live."""
    graph = chain([8 * MIB] * 16, [1e-2] * 16)
    budget_bytes = int(0.5 * graph.peak_bytes)
    for drops in (False, True):
        plan = joint_heuristic.plan(graph, budget_bytes, drops=drops, links=lane_speed(speed))
        rows = swapped(plan)
        assert rows or drops
        if plan.predicted_peak_bytes > budget_bytes or dropped(plan):
            continue  # waits, or rebuilt values are in the way: no simple account
        live = (graph.op_ordinary_bytes + graph.op_watermark_bytes).astype(np.int64)
        need = np.searchsorted(graph.op_tick, graph.first_use, side="right") - 1
        for row in rows:
            back = int(np.searchsorted(graph.op_tick, plan.intervals()[row][0].copy_back_at))
            assert back <= need[row]
            live[row + 2 : back] -= int(graph.saved_bytes[row])
        assert (live[graph.op_backward] <= budget_bytes).all()


@pytest.mark.parametrize("drops", [True, False])
def test_a_plan_keeps_to_the_room_on_the_host(drops):
    graph = chain([8 * MIB] * 12, [1e-2] * 12)
    links = Links(out_bytes_per_s=1e12, in_bytes_per_s=1e12, store_bytes=3 * 8 * MIB)
    plan = joint_heuristic.plan(graph, int(0.5 * graph.peak_bytes), drops=drops, links=links)
    assert len(swapped(plan)) == 3


def test_no_plan_before_the_lanes_are_known():
    graph = chain([8 * MIB] * 12, [1e-2] * 12)
    budget_bytes = int(0.5 * graph.peak_bytes)
    assert not swapped(joint_heuristic.plan(graph, budget_bytes, links=Links()))
    assert not swapped(joint_heuristic.plan(graph, budget_bytes, drops=False, links=Links()))

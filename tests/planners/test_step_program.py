"""The step program: by the judge's word no plan is faster, or, where that is asked for, lower."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import delta_runtime.extension  # noqa: F401  the inner loops in C++
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.planners import checkmate, joint_heuristic
from delta_runtime.planners.contraction import by_size
from delta_runtime.planners.plan_result import judged
from delta_runtime.planners.presence import Presence
from delta_runtime.planners.step_program import Outcome, StepProgram
from delta_runtime.planners.validate import validate
from tests.planners.random_plans import blocks, graphs, with_other_asks
from tests.support.recorded_steps import recorded
from tests.support.step_graphs import TINY, Op, step_graph

pytest.importorskip("scipy")

MOST_CHOICES = 8  # of a value at an op: 256 plans


def choices_of(presence: Presence) -> list[tuple[int, int]]:
    """Ops and rows where a plan may choose."""
    return [
        (op, row)
        for row in np.flatnonzero(presence.recipes.possible).tolist()
        for op in range(int(presence.leaves[row]), int(presence.gone[row]))
        if op < presence.graph.n_ops and op not in presence.needed[row]
    ]


def seconds_by_peak(graph: StepGraph) -> dict[int, float]:
    """Every plan there is, judged: the fewest seconds for each peak."""
    presence = Presence(graph)
    choices = choices_of(presence)
    found: dict[int, float] = {}
    for chosen in itertools.product([False, True], repeat=len(choices)):
        there = np.zeros((graph.n_ops, len(graph.saved)), bool)
        for place, value in zip(choices, chosen, strict=True):
            there[place] = value
        verdict = validate(presence.plan(there), graph)
        found[verdict.peak_bytes] = min(verdict.rebuild_s, found.get(verdict.peak_bytes, np.inf))
    return found


def solved(graph: StepGraph, budget_bytes: int) -> Outcome:
    return StepProgram(graph, budget_bytes).fastest(60.0, 1e-9)


def assert_best(graph: StepGraph) -> None:
    of_peaks = seconds_by_peak(graph)
    peaks = sorted(of_peaks)
    middle = peaks[len(peaks) // 2]
    for budget_bytes in {peaks[0], max(middle - 1, peaks[0]), middle, peaks[-1]}:
        least_s = min(s for peak, s in of_peaks.items() if peak <= budget_bytes)
        found = solved(graph, budget_bytes)
        assert found.plan is not None and not found.impossible
        verdict = validate(found.plan, graph)
        assert verdict.peak_bytes == found.plan.predicted_peak_bytes <= budget_bytes
        assert verdict.rebuild_s == pytest.approx(found.plan.predicted_seconds)
        assert verdict.rebuild_s == pytest.approx(least_s)
        assert found.bound_s is not None and found.bound_s <= least_s + 1e-6
    below = solved(graph, peaks[0] - 1)
    assert below.plan is None
    assert (
        below.impossible or peaks[0] > 1e5
    )  # a byte of so many is less than the solver's tolerance
    small = StepProgram(graph, None).small_plans()
    assert validate(small[-1], graph).peak_bytes == peaks[0]


@settings(max_examples=60, deadline=None)
@given(st.one_of(graphs(), blocks()), st.integers(4, 9), st.integers(0, 2**32 - 1))
def test_no_plan_of_all_is_better(graph, most_ops, seed):
    other = with_other_asks(graph, np.random.default_rng(seed))
    contracted = (each_apart(graph), each_apart(other), by_size(graph, most_ops).graph)
    sizes = {len(choices_of(Presence(each))): each for each in contracted}
    small = [each for n, each in sizes.items() if 0 < n <= MOST_CHOICES]
    assume(small)
    for each in small:
        assert_best(each)


def each_apart(graph: StepGraph) -> StepGraph:
    """Contract a graph so that only what one op makes is put together."""
    return by_size(graph, 100).graph


def of_megabytes(graph: StepGraph) -> StepGraph:
    """The same with 20 million times the bytes: one more or less is below the solver's tolerance."""
    unit = 20_000_003
    return replace(
        graph,
        value_bytes=graph.value_bytes * unit,
        op_watermark_bytes=graph.op_watermark_bytes * unit,
        op_ordinary_bytes=graph.op_ordinary_bytes * unit,
    )


@settings(max_examples=40, deadline=None)
@given(blocks(), st.integers(4, 9))
def test_where_a_faster_plan_passes_by_a_byte_another_is_found(graph, most_ops):
    graph = by_size(graph, most_ops).graph
    assume(0 < len(choices_of(Presence(graph))) <= MOST_CHOICES)
    graph = of_megabytes(graph)
    of_peaks = seconds_by_peak(graph)
    for peak in of_peaks:
        fitting = [seconds for each, seconds in of_peaks.items() if each < peak]
        found = solved(graph, peak - 1).plan
        assert (found is None) == (not fitting)
        if found is not None:
            assert found.predicted_seconds == pytest.approx(min(fitting))


@pytest.mark.parametrize("name", TINY)
def test_nor_on_tiny_graphs(name):
    for most_ops in range(5, 9):
        graph = by_size(TINY[name], most_ops).graph
        if 0 < len(choices_of(Presence(graph))) <= MOST_CHOICES:
            assert_best(graph)


@settings(max_examples=60, deadline=None)
@given(st.one_of(graphs(), blocks()), st.floats(0.5, 1.0))
def test_the_relaxation_is_below_and_what_is_rounded_fits(graph, share):
    graph = each_apart(graph)
    budget_bytes = int(share * graph.peak_bytes)
    program = StepProgram(graph, budget_bytes)
    rounded, found = program.rounded(), solved(graph, budget_bytes)
    assert rounded.impossible <= found.impossible
    if found.plan is None:
        return
    _, relaxed_s = program.relaxation()
    assert relaxed_s is not None and relaxed_s <= found.plan.predicted_seconds + 1e-6
    if rounded.plan is not None:
        verdict = validate(rounded.plan, graph)
        assert verdict.peak_bytes <= budget_bytes
        assert verdict.rebuild_s >= found.plan.predicted_seconds - 1e-9


def test_what_is_there_only_when_it_is_asked_for_need_not_hold_least():
    """Value 1 is rebuilt through 100 bytes: to keep it holds less."""
    graph = step_graph(
        [
            Op((), (8,), (0,)),
            Op((0,), (100,), ()),
            Op((1,), (8,), (2,)),
            *(Op((2 + i,), (30,), (3 + i,)) for i in range(3)),
        ]
    )
    graph = each_apart(graph)
    program = StepProgram(graph, None)
    nothing, *_, least = [validate(each, graph).peak_bytes for each in program.small_plans()]
    assert least < nothing


def test_the_least_budget_is_the_same_for_each_record():
    graph = recorded("resnet50")
    rng = np.random.default_rng(1)
    noise = rng.uniform(0.7, 1.4, graph.n_ops)
    other = replace(
        graph,
        op_seconds=graph.op_seconds * noise,
        op_replay_seconds=graph.op_replay_seconds * noise,
    )
    least, again = (checkmate.plan(each, 1, time_limit_s=1.0) for each in (graph, other))
    assert least.least_budget_bytes == again.least_budget_bytes
    found = checkmate.plan(other, least.least_budget_bytes, time_limit_s=1.0)
    assert found.feasible
    assert found.fallback == ""
    # A little more, and joint has a plan too; it is faster than the one that holds least.
    budget_bytes = int(1.1 * least.least_budget_bytes)
    joint = judged(joint_heuristic.plan(graph, budget_bytes), graph)
    assert joint.verdict.peak_bytes <= budget_bytes
    assert joint.seconds < found.seconds
    more = checkmate.plan(graph, budget_bytes, time_limit_s=0.0)
    assert more.seconds <= joint.seconds
    assert more.fallback == ("joint" if more.seconds == joint.seconds else "")


def test_what_is_not_contracted_is_refused():
    through = step_graph([Op((), (8,), (0,)), Op((0,), (8,), ()), Op((1,), (8,), (2,))])
    together = step_graph([Op((), (8,), (0,)), Op((0,), (8, 8), (1, 2))])
    for graph in (through, together, TINY["chain"]):
        with pytest.raises(ValueError, match="contract the step"):
            StepProgram(graph, graph.peak_bytes)
        StepProgram(each_apart(graph), graph.peak_bytes)


def test_without_anything_to_choose():
    nothing = each_apart(step_graph([Op((), (8,), ())]))
    for graph in (each_apart(TINY["what does not repeat"]), nothing):
        assert solved(graph, graph.peak_bytes).plan is not None
    assert solved(nothing, 7).impossible
    assert solved(nothing, 0).impossible
    assert len(StepProgram(nothing, None).small_plans()) > 0


def test_out_of_time_what_was_rounded_counts_and_the_bound():
    graph = by_size(recorded("gpt")).graph
    budget_bytes = int(0.7 * graph.peak_bytes)
    program = StepProgram(graph, budget_bytes)
    rounded, found = program.rounded(), program.fastest(0.0, 0.0)
    assert not found.impossible
    assert found.bound_s is not None and rounded.bound_s is not None
    assert 0 < rounded.bound_s <= found.bound_s + 1e-9
    joint = joint_heuristic.plan(graph, budget_bytes, effort=4.0)
    assert validate(joint, graph).peak_bytes <= budget_bytes
    plans = [each for each in (rounded.plan, joint) if each is not None]
    least_s = min(validate(each, graph).rebuild_s for each in plans)
    assert found.plan is not None and found.plan.predicted_seconds == least_s

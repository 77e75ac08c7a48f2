"""The inner loops in C++ and their twins in Python give equal results, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.core import compiled
from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.extension import _C
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.evaluate import Evaluator
from delta_runtime.planners.greedy_drops import GreedyCover, choose
from delta_runtime.planners.presence_search import search, searching
from delta_runtime.planners.presence_slots import slots_of
from delta_runtime.planners.transfer_schedule import LaneTimes
from delta_runtime.planners.validate import validate
from tests.planners.test_validate import graphs
from tests.support.large_graphs import SHAPES, large_graph
from tests.support.recorded_steps import recorded

SHARES = (0.35, 0.5, 0.7)
masks = st.lists(st.booleans(), min_size=30, max_size=30).map(np.array)


@contextmanager
def twin() -> Iterator[None]:
    """Have the planners do without the extension."""
    loops, compiled.planners = compiled.planners, None
    try:
        yield
    finally:
        compiled.planners = loops


def budget_of(graph: StepGraph, share: float) -> int:
    """What is left where such a share of what is saved may stay."""
    return int(graph.peak_bytes - (1 - share) * graph.activation_bytes)


def some_lanes(graph: StepGraph) -> Links:
    """Lanes that carry a quarter of what is saved while the step goes on."""
    speed = 0.25 * graph.activation_bytes / graph.seconds
    return Links(speed, speed)


def evaluators(graph: StepGraph, links: Links | None) -> list[Evaluator]:
    """One in C++, and its twin."""
    cover = GreedyCover(graph, 0, recipes_of(graph))
    lanes = LaneTimes(cover, links) if links else None
    fast = Evaluator(cover, lanes)
    with twin():
        return [fast, Evaluator(cover, lanes)]


def assert_alike(graph: StepGraph, links: Links | None, *choice: np.ndarray) -> None:
    """Play a choice with both."""
    fast, slow = evaluators(graph, links)
    cover = GreedyCover(graph, 0, recipes_of(graph))
    n = len(graph.saved)
    drops = choice[0][:n] & cover.droppable
    twice = choice[1][:n] & drops
    swaps = choice[2][:n] & ~drops if links else None
    a, b = fast.evaluate(drops, twice, swaps), slow.evaluate(drops, twice, swaps)
    assert a.seconds == b.seconds and a.area == b.area
    assert np.array_equal(a.excess, b.excess) and np.array_equal(a.back, b.back)
    assert fast.work == slow.work


def test_columns_that_do_not_fit_each_other_are_refused():
    columns = {name: np.empty(0) for name in ("seconds", "workspace", "bytes")}
    whole = {
        "row": [],
        "make_offsets": [0],
        "makes": [],
        "read_offsets": [0],
        "reads": [],
        "ops": [],
    }
    for offsets in ([], [1], [0, 1]):
        ints = {name: np.array(each, np.int64) for name, each in whole.items()}
        ints["op_offsets"] = np.array(offsets, np.int64)
        reruns = _C.planners.RerunColumns(**columns, **ints, takes_off=True)
        none, some = np.empty(0), np.empty(0, np.int64)
        with pytest.raises(ValueError):
            _C.planners.Evaluation(
                bytes=none,
                begin=some,
                own_need=some,
                parent_offsets=np.zeros(1, np.int64),
                parents=some,
                base=none,
                spare=none,
                made_at=some,
                gone=some,
                use_op=some,
                use_row=some,
                reruns=reruns,
                lanes=[],
                by_begin=some,
            )


def test_the_extension_is_what_is_used():
    assert compiled.planners is _C.planners
    graph = recorded("gpt")
    fast, slow = evaluators(graph, None)
    assert fast._compiled is not None and slow._compiled is None


@settings(max_examples=300, deadline=None)
@given(graphs(), masks, masks, masks, st.sampled_from([None, 1e2, 1e3, 1e5]))
def test_choices_are_played_alike(graph, dropped, dropped_twice, swapped, speed):
    if len(graph.saved):
        links = Links(speed, speed) if speed else None
        assert_alike(graph, links, dropped, dropped_twice, swapped)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_choices_of_large_graphs_are_played_alike(shape, share):
    graph = large_graph(shape, 1000)
    rng = np.random.default_rng(0)
    choice = rng.random((3, len(graph.saved))) < share
    assert_alike(graph, None, *choice)
    assert_alike(graph, some_lanes(graph), *choice)


def chosen(graph: StepGraph, share: float) -> tuple[list[int], int]:
    """What the greedy choice drops, and the work that it was."""
    cover = GreedyCover(graph, budget_of(graph, share), recipes_of(graph))
    choose(cover)
    return np.flatnonzero(cover.dropped).tolist(), cover.work


@settings(max_examples=200, deadline=None)
@given(graphs(), st.floats(0, 1))
def test_the_greedy_choice_is_alike(graph, share):
    if len(graph.saved):
        fast = chosen(graph, share)
        with twin():
            assert fast == chosen(graph, share)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", SHARES)
def test_the_greedy_choice_of_large_graphs_is_alike(shape, share):
    """Long enough for whole blocks of ops that are all above the budget, or all below."""
    graph = large_graph(shape, 600)
    fast = chosen(graph, share)
    assert fast[0]
    with twin():
        assert fast == chosen(graph, share)


@pytest.mark.parametrize("lanes", [False, True], ids=["drops", "drops and swaps"])
@pytest.mark.parametrize("shape", SHAPES)
def test_plans_are_alike_and_valid(shape, lanes):
    graph = large_graph(shape, 150)
    links = some_lanes(graph) if lanes else None
    budget_bytes = budget_of(graph, 0.5)
    plan = joint_heuristic.plan(graph, budget_bytes, effort=4.0, links=links)
    with twin():
        again = joint_heuristic.plan(graph, budget_bytes, effort=4.0, links=links)
    assert plan.to_json() == again.to_json()
    verdict = validate(plan, graph, links)
    assert verdict.peak_bytes <= plan.predicted_peak_bytes <= budget_bytes
    assert verdict.rebuild_s <= plan.predicted_seconds + 1e-9


def searched(graph: StepGraph, share: float, work: int) -> str | None:
    """What the search for presence makes of the plan that keeps everything."""
    plan = search(graph, budget_of(graph, share), Plan.moving_nothing(graph), most_work=work)
    return plan.to_json() if plan else None


@settings(max_examples=25, deadline=None)
@given(graphs(), st.floats(0, 1))
def test_presence_is_searched_alike(graph, share):
    if len(graph.saved):
        fast = searched(graph, share, 60_000)
        with twin():
            assert fast == searched(graph, share, 60_000)


@pytest.mark.parametrize("shape", SHAPES)
def test_presence_is_searched_alike_in_large_graphs(shape):
    graph = large_graph(shape, 60)
    fast = searched(graph, 0.35, 300_000)
    assert fast is not None
    with twin():
        assert fast == searched(graph, 0.35, 300_000)


def test_presence_that_does_not_fit_its_slots_is_refused():
    graph = recorded("gpt")
    slots = slots_of(graph, graph.peak_bytes)
    assert slots is not None
    with pytest.raises(ValueError, match="fit"):
        searching(slots, np.ones(int(slots.offsets[-1]) - 1, bool))


def test_columns_that_do_not_fit_are_refused():
    fast, _ = evaluators(recorded("gpt"), None)
    n = len(fast.bytes)
    with pytest.raises(ValueError, match="fit"):
        fast._compiled.play(np.zeros(n - 1, bool), np.zeros(n, bool), None)

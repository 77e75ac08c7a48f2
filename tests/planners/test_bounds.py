"""The lower bound and the least budget of made-up steps; scripts/check_least_budgets.py tries them on real models."""

from __future__ import annotations

import dataclasses

import numpy as np

from delta_runtime.core.events import Exit
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.bounds import bounds_of, not_made_again
from delta_runtime.planners.greedy_drops import GreedyCover
from tests.support.step_graphs import chain

MIB = 1024**2
GRAPH = chain([8 * MIB] * 12, [1e-2] * 12)


def with_a_workspace(graph: StepGraph, *values: int) -> StepGraph:
    """The same step, where these values cannot be made again."""
    repeats = graph.value_repeats.copy()
    repeats[list(values)] = False
    return dataclasses.replace(graph, value_repeats=repeats)


def test_the_bounds_lie_below_the_ordinary_peak():
    bounds = bounds_of(GRAPH)
    assert 0 < bounds.lower_bytes <= bounds.least_bytes < GRAPH.peak_bytes


def test_what_cannot_be_made_again_is_no_candidate():
    graph = with_a_workspace(GRAPH, 3, 5)
    droppable = GreedyCover(graph, 0, recipes_of(graph)).droppable
    assert not droppable[[3, 5]].any() and droppable[[2, 4]].all()


def test_what_is_made_from_an_unsaved_value_that_does_not_repeat_is_no_candidate():
    saved = np.delete(np.arange(12), 3)  # the value 3 is only made on the way to 4
    graph = dataclasses.replace(
        GRAPH,
        saved=saved,
        saved_at=GRAPH.saved_at[saved],
        alone_at=GRAPH.alone_at[saved],
        released_at=GRAPH.released_at[saved],
        use_offsets=np.arange(12, dtype=np.int64),
        uses=GRAPH.uses[saved],
    )
    assert recipes_of(graph).possible.all()
    possible = recipes_of(with_a_workspace(graph, 3)).possible
    assert saved[~possible].tolist() == [4]


def test_the_least_budget_holds_what_cannot_be_made_again():
    workspaces = with_a_workspace(GRAPH, 2, 4, 6, 8)
    assert bounds_of(workspaces).lower_bytes == bounds_of(GRAPH).lower_bytes  # another way may do
    more_bytes = bounds_of(workspaces).least_bytes - bounds_of(GRAPH).least_bytes
    assert more_bytes >= 8 * MIB
    assert bounds_of(workspaces, drops=False) == bounds_of(GRAPH, drops=False)


def test_the_least_budget_is_never_above_the_ordinary_peak():
    # To make the last one again takes as much as the step: keeping everything does too.
    graph = with_a_workspace(chain([8 * MIB] * 3, [1e-2] * 3), 0, 1)
    large = dataclasses.replace(graph, op_watermark_bytes=graph.op_watermark_bytes * 3)
    assert bounds_of(large).least_bytes <= large.peak_bytes


def test_what_a_budget_has_no_room_to_make_again():
    watermark = GRAPH.op_watermark_bytes.copy()
    watermark[5] += 64 * MIB
    graph = dataclasses.replace(GRAPH, op_watermark_bytes=watermark)

    def lost_at(budget_bytes: int) -> list[int]:
        cover = GreedyCover(graph, budget_bytes, recipes_of(graph))
        return graph.saved[not_made_again(cover)].tolist()

    assert lost_at(80 * MIB) == []
    assert lost_at(80 * MIB - 1) == lost_at(16 * MIB) == [5, 6, 7, 8, 9]  # 10, 11: never away
    assert lost_at(16 * MIB - 1) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_what_there_is_no_room_to_make_again_is_swapped_where_that_fits():
    watermark, ordinary = GRAPH.op_watermark_bytes.copy(), GRAPH.op_ordinary_bytes.copy()
    watermark[5] += 16 * MIB
    ordinary[14:20] += 8 * MIB  # of backward: something else is live beside it
    graph = dataclasses.replace(GRAPH, op_watermark_bytes=watermark, op_ordinary_bytes=ordinary)
    budget_bytes = bounds_of(graph, drops=False).least_bytes
    assert budget_bytes < bounds_of(graph).least_bytes
    plan = joint_heuristic.plan(graph, budget_bytes, links=Links(8e6, 8e6))
    assert plan.predicted_peak_bytes > budget_bytes  # for lanes as slow as that
    swapped = [any(each.exit == Exit.SWAP for each in spans) for spans in plan.intervals()]
    assert all(swapped[5:10]) and not any(swapped[:5])

"""Presence: what is there at which op, told as a plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Interval
from delta_runtime.core.recipes import recipes_of
from delta_runtime.planners.presence import Presence, asked_ops, gone_ops, weights_of
from delta_runtime.planners.validate import validate
from tests.planners.random_plans import blocks, graphs, random_presence
from tests.support.step_graphs import TINY, asked_for_again

CHAIN = TINY["chain"]  # value v is made at op v, and asked for behind op 14 - v
TWICE = asked_for_again(CHAIN, 1, 9)
EVERYTHING = np.ones((CHAIN.n_ops, 8), bool)
NOTHING = np.zeros((CHAIN.n_ops, 8), bool)


def test_what_may_be_away_is_away_where_nobody_says_that_it_is_there():
    of_values = Presence(CHAIN).plan(NOTHING).intervals()
    assert of_values[1] == [Interval(1, 3, Exit.DROP), Interval(13, CHAIN.ticks, Exit.STAYS)]
    assert Presence(TWICE).plan(NOTHING).intervals()[1] == [
        Interval(1, 3, Exit.DROP),
        Interval(9, 11, Exit.DROP),  # the node that asked holds it until another one asks
        Interval(13, CHAIN.ticks, Exit.STAYS),
    ]


def test_all_that_is_there_is_the_ordinary_step():
    plan = Presence(CHAIN).plan(EVERYTHING)
    verdict = validate(plan, CHAIN)
    assert (verdict.peak_bytes, verdict.rebuild_s) == (CHAIN.peak_bytes, 0)
    assert (plan.first_exits() == Exit.STAYS).all()


def test_a_value_may_come_back_early_and_go_between():
    there = NOTHING.copy()
    there[6:8, 1] = there[11:, 1] = True
    assert Presence(CHAIN).plan(there).intervals()[1] == [
        Interval(1, 3, Exit.DROP),
        Interval(6, 8, Exit.DROP),
        Interval(11, CHAIN.ticks, Exit.STAYS),
    ]


def test_what_cannot_be_made_again_stays():
    graph = TINY["what does not repeat"]
    plan = Presence(graph).plan(np.zeros((graph.n_ops, 4), bool))
    assert plan.intervals()[1] == [Interval(1, graph.ticks, Exit.STAYS)]


def test_what_is_asked_for_is_not_changed():
    there = NOTHING.copy()
    Presence(CHAIN).plan(there)
    assert not there.any()


@settings(max_examples=200, deadline=None)
@given(st.one_of(graphs(), blocks()), st.integers(0, 2**32 - 1))
def test_the_judge_takes_every_plan(graph, seed):
    rng = np.random.default_rng(seed)
    presence = Presence(graph)
    shape = (graph.n_ops, len(graph.saved))
    for there in (rng.random(shape) < 0.4, random_presence(presence, rng)):
        verdict = validate(presence.plan(there), graph)
        assert verdict.stall_s == 0
    everything = validate(presence.plan(np.ones(shape, bool)), graph)
    assert (everything.rebuild_s, everything.peak_bytes) == (0, graph.peak_bytes)


@settings(max_examples=100, deadline=None)
@given(st.one_of(graphs(), blocks()))
def test_asked_and_gone_are_ops_of_their_ticks(graph):
    ticks = graph.op_tick.tolist()
    for row, asked in enumerate(asked_ops(graph)):
        uses = graph.uses[graph.use_offsets[row] : graph.use_offsets[row + 1]].tolist()
        assert asked == {sum(tick <= use for tick in ticks) - 1 for use in uses}
        held = [op for op, tick in enumerate(ticks) if tick <= graph.released_at[row]]
        assert gone_ops(graph)[row] == len(held)


def test_a_byte_of_what_is_dear_to_rebuild_weighs_more():
    weights = weights_of(TINY["residual"], recipes_of(TINY["residual"]))
    assert weights[2] == np.inf, "it is not saved"
    assert weights[0] == pytest.approx(1e-2 / (8 << 20))
    assert weights[1] == pytest.approx(1e-2 / (16 << 20))

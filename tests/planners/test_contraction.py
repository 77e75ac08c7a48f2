"""Contraction: the contracted graph never makes a plan look better than it is, and plans find their way back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.planners.contraction import (
    Contraction,
    by_size,
    contract,
    cuts_of,
    movable_rows,
)
from delta_runtime.planners.presence import Presence, asked_ops, gone_ops, needed_ops
from delta_runtime.planners.validate import validate
from tests.planners.random_plans import (
    blocks,
    graphs,
    random_presence,
    with_backward_workspaces,
    with_other_asks,
    with_what_is_read,
)
from tests.support.recorded_steps import WORKLOADS, recorded
from tests.support.step_graphs import TINY, Op, step_graph

seeds = st.integers(0, 2**32 - 1)


def contracted(graph: StepGraph, *groups: list[int]) -> Contraction:
    return contract(graph, [np.array(each) for each in groups], recipes_of(graph))


def contractions(graph: StepGraph, rng: np.random.Generator) -> list[Contraction]:
    recipes = recipes_of(graph)
    rows = movable_rows(graph, recipes)
    cuts = np.flatnonzero(rng.random(max(len(rows) - 1, 0)) < 0.5) + 1
    return [
        by_size(graph, int(rng.integers(1, 20))),
        contract(graph, np.split(rows, cuts), recipes),
    ]


def assert_never_better_than_the_whole(found: Contraction, rng: np.random.Generator) -> None:
    presence = Presence(found.graph)
    found.graph._check()
    for _ in range(3):
        there = random_presence(presence, rng)
        validate(found.expand(presence.plan(there)), found.whole)  # in passing too it can be done
        plan = presence.plan(with_what_is_read(there, presence))
        says, does = validate(plan, found.graph), validate(found.expand(plan), found.whole)
        assert does.peak_bytes <= says.peak_bytes
        assert does.rebuild_s <= says.rebuild_s + 1e-9


@settings(max_examples=250, deadline=None)
@given(st.one_of(graphs(), blocks()), seeds)
def test_no_plan_is_better_on_the_contracted_graph(graph, seed):
    rng = np.random.default_rng(seed)
    graph = with_other_asks(with_backward_workspaces(graph, rng), rng)
    for found in contractions(graph, rng):
        assert_never_better_than_the_whole(found, rng)


@pytest.mark.parametrize("graph", TINY.values(), ids=TINY)
def test_nor_of_a_tiny_graph(graph):
    rng = np.random.default_rng(0)
    for _ in range(10):
        for found in contractions(graph, rng):
            assert_never_better_than_the_whole(found, rng)


@pytest.mark.parametrize("name", WORKLOADS)
def test_nor_of_a_real_step(name):
    found = by_size(recorded(name))
    presence = Presence(found.graph)
    there = random_presence(presence, np.random.default_rng(0))
    plan = presence.plan(with_what_is_read(there, presence))
    says, does = validate(plan, found.graph), validate(found.expand(plan), found.whole)
    assert 0.85 * says.peak_bytes <= does.peak_bytes <= says.peak_bytes
    assert 0.7 * says.rebuild_s <= does.rebuild_s <= says.rebuild_s + 1e-9


# ---------------------------------------------------------------- the rules of the Note

CHAIN = step_graph(
    [Op((), (8,), (0,))] + [Op((i - 1,), (8,), (i,), seconds=0.01 * i) for i in range(1, 6)]
)
"""Six values of 8 bytes, made at ops 0 to 5; value v is asked for behind op 10 - v."""


@settings(max_examples=100, deadline=None)
@given(st.one_of(graphs(), blocks()), seeds)
def test_rule_1_an_op_holds_what_the_worst_of_its_ops_holds(graph, seed):
    rng = np.random.default_rng(seed)
    live = graph.op_ordinary_bytes + graph.op_watermark_bytes
    for found in contractions(graph, rng):
        few = found.graph
        worst = np.maximum.reduceat(live, found.op_begin[:-1])
        held = few.op_ordinary_bytes + few.op_watermark_bytes
        assert (held >= worst).all()
        assert few.op_seconds.sum() == pytest.approx(graph.op_seconds.sum())


def test_rule_2_a_member_counts_until_its_group_goes():
    found = contracted(CHAIN, [1], [2, 5])  # value 5 goes first; the last op begins behind that
    whole = CHAIN.op_ordinary_bytes + CHAIN.op_watermark_bytes
    few = found.graph.op_ordinary_bytes + found.graph.op_watermark_bytes
    begin = int(found.op_begin[-2])
    assert gone_ops(CHAIN)[5] < begin < gone_ops(CHAIN)[2]
    assert few[-1] == whole[begin:].max() + 8


def test_rule_3_a_group_leaves_when_all_may_and_is_there_when_any_is_asked_for():
    found = contracted(CHAIN, [1, 2])
    few = found.graph
    last = int(Presence(CHAIN).leaves[2])
    assert found.op_begin[int(few.alone_at[0])] >= last > Presence(CHAIN).leaves[1]
    read = {int(np.searchsorted(found.op_begin, op, side="right")) - 1 for op in (8, 9, 10)}
    assert set(few.uses.tolist()) == read
    gone = found.op_begin[int(gone_ops(few)[0])]
    assert gone >= gone_ops(CHAIN)[1]


def test_rule_4_an_op_that_two_members_need_runs_for_each():
    both = step_graph([Op((), (8,), (0,)), Op((0,), (8,), ()), Op((1,), (8, 8), (2, 3))])
    few = contracted(both, [1, 2]).graph
    assert np.nansum(few.op_replay_seconds) == pytest.approx(2 * (1e-2 + 1e-2))


def test_rule_5_a_rebuild_comes_on_top_of_the_most_that_is_live_when_the_op_asks():
    """Value 1 is rebuilt through 60 bytes; a later op of the same contracted one holds 80 for a moment."""
    graph = step_graph(
        [
            Op((), (8,), (0,)),
            Op((0,), (60,), ()),
            Op((1,), (8,), (2,)),
            *(Op((2,), (8,), (3 + i,)) for i in range(4)),
        ]
    )
    workspace = np.where(np.arange(graph.n_ops) == 9, 80, 0)
    graph = replace(graph, op_watermark_bytes=graph.op_watermark_bytes + workspace)
    found = contracted(graph, [1])
    presence = Presence(found.graph)
    plan = presence.plan(np.zeros((found.graph.n_ops, 1), bool))
    says, does = validate(plan, found.graph), validate(found.expand(plan), graph)
    assert says.rebuild_s > 0
    assert does.peak_bytes <= says.peak_bytes
    # What a rebuild holds is told apart from what the op holds when it runs first.
    assert found.graph.n_values == 2 and found.graph.value_bytes.tolist() == [8, 60]


def test_rule_5_one_rerun_makes_several_groups():
    """Value 3 is rebuilt from value 2 and through 60 bytes, which are there while value 2 is made with a workspace."""
    graph = step_graph(
        [
            Op((), (8,), (0,)),
            Op((0,), (60,), ()),
            Op((0,), (8,), (2,), workspace_bytes=20),
            Op((1, 2), (8,), (3,)),
            *(Op((3,), (8,), (4 + i,)) for i in range(4)),
        ]
    )
    found = contracted(graph, [1], [2])
    assert found.graph.value_bytes.tolist() == [8, 60 + 20, 8, 60]
    presence = Presence(found.graph)
    plan = presence.plan(with_what_is_read(np.zeros((found.graph.n_ops, 2), bool), presence))
    says, does = validate(plan, found.graph), validate(found.expand(plan), graph)
    assert says.rebuild_s > 0
    assert does.peak_bytes <= says.peak_bytes


def test_rule_5_what_is_there_is_made_again():
    """An op makes 2 values of a group: the large one is made a second time for the small one."""
    graph = step_graph([Op((), (8,), (0,)), Op((0,), (60, 8), (1, 2)), Op((1,), (8,), (3,))])
    found = contracted(graph, [1, 2])
    assert found.graph.value_bytes.tolist() == [68, 60]


def test_rule_6_what_goes_before_it_is_read_is_made_again():
    """Value 1 goes behind the first op of backward; value 2 is rebuilt from it behind the third."""
    graph = step_graph(
        [
            Op((), (8,), (0,), seconds=0.01),
            Op((0,), (8,), (), seconds=0.02),
            Op((1,), (8,), (2,), seconds=0.04),
            Op((2,), (8,), (3,), seconds=0.08),
            Op((3,), (8,), (4,), seconds=0.16),
            Op((4, 1), (8,), (1,), seconds=0.32),
        ]
    )
    recipes = recipes_of(graph)
    rows = {value: row for row, value in enumerate(graph.saved.tolist())}
    assert gone_ops(graph)[rows[1]] < min(asked_ops(graph)[rows[2]])
    found = contract(graph, [np.array([rows[1]]), np.array([rows[2]])], recipes)
    presence = Presence(found.graph)
    for kept in (True, False):
        there = np.zeros((found.graph.n_ops, 2), bool)
        there[:, 0] = kept
        plan = presence.plan(there)
        says, does = validate(plan, found.graph), validate(found.expand(plan), graph)
        assert does.rebuild_s == pytest.approx(0.02 + 0.04)
        assert says.rebuild_s == pytest.approx(does.rebuild_s)


# ---------------------------------------------------------------- groups, and the way back


def test_what_comes_back_in_one_op_comes_together_and_what_is_gone_does_not():
    found = contracted(CHAIN, [1, 2], [3])
    presence = Presence(found.graph)
    plan = found.expand(presence.plan(np.zeros((found.graph.n_ops, 2), bool)))
    of_values = plan.intervals()
    assert of_values[1][1].begin == of_values[2][1].begin == 8
    assert [each.exit for each in of_values[0]] == [Exit.STAYS]
    never_asked = step_graph(
        [
            Op((), (8,), (0,)),
            Op((0,), (8,), (1,)),
            Op((1,), (8,), (2,), asked=False),
            *(Op((i,), (8,), (i + 1,)) for i in range(2, 6)),
        ]
    )
    late = contracted(never_asked, [1, 2])
    there = np.zeros((late.graph.n_ops, 1), bool)
    of_values = late.expand(Presence(late.graph).plan(there)).intervals()
    assert (len(of_values[1]), len(of_values[2])) == (2, 1)


def test_a_member_does_not_leave_before_what_is_rebuilt_from_it():
    """Value 3 comes back in forward, while value 2, of the group that it is made from, is still read."""
    graph = step_graph(
        [
            Op((), (8,), (0,)),
            Op((0,), (8, 8), (1, 2)),
            Op((1,), (8,), (3,)),
            *(Op((i,), (8,), (i + 1,)) for i in range(3, 6)),
            Op((6, 2), (8,), (7,)),
            Op((7,), (8,), (8,)),
        ]
    )
    found = contracted(graph, [1, 2], [3], [4], [5], [6])
    presence = Presence(found.graph)
    there = np.ones((found.graph.n_ops, 5), bool)
    there[presence.leaves[1] : presence.leaves[0] - 1, 1] = False
    there[presence.leaves[0] :, 0] = False
    plan = presence.plan(there)
    assert len(plan.intervals()[int(found.graph.saved[1])]) == 2
    does = validate(found.expand(plan), graph)
    assert does.rebuild_s == pytest.approx(validate(plan, found.graph).rebuild_s)


@settings(max_examples=100, deadline=None)
@given(st.one_of(graphs(), blocks()), seeds)
def test_who_asked_for_a_value_has_it_while_it_reads(graph, seed):
    """The node that asked holds it; behind the last time others may, until the program lets go."""
    rng = np.random.default_rng(seed)
    longer = rng.integers(0, 4, len(graph.saved))  # some ops of backward are several of the record
    graph = replace(graph, released_at=graph.released_at + longer)
    gone = gone_ops(graph).tolist()
    for found in contractions(graph, rng):
        presence = Presence(found.graph)
        there = presence.plan(np.zeros((found.graph.n_ops, len(found.groups)), bool))
        of_values = found.expand(there).intervals()
        for row, needed in enumerate(needed_ops(graph, asked_ops(graph))):
            for op in {*needed, *range(max(needed, default=gone[row]), gone[row])}:
                intervals = of_values[int(graph.saved[row])]
                assert any(each.begin <= graph.op_tick[op] < each.end for each in intervals)


def test_groups_that_interleave_are_refused():
    with pytest.raises(ValueError, match="complete only after"):
        contracted(CHAIN, [1, 3], [2])


def test_two_groups_of_one_op():
    graph = step_graph([Op((), (8,), (0,)), Op((0,), (8, 8, 8), (1, 2, 3)), Op((1,), (8,), (4,))])
    rng = np.random.default_rng(0)
    for _ in range(10):
        assert_never_better_than_the_whole(contracted(graph, [1], [2, 3]), rng)
    made = [set(graph.value_op[graph.saved[rows]].tolist()) for rows in by_size(graph, 30).groups]
    assert sum(1 in ops for ops in made) == 1, "by size they go together"


def test_what_is_in_no_group_stays():
    found = contracted(CHAIN)
    assert (found.graph.n_values, found.graph.n_ops) == (0, 2)
    plan = found.expand(Plan.moving_nothing(found.graph))
    assert (plan.first_exits() == Exit.STAYS).all()
    assert validate(plan, CHAIN).peak_bytes == CHAIN.peak_bytes


def test_merged_ops_are_all_ops_in_order():
    found = contracted(CHAIN, [1, 2], [3])
    merged = found.merged()
    assert [each.first for each in merged] == found.op_begin[:-1].tolist()
    assert [each.last + 1 for each in merged] == found.op_begin[1:].tolist()
    assert sum(each.seconds for each in merged) == pytest.approx(CHAIN.seconds)
    assert [(each.saved, each.saved_bytes) for each in merged if each.saved] == [(2, 16), (1, 8)]
    assert [each.backward for each in merged] == sorted(each.backward for each in merged)


@settings(max_examples=100, deadline=None)
@given(st.one_of(graphs(), blocks()))
def test_cuts_are_where_all_that_follows_starts_from_one_value(graph):
    recipes = recipes_of(graph)
    rows = movable_rows(graph, recipes)
    read = [set(recipes.parents[row].tolist()) for row in rows.tolist()]
    cuts = []
    for at in range(len(rows) - 1):
        before, later = set(rows[:at].tolist()), read[at + 1 :]
        if any(int(rows[at]) in each for each in later) and not any(
            before & each for each in later
        ):
            cuts.append(at)
    assert cuts_of(rows, recipes) == cuts


def test_a_diamond_has_no_cut_inside():
    graph = TINY["diamond"]
    rows = movable_rows(graph, recipes_of(graph))
    cuts = cuts_of(rows, recipes_of(graph))
    assert {int(graph.saved[rows[at]]) for at in cuts} == {0}


@settings(max_examples=100, deadline=None)
@given(st.one_of(graphs(), blocks()), st.integers(1, 20))
def test_by_size_keeps_to_most_ops(graph, most_ops):
    found = by_size(graph, most_ops)
    assert found.graph.n_ops <= most_ops or len(found.groups) <= 1
    assert found.graph.n_ops <= max(most_ops, 5)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("most_ops", [9, 41, 120])
def test_of_real_steps_it_uses_them(name, most_ops):
    found = by_size(recorded(name), most_ops)
    assert 0.8 * most_ops <= found.graph.n_ops <= most_ops
    members = np.concatenate(found.groups)
    assert len(set(members.tolist())) == len(members)
    assert found.whole.saved_bytes[members].sum() > 0.5 * found.whole.activation_bytes


def test_a_step_without_anything_to_move():
    for ops in (
        [Op((), (8,), ())],
        [Op((), (8,), (0,), repeats=False)],
        [Op((), (8,), (0,), asked=False)],
    ):
        found = by_size(step_graph(ops))
        assert not found.groups
        validate(found.expand(Plan.moving_nothing(found.graph)), found.whole)

"""A step on the virtual device: it takes what the judge of plans says, and keeps the budget."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import delta_runtime.extension  # noqa: F401  the simulator is in C++
from delta_runtime.core import compiled
from delta_runtime.core.errors import UsageError
from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Interval, Plan
from delta_runtime.core.transfer import Links
from delta_runtime.online.policies import get_policy
from delta_runtime.planners import joint, rotor
from delta_runtime.planners.contraction import by_size
from delta_runtime.planners.presence import Presence
from delta_runtime.planners.validate import validate
from delta_runtime.simulate.virtual_step import VirtualStep
from tests.planners.random_plans import (
    blocks,
    graphs,
    random_presence,
    with_backward_workspaces,
    with_other_asks,
    with_what_is_read,
)
from tests.support.recorded_steps import recorded
from tests.support.step_graphs import TINY, Op, chain, step_graph

MIB = 1024**2
FAST, SLOW = Links(1e12, 1e12), Links(200 * MIB, 200 * MIB)


def budget_of(graph, share):
    return int(graph.peak_bytes - (1 - share) * graph.activation_bytes)


@pytest.mark.parametrize("share", [0.7, 0.5, 0.35])
@pytest.mark.parametrize("name", ["resnet50", "gpt", "vit"])
def test_recorded_steps_rebuild_what_the_judge_says_and_keep_the_budget(name, share):
    graph = recorded(name)
    budget_bytes = budget_of(graph, share)
    plan = joint.plan(graph, budget_bytes).plan
    verdict = validate(plan, graph)
    step = VirtualStep(graph, plan, budget_bytes).run()
    assert step.rebuild_s == pytest.approx(verdict.rebuild_s, rel=1e-9)
    assert step.seconds == pytest.approx(graph.seconds + verdict.rebuild_s, rel=1e-9)
    assert step.peak_bytes <= budget_bytes
    assert step.drops > 0 and step.rebuilds == step.drops
    assert (step.stall_s, step.swap_outs, step.shortfall_bytes) == (0.0, 0, 0)


@pytest.mark.parametrize("name", ["resnet50", "gpt", "vit"])
def test_recorded_steps_swap_within_the_budget(name):
    graph = recorded(name)
    budget_bytes = budget_of(graph, 0.5)
    plan = joint.plan(graph, budget_bytes, Links(3e9, 3e9)).plan
    virtual = VirtualStep(graph, plan, budget_bytes, links=Links(3e9, 3e9))
    for _ in range(2):
        step = virtual.run()
        assert step.swap_outs > 0 and step.swap_ins == step.swap_outs
        assert step.peak_bytes <= budget_bytes
        assert step.seconds == pytest.approx(graph.seconds, rel=0.02)


@given(st.one_of(graphs(), blocks()), st.integers(0, 2**32 - 1))
@settings(max_examples=300)
def test_written_plans_take_the_seconds_that_the_judge_says(graph, seed):
    rng = np.random.default_rng(seed)
    graph = with_backward_workspaces(graph, rng)
    presence = Presence(graph)
    plan = presence.plan(with_what_is_read(random_presence(presence, rng), presence))
    step = VirtualStep(graph, plan, 0).run()
    judged_s = validate(plan, graph).rebuild_s
    assert step.rebuild_s <= judged_s + 1e-9
    makers = graph.value_op[graph.saved].tolist()
    if len(makers) == len(
        set(makers)
    ):  # else the runtime keeps two outputs of one op, where the judge makes each
        assert step.rebuild_s == pytest.approx(judged_s, abs=1e-9)
    assert step.seconds == pytest.approx(graph.seconds + step.rebuild_s, abs=1e-9)


@pytest.mark.parametrize("way", [Exit.DROP, Exit.SWAP])
def test_what_was_away_and_let_go_of_is_made_again_for_a_rebuild_behind_the_same_op(way):
    """Value 1 is rebuilt from value 0, which is let go of right before value 1 is asked for."""
    ops = [Op((), (1,), (0,), asked=False), Op((0,), (1,), (1,)), *[Op((), (1,), ())] * 4]
    graph = step_graph(ops)
    assert graph.released_at[0] == graph.uses[0] == 5
    presence = Presence(graph)
    there = np.zeros((graph.n_ops, 2), bool)
    there[5] = True
    plan = presence.plan(there)
    assert [each.exit for each in plan.intervals()[0]] == [Exit.DROP, Exit.STAYS]
    both_s = graph.rerun_seconds[:2].sum()
    assert validate(plan, graph).rebuild_s == pytest.approx(both_s)
    plan.exits[0], plan.copy_back_at[0] = way, 4 if way == Exit.SWAP else -1
    assert VirtualStep(graph, plan, 0, links=Links(1e12, 1.0)).run().rebuild_s == pytest.approx(
        both_s
    )


@given(st.one_of(graphs(), blocks()), st.floats(0.2, 1.0))
@settings(max_examples=200)
def test_without_a_plan_it_drops_until_the_budget_is_kept_or_says_that_it_is_not(graph, share):
    graph = large(graph)
    budget_bytes = int(share * graph.peak_bytes)
    step = VirtualStep(graph, None, budget_bytes).run()
    over = step.peak_bytes > budget_bytes
    assert not over or step.shortfall_bytes > 0
    assert step.peak_bytes <= graph.peak_bytes + step.shortfall_bytes
    assert step.seconds == pytest.approx(graph.seconds + step.rebuild_s, abs=1e-9)


def large(graph):
    """The same step with megabytes for bytes: the allocator's slack is nothing beside them."""
    return replace(
        graph,
        value_bytes=graph.value_bytes * MIB,
        op_watermark_bytes=graph.op_watermark_bytes * MIB,
        op_ordinary_bytes=graph.op_ordinary_bytes * MIB,
    )


@given(
    st.one_of(graphs(), blocks()),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["auto", "swap", "delta", "capuchin"]),
    st.floats(0.0, 0.9),
    st.floats(0.05, 0.5),
    st.sampled_from([10, 100, 1000, 10**6]),
)
@settings(max_examples=300)
def test_lanes_short_budgets_and_little_host_memory_keep_the_account(
    graph, seed, policy, share, host_share, mib_per_s
):
    rng = np.random.default_rng(seed)
    graph = large(with_other_asks(with_backward_workspaces(graph, rng), rng))
    graph = replace(graph, op_seconds=graph.op_seconds * 10.0 ** rng.integers(-4, 2, graph.n_ops))
    budget_bytes = max(1, int(share * graph.peak_bytes))
    host_bytes = max(1, int(host_share * graph.activation_bytes))
    virtual = VirtualStep(
        graph,
        None,
        budget_bytes,
        policy=get_policy(policy),
        links=Links(mib_per_s * MIB, mib_per_s * MIB),
        host_bytes=host_bytes,
    )
    for _ in range(3):
        step = virtual.run()
        took_s = graph.seconds + step.rebuild_s + step.stall_s
        assert step.seconds == pytest.approx(took_s, rel=1e-6, abs=1e-9)
        assert step.peak_bytes <= budget_bytes or step.shortfall_bytes > 0
        for column in ("bytes", "dropped_bytes", "swapped_bytes"):
            assert (step.log[column] >= 0).all()
        assert (step.log["swapped_bytes"] <= host_bytes).all()


def test_host_memory_that_is_short_holds_no_copy_that_a_walk_waits_for():
    ops = [Op((i - 1,) if i else (), (MIB,), tuple(range(max(0, i - 3), i + 1))) for i in range(6)]
    links = Links(100 * MIB, 100 * MIB)
    step = VirtualStep(step_graph(ops), None, 3 * MIB, links=links, host_bytes=2 * MIB).run()
    assert step.swap_outs > 0


@pytest.mark.parametrize("policy", ["delta", "capuchin"])
def test_what_a_rerun_starts_from_comes_back_once_where_there_is_no_room_for_all_of_it(policy):
    graph = recorded("gpt")
    links = Links(3e9, 3e9)
    budget_bytes = int(0.35 * graph.peak_bytes)
    step = VirtualStep(graph, None, budget_bytes, policy=get_policy(policy), links=links).run()
    assert step.shortfall_bytes > 0 and step.peak_bytes > budget_bytes


def test_what_comes_back_and_goes_again_between_two_ops_counts():
    """Two values of 8 MiB are asked for and let go of behind one op, beside 8 MiB that are live there."""
    size = 8 * MIB
    ops = [Op((), (size,), (0,), asked=False), Op((0,), (size,), (1,), asked=False)]
    ops += [Op((), (MIB,), ())] * 4 + [Op((), (size,), ())] + [Op((), (MIB,), ())] * 2
    graph = step_graph(ops)
    graph = replace(
        graph,
        op_ordinary_bytes=np.array([0, 8, 16, 16, 16, 16, 16, 24, 8]) * MIB,
        uses=np.array([7, 7]),
        use_offsets=np.array([0, 1, 2]),
        released_at=np.array([7, 7]),
        alone_at=np.array([2, 2]),
    )
    for way in (Exit.DROP, Exit.SWAP):
        back_at = 6 if way == Exit.SWAP else -1
        intervals = [[] for _ in range(graph.n_values)]
        for value in (0, 1):
            intervals[value] = [Interval(value, 2, way, back_at), Interval(7, graph.ticks)]
        plan = Plan.of(
            intervals,
            weights=np.ones(graph.n_values),
            predicted_seconds=0.0,
            predicted_peak_bytes=0,
            as_written=True,
        )
        assert VirtualStep(graph, plan, 0, links=FAST).run().peak_bytes == 24 * MIB


@pytest.mark.parametrize("policy", ["auto", "lru"])
def test_it_goes_when_nobody_needs_it_any_more(policy):
    virtual = VirtualStep(TINY["chain"], None, 16 * MIB, policy=get_policy(policy))
    virtual.run()
    gone = weakref.ref(virtual)
    del virtual
    gc.collect()
    assert gone() is None


def test_it_does_the_same_each_time():
    graph = recorded("gpt")
    budget_bytes = budget_of(graph, 0.5)
    plan = joint.plan(graph, budget_bytes, SLOW).plan
    first, again = (VirtualStep(graph, plan, budget_bytes, links=SLOW).run() for _ in range(2))
    assert first.log.tobytes() == again.log.tobytes()
    assert len(first.log) > graph.n_ops


def test_nothing_moves_where_everything_fits():
    graph = TINY["chain"]
    step = VirtualStep(graph, Plan.moving_nothing(graph), 2 * graph.peak_bytes).run()
    assert step.seconds == pytest.approx(graph.seconds)
    assert step.peak_bytes == graph.peak_bytes
    assert step.evicted_bytes == 0


def test_a_lane_copies_one_after_the_other_at_its_speed():
    """Eight values of 8 MiB at 200 MiB/s; room for four: each op waits until one of them is out."""
    graph = chain([8 * MIB] * 8, [0.001] * 8)
    budget_bytes = graph.peak_bytes // 2
    plan = joint.plan(graph, budget_bytes, SLOW).plan
    step = VirtualStep(graph, plan, budget_bytes, links=SLOW, policy=get_policy("swap")).run()
    copies = step.log[step.log["kind"] == 2]
    seconds = copies["end_s"] - copies["begin_s"]
    assert seconds == pytest.approx(8 * MIB / SLOW.out_bytes_per_s)
    assert (copies["begin_s"][1:] >= copies["end_s"][:-1] - 1e-12).all()
    assert step.out_stall_s > 0 and step.in_stall_s > 0
    assert step.seconds == pytest.approx(graph.seconds + step.stall_s)


def test_no_more_goes_to_host_memory_than_it_holds():
    graph = chain([8 * MIB] * 8, [0.001] * 8)
    budget_bytes = graph.peak_bytes // 2
    plan = joint.plan(graph, budget_bytes, FAST).plan
    all_of_it = VirtualStep(graph, plan, budget_bytes, links=FAST).run()
    little = VirtualStep(graph, plan, budget_bytes, links=FAST, host_bytes=16 * MIB).run()
    assert all_of_it.drops == 0 and all_of_it.log["swapped_bytes"].max() > 16 * MIB
    assert little.drops > 0  # refused: dropped in its place
    assert little.log["swapped_bytes"].max() == 16 * MIB


def test_smaller_values_than_it_is_told_to_move_stay():
    graph = chain([MIB, 8 * MIB, MIB, 8 * MIB, MIB, 8 * MIB], [0.01] * 6)
    step = VirtualStep(graph, None, graph.peak_bytes // 2, min_bytes=2 * MIB).run()
    gone = step.log[step.log["kind"] == 4]
    assert len(gone) and (gone["bytes"] == 8 * MIB).all()


def test_a_contracted_step_is_refused():
    graph = by_size(recorded("gpt")).graph
    with pytest.raises(UsageError, match="contracted"):
        VirtualStep(graph, None, graph.peak_bytes)


def test_the_plan_of_another_step_is_refused():
    graph = chain([8 * MIB] * 8, [0.01] * 8)
    other = chain([8 * MIB] * 9, [0.01] * 9)
    plan = rotor.plan(other, other.peak_bytes * 3 // 4).plan
    with pytest.raises(ValueError, match="a plan has 9 weights for 8 values"):
        VirtualStep(graph, plan, graph.peak_bytes)


def test_without_the_extension_it_says_so(monkeypatch):
    monkeypatch.setattr(compiled, "simulate", None)
    with pytest.raises(UsageError, match="needs the extension"):
        VirtualStep(TINY["chain"], None, 1)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("value_op", lambda was: was + 100, "made by no op"),
        ("uses", lambda was: was + 100, "nothing that there is"),
        ("inputs", lambda was: was + 100, "nothing that there is"),
        ("op_backward", lambda was: was[:-1], "different lengths"),
        ("op_tick", lambda was: was[::-1].copy(), "not in order"),
    ],
)
def test_columns_that_do_not_fit_are_refused(column, value, text):
    graph = TINY["chain"]
    broken = replace(graph, **{column: value(getattr(graph, column))})
    with pytest.raises((ValueError, IndexError), match=text):
        VirtualStep(broken, None, 1, recipes=Presence(graph).recipes)

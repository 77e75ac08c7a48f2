"""A step as a chain: its columns, and what becomes of a schedule on the whole step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.planners import min_peak, rotor
from delta_runtime.planners.chain import Action, Chain, Kind
from delta_runtime.planners.step_chain import StepChain
from delta_runtime.planners.validate import validate
from tests.planners.random_plans import blocks, graphs
from tests.support.recorded_steps import WORKLOADS, recorded
from tests.support.step_graphs import TINY, Op, step_graph

STEP = step_graph(
    [
        Op((), (8,), (0,), seconds=0.01),
        Op((0,), (20,), (1,), seconds=0.02),
        Op((1, 0), (10,), (2,), seconds=0.04, workspace_bytes=3),
        Op((2,), (30,), (), seconds=0.08),
        Op((3,), (5,), (4,), seconds=0.16),
        Op((4,), (7,), (5,), seconds=0.32),
        *(Op((i,), (7,), (i + 1,), seconds=0.64) for i in range(5, 8)),
    ],
    persistent_bytes=100,
)
"""Values 0, 2 and 4 are each all that what follows is made from; 1 is saved within the stage of 2."""


def schedules(
    chain: StepChain, shares: tuple[float, ...]
) -> list[tuple[float, list[Action], float]]:
    """Peak, schedule and extra seconds of Rotor, from the least memory up, by its own account."""
    columns = chain.columns()
    sizes = (columns.a, columns.abar, columns.f_tmp, columns.b_tmp)
    least, most = rotor.least_memory(*sizes), 1.2 * chain.contraction.whole.peak_bytes
    found = [
        rotor.solve(columns.f, columns.b, *sizes, least + share * max(most - least, 0), slots=100)
        for share in shares
    ]
    once = sum(columns.f) + sum(columns.b)
    return [(each.peak, each.schedule, each.objective - once) for each in found if each]


def assert_no_worse_than_the_schedule(graph: StepGraph) -> None:
    chain = StepChain(graph)
    for peak, schedule, extra_s in schedules(chain, (0.05, 0.3, 0.6, 1.0)):
        verdict = validate(chain.plan_of_schedule(schedule), graph)
        assert verdict.rebuild_s <= extra_s + 1e-9
        assert verdict.peak_bytes <= max(peak, graph.peak_bytes) + 1e-6


def away(plan: Plan, graph: StepGraph, value: int) -> list[tuple[int, int]]:
    """Gaps of a value, by op."""
    intervals = plan.intervals()[value]
    return [
        (before.end, after.begin) for before, after in zip(intervals, intervals[1:], strict=False)
    ]


def test_the_columns_of_a_step_by_hand():
    chain = StepChain(STEP)
    saved = [STEP.saved[rows].tolist() for rows in chain.contraction.groups]
    outputs = [saved[stage.output] for stage in chain.stages]
    rests = [saved[stage.rest] if stage.rest >= 0 else [] for stage in chain.stages]
    assert (outputs[:3], rests[:3]) == ([[0], [2], [4]], [[], [1], []])
    columns = chain.columns()
    assert columns.a[:4] == [0, 8, 10, 5]
    assert columns.abar[:4] == [0, 8, 30, 5]
    assert columns.f[:3] == pytest.approx([0.01, 0.02 + 0.04, 0.08 + 0.16])
    assert sum(columns.f) + sum(columns.b) == pytest.approx(STEP.seconds)
    # Beside saved values there are 100 bytes, and what an op makes that nobody saves.
    assert columns.f_tmp[2] >= 100 + 30
    assert all(each >= 100 for each in columns.f_tmp[:3])


def test_a_schedule_is_what_the_intervals_say():
    """Keep x_1, skip stage 1, save what follows; then stage 1 is saved again for its backward."""
    chain = StepChain(STEP)
    n = chain.length
    again = [Action(Kind.SAVE, 1), Action(Kind.BACKWARD, 1)]
    later = [Action(Kind.SAVE, stage) for stage in range(2, n)]
    schedule = [
        Action(Kind.CHECKPOINT, 0),
        Action(Kind.CHECKPOINT, 1),
        *later,
        Action(Kind.LOSS, n),
        *(Action(Kind.BACKWARD, stage) for stage in range(n - 1, 1, -1)),
        *again,
        Action(Kind.SAVE, 0),
        Action(Kind.BACKWARD, 0),
    ]
    plan = chain.plan_of_schedule(schedule)
    assert len(away(plan, STEP, 1)) == 1, "what stage 1 saves within goes, and comes back"
    for value in (0, 2, 4, 5, 6, 7, 8):
        assert away(plan, STEP, value) == []
    assert validate(plan, STEP).rebuild_s == pytest.approx(0.02)


def test_what_is_saved_all_along_stays():
    chain = StepChain(STEP)
    n = chain.length
    everything = [Action(Kind.SAVE, stage) for stage in range(n)]
    backward = [Action(Kind.BACKWARD, stage) for stage in range(n - 1, -1, -1)]
    plan = chain.plan_of_schedule([*everything, Action(Kind.LOSS, n), *backward])
    verdict = validate(plan, STEP)
    assert (verdict.rebuild_s, verdict.peak_bytes) == (0, STEP.peak_bytes)


def test_kept_outputs_stay_and_the_segments_between_are_rebuilt_once():
    chain = StepChain(STEP)
    nothing = chain.plan_of_kept([])
    assert validate(nothing, STEP).rebuild_s == 0, "one segment: forward leaves it as it is"
    kept = chain.plan_of_kept([2])
    assert away(kept, STEP, 2) == []
    assert len(away(kept, STEP, 0)) == len(away(kept, STEP, 1)) == 1
    assert validate(kept, STEP).rebuild_s == pytest.approx(0.01 + 0.02)
    every = chain.plan_of_kept(range(1, chain.length))
    assert validate(every, STEP).rebuild_s == pytest.approx(0.02)


@settings(max_examples=80, deadline=None)
@given(blocks())
def test_of_random_blocks_no_schedule_is_worse_on_the_step(graph):
    assert_no_worse_than_the_schedule(graph)


def test_nor_on_a_real_step():
    assert_no_worse_than_the_schedule(recorded("resnet50"))


@settings(max_examples=80, deadline=None)
@given(st.one_of(graphs(), blocks()), st.integers(0, 2**32 - 1))
def test_the_judge_takes_what_is_kept(graph, seed):
    chain = StepChain(graph)
    rng = np.random.default_rng(seed)
    kept = [stage for stage in range(1, chain.length) if rng.random() < 0.5]
    validate(chain.plan_of_kept(kept), graph)


NO_CUT = step_graph(
    [Op((), (8,), (0,))]
    + [Op((0, *range(1, i)), (8,), (i,)) for i in range(1, 5)]
    + [Op((0, 4), (8,), (0, 5))]
)
ONE_STAGE = step_graph([Op((), (8,), (0,)), Op((0,), (8,), (1,)), Op((1,), (8,), (2,))])
TRAILING = replace(TINY["chain"], op_backward=np.array([False] * 8 + [True] * 6 + [False] * 2))
TWICE = replace(  # backward, more of forward, backward
    TINY["chain"], op_backward=np.array([False] * 8 + [True] * 2 + [False] * 2 + [True] * 4)
)
UNUSUAL = {
    "no cut": NO_CUT,
    "few stages": ONE_STAGE,
    "forward at the end": TRAILING,
    "two backward passes": TWICE,
    "nothing saved": step_graph([Op((), (8,), ()), Op((0,), (8,), ())]),
    "no backward": step_graph([Op((), (8,), (0,), asked=False), Op((0,), (8,), (1,), asked=False)]),
    "no ops": step_graph([]),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_rotor_makes_the_most_of_its_table(name):
    """A schedule for more room than the budget, by the chain's account, may fit by the judge's, and be faster."""
    graph = recorded(name)
    chain = StepChain(graph)
    columns = chain.columns()
    sizes = (columns.a, columns.abar, columns.f_tmp, columns.b_tmp)
    gains = []
    before_s = np.inf
    for share in (0.8, 0.85, 0.9, 0.95):
        budget_bytes = int(share * graph.peak_bytes)
        found = rotor.plan(graph, budget_bytes)
        assert found.feasible and found.peak_bytes <= budget_bytes
        assert found.seconds <= before_s
        before_s = found.seconds
        one = rotor.solve(columns.f, columns.b, *sizes, budget_bytes)
        assert one is not None
        verdict = validate(chain.plan_of_schedule(one.schedule), graph)
        if verdict.peak_bytes <= budget_bytes:
            gains.append(verdict.rebuild_s / found.seconds)
    assert min(gains) > 0.99
    assert max(gains) > 1.1


@pytest.mark.parametrize("graph", UNUSUAL.values(), ids=UNUSUAL)
def test_unusual_steps(graph):
    chain = StepChain(graph)
    assert isinstance(chain.columns(), Chain)
    assert_no_worse_than_the_schedule(graph)
    for kept in ([], list(range(1, chain.length))):
        validate(chain.plan_of_kept(kept), graph)
    for planner in (rotor.plan, min_peak.plan):
        found = planner(graph, graph.peak_bytes)
        assert found.feasible and found.peak_bytes <= graph.peak_bytes


def test_a_step_without_a_cut_has_no_stages():
    assert StepChain(NO_CUT).length <= 1
    assert StepChain(UNUSUAL["nothing saved"]).length == 0

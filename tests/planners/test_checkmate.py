"""Checkmate on plain numbers: the optimum, its rounding, its bound, and what its schedules hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.planners import checkmate
from delta_runtime.planners.checkmate import Action, Dag, Kind
from delta_runtime.planners.linear_program import SolverFailed
from tests.planners.exhaustive import cheapest_schedule
from tests.planners.reference import CASES

pytest.importorskip("scipy")

REFERENCE = [
    pytest.param(case, budget, id=f"{case['name']}-{budget['B']}")
    for case in CASES["checkmate"]["cases"]
    for budget in case["budgets"]
]
reference = pytest.mark.parametrize(("case", "budget"), REFERENCE)


def known_optimum(budget: dict) -> float | None:
    return budget.get("peer_gurobi", budget.get("highs"))


@reference
def test_reference_values(case, budget):
    found = checkmate.solve(case["deps"], case["cpu"], case["ram"], budget["B"])
    expected = known_optimum(budget)
    assert (found and found.objective) == (None if expected is None else pytest.approx(expected))
    if found:
        dag = Dag.of(case["deps"], case["cpu"], case["ram"])
        assert checkmate.replay(dag, found.schedule) == (found.objective, found.peak)
        assert found.peak <= budget["B"]
        assert found.bound == pytest.approx(found.objective, rel=1e-4)


@reference
def test_rounding_is_within_a_tenth(case, budget):
    rounded = checkmate.round_lp(case["deps"], case["cpu"], case["ram"], budget["B"])
    expected = known_optimum(budget)
    assert (rounded is None) == (expected is None)
    if rounded:
        assert rounded.peak <= budget["B"]
        assert expected - 1e-6 <= rounded.objective <= 1.1 * expected
        assert rounded.bound <= expected + 1e-6


@reference
def test_the_relaxation_is_no_looser_than_the_papers(case, budget):
    papers = budget["lp_relaxation_strong"]
    ours = checkmate.lower_bound(case["deps"], case["cpu"], case["ram"], budget["B"])
    if papers is None:
        assert ours is None
    elif ours is not None:  # none is tighter still: that there is no schedule
        assert ours >= papers - 1e-4  # as many digits are given


UNIT = 20_000_003  # bytes


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("linear_rand_n4", 19),
        ("linear_rand_n6", 18),
        ("residual_rand_n4_blk2", 35),
        ("residual_rand_n5_blk3", 28),
    ],
)
def test_a_byte_too_little_is_too_little(name, least):
    """A byte of hundreds of millions is less than the solver's tolerance."""
    case = next(each for each in CASES["checkmate"]["cases"] if each["name"] == name)
    sizes = [each * UNIT for each in case["ram"]]
    found = checkmate.solve(case["deps"], case["cpu"], sizes, least * UNIT)
    assert found.peak == least * UNIT
    assert checkmate.solve(case["deps"], case["cpu"], sizes, least * UNIT - 1) is None


def test_where_a_cheaper_schedule_passes_by_a_byte_another_is_found():
    case = next(each for each in CASES["checkmate"]["cases"] if each["name"] == "linear_rand_n4")
    sizes = [each * UNIT for each in case["ram"]]
    assert checkmate.solve(case["deps"], case["cpu"], sizes, 27 * UNIT).objective == 57
    found = checkmate.solve(case["deps"], case["cpu"], sizes, 27 * UNIT - 1)
    assert (found.objective, found.peak <= 27 * UNIT - 1) == (59, True)
    assert found.bound <= 59


@pytest.mark.parametrize("spare", range(-1, 40, 4))
def test_sizes_that_differ_by_bytes(spare):
    """Near the least budget each budget gives a schedule that fits, or none; never no answer."""
    case = next(each for each in CASES["checkmate"]["cases"] if each["name"] == "linear_rand_n4")
    sizes = [each * UNIT + i for i, each in enumerate(case["ram"])]
    found = checkmate.solve(case["deps"], case["cpu"], sizes, 19 * UNIT + spare)
    assert found is None or found.peak <= 19 * UNIT + spare
    assert (found is None) or spare >= 0


def test_a_solver_that_passes_the_budget_again_is_a_failure(monkeypatch):
    monkeypatch.setattr(checkmate, "TOLERANCE", 0.0)
    case = next(each for each in CASES["checkmate"]["cases"] if each["name"] == "linear_rand_n4")
    sizes = [each * UNIT for each in case["ram"]]
    with pytest.raises(SolverFailed, match="pass the budget"):
        checkmate.solve(case["deps"], case["cpu"], sizes, 19 * UNIT - 1)


@st.composite
def dags(draw: st.DrawFn, most_nodes: int = 6) -> tuple[Dag, int]:
    n = draw(st.integers(1, most_nodes))
    deps = [
        sorted(draw(st.sets(st.integers(max(0, node - 3), node - 1), max_size=2))) if node else []
        for node in range(n)
    ]
    column = st.lists(st.integers(0, 5), min_size=n, max_size=n)
    return Dag.of(deps, draw(column), draw(column), draw(column)), draw(st.integers(0, 22))


@settings(max_examples=80, deadline=None)
@given(dags())
def test_no_schedule_is_cheaper(instance):
    dag, budget = instance
    columns = dag.deps, dag.cpu, dag.ram, budget, dag.workspace
    expected = cheapest_schedule(*columns)
    found = checkmate.solve(*columns)
    assert (found and found.objective) == (None if expected is None else pytest.approx(expected))
    bound = checkmate.lower_bound(*columns)
    if expected is not None:
        assert found.peak <= budget
        assert bound <= expected + 1e-6


@settings(max_examples=40, deadline=None)
@given(dags(most_nodes=9))
def test_what_is_rounded_fits_and_costs_no_less_than_the_optimum(instance):
    dag, budget = instance
    columns = dag.deps, dag.cpu, dag.ram, budget, dag.workspace
    best, rounded = checkmate.solve(*columns), checkmate.round_lp(*columns)
    if rounded:
        assert rounded.peak <= budget
        assert rounded.objective >= best.objective - 1e-6


def test_workspace_counts_while_an_op_runs():
    deps, cpu, ram = [[], [0], [1]], [1, 1, 1], [2, 2, 2]
    assert checkmate.solve(deps, cpu, ram, 4).objective == 3
    assert checkmate.solve(deps, cpu, ram, 4, [0, 1, 0]) is None
    assert checkmate.solve(deps, cpu, ram, 5, [0, 1, 0]).objective == 3


def test_out_of_time_is_told_from_impossible(monkeypatch):
    monkeypatch.setattr(checkmate, "greedy_schedules", lambda dag, budget: [])
    case = CASES["checkmate"]["cases"][2]
    with pytest.raises(checkmate.PlannerTimeout, match="within 4"):
        checkmate.solve(case["deps"], case["cpu"], case["ram"], 4, time_limit_s=0.0)


def test_out_of_time_returns_what_evicts_greedily():
    case = CASES["checkmate"]["cases"][2]
    found = checkmate.solve(case["deps"], case["cpu"], case["ram"], 4, time_limit_s=0.0)
    assert found.peak <= 4
    assert found.objective >= 18


@pytest.mark.parametrize(
    "schedule",
    [
        [Action(Kind.RUN, 1)],
        [Action(Kind.RUN, 0), Action(Kind.RUN, 0)],
        [Action(Kind.FREE, 0)],
        [Action(Kind.RUN, 0)],
    ],
    ids=[
        "reads what is not there",
        "runs though it is there",
        "frees nothing",
        "leaves a node out",
    ],
)
def test_a_wrong_schedule_is_refused(schedule):
    with pytest.raises(ValueError, match="node"):
        checkmate.replay(Dag.of([[], [0]], [1, 1], [1, 1]), schedule)


@pytest.mark.parametrize(
    ("deps", "cpu", "ram"),
    [([[0]], [1], [1]), ([[], [2], []], [1] * 3, [1] * 3), ([[]], [1, 2], [1]), ([[]], [-1], [1])],
    ids=["reads itself", "reads a later node", "too many costs", "negative cost"],
)
def test_what_is_no_graph_is_refused(deps, cpu, ram):
    with pytest.raises(ValueError):
        checkmate.solve(deps, cpu, ram, 10)

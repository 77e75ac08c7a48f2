"""Linear programs: what is found is the least, and what is not found is told from what cannot be."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.planners import checkmate
from delta_runtime.planners.least_seconds import least_seconds
from delta_runtime.planners.linear_program import TOLERANCE, LinearProgram, SolverFailed
from tests.support.step_graphs import MIB, TINY

pytest.importorskip("scipy")

INF = np.inf


def two_columns() -> LinearProgram:
    """2 a + 3 b, where a + 2 b is at least 5 and b is whole."""
    program = LinearProgram()
    a, b = program.column(2.0, 0.0, 10.0), program.column(3.0, 0.0, 10.0, whole=True)
    program.row([(a, 1.0), (b, 2.0)], 5.0, INF)
    return program


def test_the_least_is_found_with_its_bound():
    answer = two_columns().solve()
    assert answer.x == pytest.approx([1.0, 2.0])
    assert answer.cost == pytest.approx(8.0)
    assert answer.bound == pytest.approx(8.0, rel=1e-4)
    assert not answer.impossible


def test_relaxed_whole_columns_are_fractions():
    answer = two_columns().solve(relaxed=True)
    assert answer.x == pytest.approx([0.0, 2.5])
    assert answer.cost == answer.bound == pytest.approx(7.5)


def test_terms_of_one_column_add_up():
    program = LinearProgram()
    column = program.column(1.0, 0.0, INF)
    program.row([(column, 1.0), (column, 1.0)], 6.0, INF)
    assert program.solve().cost == pytest.approx(3.0)


@pytest.mark.parametrize("relaxed", [False, True])
def test_what_cannot_be_is_impossible(relaxed):
    program = two_columns()
    program.row([(0, 1.0), (1, 1.0)], -INF, 1.0)
    answer = program.solve(relaxed=relaxed)
    assert (answer.x, answer.cost, answer.bound, answer.impossible) == (None, INF, None, True)


def test_a_row_of_nothing_is_met_or_not():
    program = two_columns()
    program.row([], -INF, 0.0)
    assert program.solve().x is not None
    program.row([], 1.0, INF)
    assert program.solve().impossible


@pytest.mark.parametrize("whole", [False, True])
def test_what_has_no_least_is_a_failure(whole):
    program = LinearProgram()
    program.column(-1.0, 0.0, INF, whole=whole)
    with pytest.raises(SolverFailed):
        program.solve()


def test_what_presolve_leaves_open_is_solved_without_it():
    """Presolve says of this one that it is impossible or unbounded."""
    program = LinearProgram()
    column = program.column(-2.0, 0.0, INF, whole=True)
    program.row([(column, -1.0)], -INF, -1.0)
    program.row([(column, 0.0)], -INF, -1.0)
    assert program.solve().impossible


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=6, max_size=6),
    st.lists(st.integers(1, 40), min_size=6, max_size=6),
    st.sampled_from([1e-9, 1e-4, 1.0, 1e9]),
    st.sampled_from([1e-9, 1.0, 1e10]),
)
def test_units_do_not_matter(costs, sizes, second, byte):
    """Costs of nanoseconds are no less exact than those of seconds; nor are rows of bytes."""

    def least(unit_of_cost: float, unit_of_size: float) -> float:
        program = LinearProgram()
        columns = [program.column(cost * unit_of_cost, 0, 1, whole=True) for cost in costs]
        terms = [(column, size * unit_of_size) for column, size in zip(columns, sizes)]
        program.row(terms, sum(sizes) / 2 * unit_of_size, INF)
        return program.solve(gap=0.0).cost / unit_of_cost

    assert least(second, byte) == pytest.approx(least(1.0, 1.0))


def test_a_row_holds_to_within_the_tolerance_whatever_its_unit():
    program = LinearProgram()
    columns = [program.column(-1.0 - i / 100, 0.0, 1.0, whole=True) for i in range(30)]
    sizes = [3e8 + 1e6 * i for i in range(30)]
    program.row(zip(columns, sizes), -INF, 4e9)
    assert program.solve().x @ sizes <= 4e9 * (1 + TOLERANCE)


def hard() -> LinearProgram:
    """Many numbers that are to be split evenly, several at a time."""
    rng = np.random.default_rng(0)
    program = LinearProgram()
    columns = [program.column(0.0, 0.0, 1.0, whole=True) for _ in range(50)]
    for _ in range(6):
        numbers = rng.integers(1, 100, len(columns))
        off = program.column(1.0, 0.0, INF), program.column(1.0, 0.0, INF)
        half = float(numbers.sum() // 2)
        program.row([*zip(columns, numbers.tolist()), (off[0], 1.0), (off[1], -1.0)], half, half)
    return program


@pytest.mark.parametrize("relaxed", [False, True])
def test_out_of_time_is_not_impossible(relaxed):
    answer = hard().solve(time_limit_s=0.0, relaxed=relaxed)
    assert (answer.x, answer.cost, answer.impossible) == (None, INF, False)


def test_out_of_time_the_best_so_far_is_the_answer():
    answer = hard().solve(time_limit_s=0.5)
    assert answer.x is not None
    assert answer.bound <= answer.cost < INF


def test_a_solver_that_fails_is_asked_twice_and_never_taken_for_impossible(monkeypatch):
    asked = []

    def fail(cost, options, **rest):
        asked.append(options["presolve"])
        return SimpleNamespace(status=4, x=None, fun=None, mip_dual_bound=None, message="numbers")

    monkeypatch.setattr("scipy.optimize.milp", fail)
    with pytest.raises(SolverFailed, match="numbers"):
        two_columns().solve()
    assert asked == [True, False]
    columns = [[], [0], [1]], [1] * 3, [2] * 3, 5
    for planner in (checkmate.solve, checkmate.round_lp, checkmate.lower_bound):
        with pytest.raises(SolverFailed):
            planner(*columns)
    with pytest.raises(SolverFailed):
        least_seconds(TINY["chain"], 40 * MIB)


def test_without_scipy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match="pip install"):
        two_columns().solve()


@pytest.mark.parametrize(("lower", "upper", "impossible"), [(-1, 0, False), (1, 2, True)])
def test_without_columns_each_sum_is_nothing(lower, upper, impossible):
    program = LinearProgram()
    program.row([], lower, upper)
    for relaxed in (False, True):
        answer = program.solve(relaxed=relaxed)
        assert answer.impossible == impossible
        assert (answer.x is None) == impossible

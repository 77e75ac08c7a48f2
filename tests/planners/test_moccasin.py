"""Moccasin on plain numbers: Checkmate's optima by intervals, and the process that looks for them."""

from __future__ import annotations

import signal
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings

from delta_runtime.planners import checkmate, moccasin
from delta_runtime.planners.checkmate import Dag
from delta_runtime.planners.linear_program import SolverFailed
from tests.planners.exhaustive import cheapest_schedule
from tests.planners.reference import CASES
from tests.planners.test_checkmate import REFERENCE, dags, known_optimum

pytest.importorskip("ortools")

UNIT_CHAIN = next(each for each in CASES["checkmate"]["cases"] if each["name"] == "linear_unit_n4")
COLUMNS = UNIT_CHAIN["deps"], UNIT_CHAIN["cpu"], UNIT_CHAIN["ram"]


@pytest.fixture
def here(monkeypatch):
    """Solve in this process: a new one takes a second to start."""
    monkeypatch.setattr(moccasin, "_ask", moccasin._answer)


@pytest.mark.parametrize(("case", "budget"), REFERENCE)
def test_reference_values(case, budget, here):
    columns = case["deps"], case["cpu"], case["ram"]
    found = moccasin.solve(*columns, budget["B"], most_runs=6)
    expected = known_optimum(budget)
    assert (found and found.objective) == (None if expected is None else pytest.approx(expected))
    if found:
        assert checkmate.replay(Dag.of(*columns), found.schedule) == (found.objective, found.peak)
        assert found.peak <= budget["B"]
        assert found.bound == pytest.approx(found.objective)


@settings(max_examples=40, deadline=None)
@given(dags())
def test_no_schedule_is_cheaper(instance):
    dag, budget = instance
    columns = dag.deps, dag.cpu, dag.ram, budget, dag.workspace
    expected = cheapest_schedule(*columns)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(moccasin, "_ask", moccasin._answer)
        found = moccasin.solve(*columns, most_runs=6)
    assert (found and found.objective) == (None if expected is None else pytest.approx(expected))
    if found:
        assert found.peak <= budget and found.bound <= expected + 1e-6


def test_a_process_of_its_own_says_the_same():
    assert moccasin.solve(*COLUMNS, 4).objective == 11
    assert moccasin.solve(*COLUMNS, 2) is None


def test_ctrl_c_is_what_it_was(here):
    moccasin.solve(*COLUMNS, 4)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_node_runs_no_more_often_than_is_said(here):
    """Within 3, node 0 of the chain of 4 has to run four times."""
    assert moccasin.solve(*COLUMNS, 3, most_runs=4).objective == 15
    few = moccasin.solve(*COLUMNS, 3, most_runs=1)  # what evicts greedily keeps to no limit
    assert few.objective >= 15 and few.bound is None
    with pytest.raises(ValueError, match="most_runs is 0"):
        moccasin.solve(*COLUMNS, 3, most_runs=0)


@pytest.mark.parametrize("factor", [1e-3, 1 / 3, 1e13], ids=["small", "no whole numbers", "large"])
def test_sizes_and_costs_of_any_unit(factor, here):
    deps, cpu, ram = COLUMNS
    sizes, costs = [factor * each for each in ram], [factor * each for each in cpu]
    found = moccasin.solve(deps, costs, sizes, factor * 4)
    assert found.objective == pytest.approx(factor * 11)
    assert found.bound <= found.objective <= found.bound * (1 + 1e-6)


def test_what_fits_by_a_hair_is_found(here):
    """Sums of such sizes are off by rounding; the optimum holds just the budget."""
    columns = [[], [0], [1], [0, 2]], [1, 1, 1, 1], [0.1, 0.5, 0.5, 0.1]
    found = moccasin.solve(*columns, 1.0)
    assert (found.objective, found.bound) == (5, pytest.approx(5))
    assert moccasin.solve(*columns, 1.0 - 1e-6) is None or found.peak <= 1.0


def test_numbers_of_numpy_and_no_limit(here):
    deps, cpu, ram = COLUMNS
    deps = [list(np.array(each, np.int64)) for each in deps]
    columns = deps, np.array(cpu), np.array(ram)
    assert moccasin.solve(*columns, np.int64(4), time_limit_s=float("inf")).objective == 11


def test_without_an_answer_the_last_words_are_told(monkeypatch):
    monkeypatch.setattr(moccasin.sys, "executable", "/bin/false")
    with pytest.raises(SolverFailed, match="exit status 1"):
        moccasin.solve(*COLUMNS, 4)
    monkeypatch.setattr(moccasin.sys, "executable", "/nowhere/python")
    with pytest.raises(SolverFailed, match="did not start"):
        moccasin.solve(*COLUMNS, 4)


def test_what_others_print_in_the_process_is_no_answer(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("print('hello')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert moccasin.solve(*COLUMNS, 4).objective == 11


def test_out_of_time_is_told_from_impossible(monkeypatch):
    def too_late(*args, **options):
        raise subprocess.TimeoutExpired("solver", 1.0)

    monkeypatch.setattr(moccasin.subprocess, "run", too_late)
    assert moccasin.solve(*COLUMNS, 4).objective >= 11  # what evicts greedily
    monkeypatch.setattr(moccasin, "greedy_schedules", lambda dag, budget: [])
    with pytest.raises(checkmate.PlannerTimeout, match="within 4"):
        moccasin.solve(*COLUMNS, 4)


def test_without_or_tools_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(moccasin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="cp-sat"):
        moccasin.solve(*COLUMNS, 4)

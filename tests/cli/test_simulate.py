"""`python -m delta_runtime simulate`: a table of policies for a recorded step, and a trace of the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_runtime.cli.main import main
from delta_runtime.online.policies import POLICIES
from delta_runtime.simulate.under_policy import simulated_policies
from tests.cli.test_record_and_plan import rows_of
from tests.support.step_graphs import chain

MIB = 1024**2
GRAPH = chain([8 * MIB] * 12, [0.01] * 12)
LINK = ["--link-bytes-per-s", "1GB"]


@pytest.fixture
def recorded_chain(tmp_path: Path) -> str:
    path = tmp_path / "chain.json"
    path.write_text(GRAPH.to_json())
    return str(path)


def test_the_table_shows_what_each_policy_comes_to(recorded_chain, capsys):
    names = simulated_policies()
    call = ["simulate", recorded_chain, "--budget", "70%", "--policies", ",".join(names), *LINK]
    assert main(call) == 0
    shown = capsys.readouterr().out
    rows = rows_of(shown)
    assert list(rows) == names
    assert {row[0] for row in rows.values()} == {"yes"}
    assert rows["recompute"][3] != "0 s" and rows["recompute"][6] == "0 B"
    assert rows["swap"][3] == "0 s" and rows["swap"][5] == "0 B" != rows["swap"][6]
    assert float(rows["auto"][2]) <= min(float(row[2]) for row in rows.values()) + 0.002
    assert "An estimate" in shown


def test_all_policies_are_simulated_but_those_for_tests_and_the_one_that_evicts_nothing():
    left_out = {"off", "stress_drop_all", "stress_random", "stress_swap_all", "stress_mix"}
    assert set(simulated_policies()) == set(POLICIES) - left_out


def test_a_planner_without_a_plan_is_left_out_with_its_least(recorded_chain, capsys):
    call = ["simulate", recorded_chain, "--budget", "30%", "--policies", "min_peak,recompute"]
    assert main(call) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Left out: min_peak (no plan; the least budget is" in shown


def test_what_needs_a_lane_is_left_out_where_none_is_known(recorded_chain, capsys):
    assert main(["simulate", recorded_chain, "--budget", "70%", "--policies", "swap,auto"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Left out: swap (no speed of a lane is known)" in shown
    assert list(rows_of(shown.replace("│ auto", "\n│ auto"))) == ["auto"]


def test_the_trace_is_of_the_first_policy(recorded_chain, tmp_path, capsys):
    path = tmp_path / "trace.json"
    call = ["simulate", recorded_chain, "--budget", "60%", "--policies", "swap,recompute", *LINK]
    assert main([*call, "--trace", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    tracks = [each["tid"] for each in events if each["ph"] == "X"]
    assert tracks.count(0) == GRAPH.n_ops
    assert tracks.count(1) == 0 and tracks.count(2) == tracks.count(3) > 0
    assert {each["name"] for each in events if each["ph"] == "X" and each["tid"] == 0} == {
        "op",
        "backward",
    }


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--policies", "auto,off"], "These policies cannot be simulated. asked: off"),
        (["--host-budget", "some"], "--host-budget"),
        (["--link-bytes-per-s", "quick"], "--link-bytes-per-s"),
    ],
)
def test_a_wrong_call_says_what_is_wrong(recorded_chain, capsys, more, text):
    with pytest.raises(SystemExit) as ended:
        main(["simulate", recorded_chain, "--budget", "70%", *more])
    assert ended.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_plans_know_how_much_host_memory_there_is(recorded_chain, capsys):
    call = ["simulate", recorded_chain, "--budget", "50%", "--policies", "swap", *LINK]
    assert main(call) == 0
    assert rows_of(capsys.readouterr().out)["swap"][0] == "yes"
    assert main([*call, "--host-budget", "8MiB"]) == 0
    assert "Left out: swap (no plan" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("uses", [1000] * 12, "uses has a tick outside of the step"),
        ("released_at", [-5] * 12, "released_at has a tick before the step"),
        ("ticks", "x", "ticks is no number of ticks"),
        ("ticks", 3, "op_tick has a tick outside of the step"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_a_damaged_file_is_refused(verb, tmp_path, capsys, column, value, text):
    damaged = json.loads(GRAPH.to_json())
    assert column in damaged
    damaged[column] = value
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(damaged))
    with pytest.raises(SystemExit) as ended:
        main([verb, str(path), "--budget", "70%"])
    assert ended.value.code == 2
    assert text in " ".join(capsys.readouterr().err.split())

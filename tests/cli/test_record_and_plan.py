"""The verbs `record` and `plan`: a script's step as a file, and what the planners make of it."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from delta_runtime.cli.main import main
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.planners.linear_program import LinearProgram, SolverFailed
from delta_runtime.planners.registry import PLANNERS
from tests.support import warm_children
from tests.support.recorded_steps import recorded
from tests.support.step_graphs import MIB, TINY
from tests.support.step_graphs import chain as chain_of

SCRIPT = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
for _ in range(int(sys.argv[1])):
    model(torch.randn(64, 64)).square().mean().backward()
    model.zero_grad()
if len(sys.argv) > 2:
    sys.exit(sys.argv[2])
"""


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return warm_children.run(["-m", "delta_runtime", *arguments], cwd=cwd, timeout=120)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("steps", ["1", "4"])
def test_a_step_is_recorded_and_planned_for(script, tmp_path, steps):
    done = run("record", "--out", "step.json", "--min-bytes", "0", "train.py", steps, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    graph = StepGraph.from_json((tmp_path / "step.json").read_text())
    assert len(graph.saved) >= 8
    assert len(graph.uses) >= 8
    assert graph.recorded_on is not None
    assert graph.recorded_on.device == "cpu"
    assert graph.recorded_on.threads >= 1
    done = run("plan", "step.json", "--budget", "90%", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "recompute" in done.stdout
    told = " ".join(done.stdout.split())
    assert "Left out: swap (no speed of a lane was recorded" in told
    assert "Left out: joint" not in told


def test_a_script_that_fails_leaves_its_record_and_its_status(script, tmp_path):
    done = run("record", "--out", "step.json", "train.py", "3", "no data", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "no data\n")
    assert StepGraph.from_json((tmp_path / "step.json").read_text()).n_ops > 0


def test_a_script_without_a_step_is_told_of(script, tmp_path):
    done = run("record", "--out", "step.json", "train.py", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "no step was seen" in done.stderr
    assert not (tmp_path / "step.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["record", "--out", "step.json"], "name a script"),
        (["record", "--out", "step.json", "nowhere.py"], "there is no 'nowhere.py'"),
        (["record", "--out", "no/where/step.json", "train.py"], "cannot be written"),
        (["record", "--out", ".", "train.py"], "cannot be written"),
        (["record", "--out", "step.json", "--device", "tpu", "train.py"], "tpu"),
        (["record", "train.py"], "--out"),
    ],
)
def test_a_wrong_call_of_record_changes_nothing(script, tmp_path, arguments, said):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "step.json").exists()


# ---------------------------------------------------------------- plan


@pytest.fixture
def chain(tmp_path: Path) -> str:
    path = tmp_path / "chain.json"
    path.write_text(TINY["chain"].to_json())
    return str(path)


def rows_of(table: str) -> dict[str, list[str]]:
    lines = [line.strip("│ ").split("│") for line in table.splitlines() if line.startswith("│")]
    return {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}


def test_the_table_shows_what_each_planner_comes_to(chain, capsys):
    assert main(["plan", chain, "--budget", "40MiB", "--link-bytes-per-s", "100GB"]) == 0
    shown = capsys.readouterr().out
    rows = rows_of(shown)
    assert "No plan that drops takes less than" in " ".join(shown.split())
    assert list(rows) == list(PLANNERS)
    fits = {name for name, row in rows.items() if row[1] == "yes"}
    assert fits >= {"drop_all", "recompute", "swap", "joint", "rotor", "checkmate"}
    assert "keep" not in fits
    assert rows["keep"][0] == "64.00 MiB"
    assert rows["swap"][2] == "0 s"
    assert rows["recompute"][2] != "0 s"
    assert rows["recompute"][3] == "0 s"
    step, bound = map(float, rows["checkmate"][4:6])
    assert bound <= step <= bound + 0.002  # its plan is as fast as its bound


def test_joint_starts_from_the_plans_of_the_others(chain, capsys):
    names = "recompute,joint,checkmate"
    link = ["--link-bytes-per-s", "1"]  # a copy never pays
    assert main(["plan", chain, "--budget", "40MiB", "--planners", names, "--seed", *link]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert list(rows) == names.split(",")
    assert rows["joint"][4] == min(rows["recompute"][4], rows["checkmate"][4])


@pytest.mark.parametrize("seconds", ["soon", "-1", "nan", "inf"])
def test_what_is_no_number_of_seconds_is_refused(chain, capsys, seconds):
    with pytest.raises(SystemExit):
        main(["plan", chain, "--budget", "40MiB", f"--bound-seconds={seconds}"])
    assert f"--bound-seconds: {seconds!r} is no number of seconds" in capsys.readouterr().err


def test_without_seconds_the_bound_is_the_linear_one(tmp_path, capsys):
    path = tmp_path / "chain.json"
    graph = chain_of([8 * MIB] * 12, [0.01] * 12)
    path.write_text(graph.to_json())
    call = [
        "plan",
        str(path),
        "--budget",
        str(graph.peak_bytes - 9 * 8 * MIB),
        "--planners",
        "keep",
    ]
    for seconds, told in (("0", "90.0 ms"), ("10", "120 ms")):
        assert main([*call, "--bound-seconds", seconds]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"No plan that drops takes less than {told} more" in shown


def test_what_was_merged_is_shown(chain, capsys):
    call = ["plan", chain, "--budget", "40MiB", "--planners", "keep", "--merged"]
    assert main(call) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "for checkmate" in shown
    assert re.search(r"a chain of [4-8] stages, for rotor, min_peak and chen", shown)
    assert "backward" in shown


def test_a_plot_of_time_against_budget_is_written(chain, tmp_path, capsys):
    path = tmp_path / "plot.png"
    call = ["plan", chain, "--budget", "40MiB", "--planners", "rotor,min_peak"]
    assert main([*call, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        main([*call, "--plot", str(tmp_path / "plot.of_no_kind")])
    assert "plot.of_no_kind" in capsys.readouterr().err


def test_planners_are_chosen_and_a_recorded_lane_is_used(tmp_path, capsys):
    path = tmp_path / "gpt.json"
    plain = json.loads(recorded("gpt").to_json())
    on = {"device": "cpu", "threads": 2, "torch": "2.13.0"}
    plain["recorded_on"] = {**on, "out_bytes_per_s": 4e9, "in_bytes_per_s": 4e9}
    path.write_text(json.dumps(plain))
    assert main(["plan", str(path), "--budget", "80%", "--planners", "swap, keep"]) == 0
    shown = capsys.readouterr().out
    assert list(rows_of(shown)) == ["swap", "keep"]
    assert "Left out" not in shown


@pytest.mark.parametrize("budget", ["65MiB", "900GiB", "100%"])
def test_a_budget_that_the_step_keeps_to_moves_nothing(chain, capsys, budget):
    assert main(["plan", chain, "--budget", budget, "--link-bytes-per-s", "100GB"]) == 0
    rows = rows_of(capsys.readouterr().out)
    del rows["drop_all"]  # the budget is nothing to it
    assert {tuple(row[:5]) for row in rows.values()} == {
        ("64.00 MiB", "yes", "0 s", "0 s", "1.000")
    }


def test_a_solver_that_fails_costs_the_bound_alone(chain, capsys, monkeypatch):
    def fail(self, **_):
        raise SolverFailed

    monkeypatch.setattr(LinearProgram, "solve", fail)
    assert main(["plan", chain, "--budget", "40MiB"]) == 0
    assert "The solver failed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "1 parsec"], "parsec"),
        (["--budget", "auto"], "auto"),
        (["--budget", "0"], "budget"),
        (["--budget", "150%"], "share"),
        (["--budget", "50%", "--planners", "keep,magic"], "magic"),
        (["--budget", "50%", "--link-bytes-per-s", "fast"], "link-bytes-per-s"),
    ],
)
def test_a_wrong_call_of_plan_is_refused(chain, capsys, arguments, said):
    with pytest.raises(SystemExit) as leaving:
        main(["plan", chain, *arguments])
    assert leaving.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{}", "[1]", "\x00"])
def test_what_is_no_step_graph_is_refused(tmp_path, capsys, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(["plan", str(path), "--budget", "50%"])
    assert "no step graph" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", str(tmp_path / "nowhere.json"), "--budget", "50%"])
    assert "cannot be read" in capsys.readouterr().err

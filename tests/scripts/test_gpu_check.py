"""The GPU check itself: what passed is not run again, what failed or hangs is told, and its benchmark runs.

Whether anything holds on a GPU is what scripts/gpu_check.py finds out, on one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import gpu_check
from scripts.gpu_check import Part

ROOT = Path(__file__).resolve().parents[2]


def program(text: str) -> tuple[str, ...]:
    return ("{python}", "-c", text)


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Runs the check on some parts; returns its exit status and what it wrote."""
    monkeypatch.setattr(gpu_check, "about", lambda device: {"device": device})
    path = tmp_path / "check.json"

    def run(*parts: Part, options: tuple[str, ...] = ()) -> tuple[int, dict]:
        monkeypatch.setattr(gpu_check, "PARTS", parts)
        status = gpu_check.main(["--json", str(path), *options])
        return status, json.loads(path.read_text()) if path.exists() else {}

    return run


def test_a_part_that_passed_is_not_run_again_until_the_sources_change(
    check, capsys, monkeypatch, tmp_path
):
    log = tmp_path / "log"
    part = Part("one", program(f"print('x', file=open({str(log)!r}, 'a'))"))
    for options, runs in (((), 1), ((), 1), (("--again",), 2), (("--parts", "one"), 2)):
        status, parts = check(part, options=options)
        assert status == 0 and parts["one"]["state"] == "passed"
        assert len(log.read_text().splitlines()) == runs
    monkeypatch.setattr(gpu_check, "fingerprint", lambda about: "other")
    check(part)
    assert len(log.read_text().splitlines()) == 3


def test_what_fails_and_what_hangs_is_told_and_the_rest_goes_on(check, capsys):
    status, parts = check(
        Part("bad", program("print('because of this'); raise SystemExit(3)")),
        Part(
            "hangs", program("import time; print('begun', flush=True); time.sleep(60)"), limit_s=3
        ),
        Part("good", program("import json, sys; json.dump([1], open('{out}', 'w'))")),
        Part("elsewhere", program("pass"), needs="no-such-program"),
    )
    assert status == 1
    states = {name: each["state"] for name, each in parts.items()}
    assert states == {
        "bad": "failed",
        "hangs": "out of time",
        "good": "passed",
        "elsewhere": "skipped",
    }
    assert "because of this" in parts["bad"]["tail"] and "begun" in parts["hangs"]["tail"]
    assert parts["good"]["results"] == [1]
    assert "because of this" in capsys.readouterr().out


def test_after_a_build_that_failed_nothing_is_run(check):
    status, parts = check(
        Part("build", program("raise SystemExit(1)")), Part("tests", program("pass"))
    )
    assert status == 1 and list(parts) == ["build"]


def test_without_time_the_next_call_goes_on(check):
    part = Part("one", program("pass"))
    status, parts = check(part, options=("--minutes", "0"))
    assert status == 1 and not parts
    status, parts = check(part)
    assert status == 0 and parts["one"]["state"] == "passed"


def test_what_failed_does_not_starve_what_was_never_run(check, tmp_path):
    hang = Part("hang", program("import time; time.sleep(60)"), limit_s=2)
    after = Part("after", program("pass"), limit_s=8)
    minutes = ("--minutes", "0.05")  # 3 s: enough for one of them
    assert "after" not in check(hang, after, options=minutes)[1]
    status, parts = check(hang, after, options=minutes)
    assert status == 1 and parts["after"]["state"] == "passed"
    assert parts["hang"]["state"] == "out of time"


def test_a_part_that_is_cut_short_by_the_whole_is_told_apart(check):
    _, parts = check(
        Part("long", program("import time; time.sleep(60)"), limit_s=8),
        options=("--minutes", "0.06"),
    )
    assert parts["long"]["state"] == "cut short"


def test_half_a_result_is_none(check):
    _, parts = check(Part("half", program("open('{out}', 'w').write('[1,')")))
    assert parts["half"]["state"] == "passed" and parts["half"]["results"] is None


def test_no_call_of_a_part_may_take_more_than_nine_minutes():
    for dry_run in (False, True):
        parts = gpu_check.parts_of(dry_run)
        assert max(part.limit_s for part in parts) <= 9 * 60
        assert len({part.name for part in parts}) == len(parts)


@pytest.mark.timeout(300)
def test_the_benchmark_runs_on_the_simulated_accelerator(tmp_path):
    from tests.support.fake_accelerator import can_compile

    if not can_compile():
        pytest.skip("the simulated accelerator is compiled: needs a C++ compiler and ninja")
    out = tmp_path / "speed.json"
    command = [sys.executable, "-m", "benchmarks.accelerator", "speed", "--device", "fake"]
    command += ["--models", "tiny_gpt2", "--shares", "0.7", "--rounds", "1", "--json", str(out)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = json.loads(out.read_text())["rows"]
    assert not any(row["failure"] for row in rows), rows
    ours = {row["name"]: row for row in rows if row["budget_bytes"]}
    assert set(ours) == {"recompute", "swap", "auto"}
    assert ours["recompute"]["replayed_ops"] > 0 and ours["swap"]["swapped_bytes"] > 0
    assert all(row["peak_bytes"] <= row["budget_bytes"] for row in ours.values())


def test_without_an_accelerator_the_benchmark_says_so():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.accelerator", "speed", "--device", "xpu"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "no xpu here" in done.stderr

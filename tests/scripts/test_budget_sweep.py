"""scripts/stress_budget_sweep.py on a model of milliseconds: points, flags, its file and its plot."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import pytest

from scripts import stress_budget_sweep
from scripts.stress_budget_sweep import Point, Record, flagged
from tests.benchmarks.test_contenders import TINY
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def test_a_sweep_goes_down_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stress_budget_sweep.SIZED, "tiny", TINY)
    # It is for the whole process and for good, and other tests see memory go back to the system.
    monkeypatch.setattr(stress_budget_sweep, "keep_memory", lambda: None)
    out = tmp_path / "sweep.jsonl"
    argv = ["--models", "tiny", "--step", "20", "--highest", "90", "--steps", "1"]
    argv += ["--peers", "checkpoint", "--bound-seconds", "1", "--out", str(out)]
    argv += ["--plots", str(tmp_path)]
    assert stress_budget_sweep.main(argv) == 0
    options = {"link": None, "steps": 1, "bound_seconds": 1.0}
    points = Record(out, Point, options).points
    by_policy = [each for each in points if each.name == "recompute"]
    assert [each.percent for each in by_policy][:3] == [90, 70, 50]
    assert all(each.peak_bytes <= each.budget_bytes and not each.failure for each in by_policy[:3])
    assert by_policy[2].dropped_bytes > by_policy[0].dropped_bytes > 0
    assert by_policy[0].rebuild_s > 0 and by_policy[0].ratio > 0
    assert by_policy[-1].percent == 10 and by_policy[-1].failure  # weights alone take more
    (peer,) = [each for each in points if each.name == "checkpoint"]
    assert 10 < peer.percent < 100
    assert (tmp_path / "budget_sweep_tiny.png").stat().st_size > 1000
    before = out.read_text()
    assert stress_budget_sweep.main(argv) == 0
    assert out.read_text() == before
    gc.collect()  # models of the sweep, which other tests would see go


def test_what_is_flagged() -> None:
    holds = Point("net", "recompute", 50, 100, peak_bytes=100, ratio=1.1)
    fails = Point("net", "recompute", 52, 104, failure="no room")
    assert flagged([holds, fails]) == ["net, recompute, 52 %: fails though 50 % holds: no room"]
    assert flagged([holds, dataclasses.replace(fails, percent=48)]) == []
    assert flagged([holds, dataclasses.replace(fails, name="swap")]) == []
    assert flagged([dataclasses.replace(holds, peak_bytes=101)]) == [
        "net, recompute, 50 %: 1 bytes above the budget"
    ]

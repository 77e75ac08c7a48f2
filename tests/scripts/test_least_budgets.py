"""scripts/check_least_budgets.py on two tiny models, and that it can find fault.

Covers: bits, strict runs and bounds; not seconds, which no limit is set for here.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_least_budgets import Line, Run

_FEW_BUDGETS = """
import sys
from scripts import check_least_budgets
check_least_budgets.BETWEEN, check_least_budgets.BELOW = (0.5,), (1.0, 0.9)
sys.exit(check_least_budgets.main(sys.argv[1:]))
"""


def test_two_tiny_models(tmp_path: Path) -> None:
    """In a process of its own, as the script is run: what other tests hold there says nothing about the models."""
    told = tmp_path / "told.json"
    options = ["--models", "cnn,lstm_2", "--steps", "4", "--rounds", "1", "--limit", "1000"]
    done = subprocess.run(
        [sys.executable, "-c", _FEW_BUDGETS, *options, "--json", str(told)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=280,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    lines = [Line(**line) for line in json.loads(told.read_text())["lines"]]
    assert [line.model for line in lines] == ["cnn", "lstm_2"]
    for line in lines:
        assert 0 < line.lower_bytes <= line.least_bytes < line.strict_bytes, said
        assert line.failed_bytes and line.held_bytes, said  # budgets of both kinds were tried
    assert lines[1].half_bytes and lines[1].ratio > 0 and lines[1].warned == 1, (lines[1], said)


GOOD = Line(
    "m",
    ordinary_bytes=100,
    ordinary_s=0.1,
    lower_bytes=20,
    lower_op="aten::mm",
    least_bytes=40,
    half_bytes=30,
    half_peak_bytes=50,
    ratio=1.4,
    limit=1.5,
    warned=1,
    held_bytes=[40],
    named_bytes=20,
)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"strict_failure": "step 2"}, "did not hold"),
        ({"ratio": 1.6}, "1.60 times as long"),
        ({"warned": 2}, "warned 2 times"),
        ({"warned": 0}, "warned 0 times"),
        ({"held_bytes": [40, 19]}, "above a budget that held"),
        ({"half_failure": "step 1"}, "half way: step 1"),
        ({"wrong": ["at 70 %"]}, "other bits: at 70 %"),
    ],
)
def test_faults_are_found(changed: dict[str, object], fault: str) -> None:
    assert GOOD.faults() == []
    (found,) = dataclasses.replace(GOOD, **changed).faults()
    assert fault in found


def test_other_bits_are_found() -> None:
    line = dataclasses.replace(GOOD, held_bytes=[], wrong=[])
    line.take_in("here", Run(digests=["a"], peak_bytes=30), Run(digests=["a", "b"]))
    assert (line.wrong, line.held_bytes) == ([], [30])
    line.take_in("there", Run(digests=["a", "c"], failure="step 3"), Run(digests=["a", "b"]))
    assert (line.wrong, line.held_bytes) == (["there"], [30])

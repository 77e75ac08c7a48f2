"""Runs tests/accelerator on the simulated accelerator, in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


MODELS = ("test_sweeps.py", "test_first_steps.py")
"""What tests/test_accelerator_models.py runs: as long as all the rest."""


def run_on_the_simulated_one(*arguments: str, marked: str = "not slow") -> None:
    """Run tests of tests/accelerator, of those that are marked so; none may be skipped."""
    if shutil.which("ninja") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("the simulated accelerator is compiled: needs a C++ compiler and ninja")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked]
        + list(arguments),
        cwd=ROOT,
        env=os.environ | {"DELTA_TEST_DEVICE": "fake", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2380,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]


@pytest.mark.timeout(2400)
def test_the_accelerator_tests_pass_on_the_simulated_one():
    others = [f"--ignore=tests/accelerator/{name}" for name in MODELS]
    run_on_the_simulated_one("tests/accelerator", *others)

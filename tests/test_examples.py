"""The programs of examples/, as a user runs them: inside their budget, and without one, with the same losses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NEEDS = {
    "accelerate_loop": ("accelerate",),
    "ddp": (),
    "fsdp2": (),
    "lightning_module": ("lightning",),
    "plain_loop": ("tqdm",),
    "trainer": ("transformers", "accelerate"),
}
"""Each example, and the packages that it imports beside torch."""
OF_TWO_PROCESSES = ("ddp", "fsdp2")
"""Marked slow: tests/scripts/test_ecosystem.py runs programs like these two."""


def run(name: str, *arguments: str) -> str:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        if name in OF_TWO_PROCESSES
        else []
    )
    clean = {key: text for key, text in os.environ.items() if not key.startswith("DELTA_")}
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), *arguments],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[str]:
    found = [
        re.sub(r"'delta/[^,}]*[,}] ?", "", line) for line in printed.splitlines() if "loss" in line
    ]
    return sorted(re.findall(r"loss\D*([0-9.]+)", "\n".join(found)))


def test_all_are_known_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == NEEDS.keys()
    readme = (ROOT / "README.md").read_text()
    assert all(f"examples/{name}.py" in readme for name in names)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in OF_TWO_PROCESSES))
        for name in sorted(NEEDS)
    ],
)
def test_an_example_keeps_its_losses_and_its_budget(name: str) -> None:
    for package in NEEDS[name]:
        pytest.importorskip(package)
    budgeted, ordinary = run(name), run(name, "--budget", "off")
    assert losses(ordinary)
    assert losses(budgeted) == losses(ordinary)
    verdicts = re.findall(r"Freed .* recomputed", budgeted)
    assert len(verdicts) == (2 if name in OF_TWO_PROCESSES else 1), budgeted
    assert "passed" not in budgeted

"""The check that memory is flat, over few steps; and that it can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from delta_runtime import cpu_pool

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts.stress_flatness import observe


def test_few_steps_are_flat() -> None:
    script = ROOT / "scripts" / "stress_flatness.py"
    done = subprocess.run(
        [sys.executable, str(script), "--steps", "200", "--iterations", "1000"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_grows_is_not_flat() -> None:
    cpu_pool.install()
    kept = []
    assert not observe(lambda k: kept.append(torch.ones(64)), 500).is_flat

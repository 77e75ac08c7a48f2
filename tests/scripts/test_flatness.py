"""The check that memory is flat, over few steps; and that it can fail."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import torch

from delta_runtime import cpu_pool

ROOT = Path(__file__).resolve().parents[2]
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
    gc.collect()  # what other tests left must not go meanwhile
    kept: list[torch.Tensor] = []
    assert not observe(lambda k: kept.append(torch.ones(1 << 16)), 100).is_flat

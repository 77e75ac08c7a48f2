"""Nothing of the runtime's own moves a random generator of the program: Python's, numpy's, torch's.

In processes of their own, because what is imported for the first time matters.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

START = """
import random, sys
import numpy as np
import torch
import delta_runtime_autoload
from torch import nn

torch.set_num_threads(1)
random.seed(5); np.random.seed(6); torch.manual_seed(7)

def states():
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

before = states()
moved = []

def check(what):
    global before
    now = states()
    for name, a, b in zip(("Python", "numpy", "torch"), before, now):
        if a != b:
            moved.append(f"{name}'s generator by {what}")
    before = now

def train(model, x):
    model(x).square().mean().backward()
"""

IN_CODE = """
import delta_runtime as delta
check("import delta_runtime")
delta.Runtime
check("the first Runtime's imports")
model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(512, 64)
states(); before = states()
runtime = delta.Runtime(delta.cpu_pool.allocated_bytes() + 800_000, device="cpu", spill_dir="/tmp",
                        disk_budget="4MiB", trace="/dev/null")
check("Runtime(...)")
for _ in range(5):
    with runtime.step():
        train(model, x)
    check("a step")
with runtime:
    for _ in range(5):
        train(model, x)
check("entering and leaving")
assert runtime.report().totals.drops + runtime.report().totals.swap_outs
check("report()")
str(runtime.report())
check("print(report())")
runtime.report().one_line()
runtime.close()
check("close()")
"""

AMBIENT = """
delta_runtime_autoload._autoload()
from delta_runtime.entered import entered
assert entered() is not None
check("DELTA_BUDGET")
model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(512, 64)
before = states()
for _ in range(5):
    train(model, x)
    check("a step")
assert entered().report().totals.steps
str(entered().report())
check("print(report())")
"""


@pytest.mark.parametrize("program", [IN_CODE, AMBIENT], ids=["in code", "DELTA_BUDGET"])
def test_no_generator_of_the_program_is_moved(program):
    environ = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    if program is AMBIENT:
        environ |= {"DELTA_BUDGET": "90%", "DELTA_REPORT": "step"}
    done = subprocess.run(
        [sys.executable, "-c", START + program + "print(moved)"],
        cwd=ROOT,
        # Started by hand, so that torch's own import lies before it.
        env=environ | {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"

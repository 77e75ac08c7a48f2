"""No generator of the program is drawn from by us: not Python's, not numpy's, not torch's, whatever is used first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(120)

# Each action is the first of its kind in its process, and is followed by a look at all states.
ACTIONS = """
import json, random, sys, warnings
warnings.simplefilter("ignore")
import numpy, torch
random.seed(5); numpy.random.seed(5); torch.manual_seed(5)
moved = {}
def states():
    numpy_state = repr(numpy.random.get_state())
    return {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state().tolist()}
before = states()
def look(action):
    global before
    after = states()
    moved[action] = [name for name in before if before[name] != after[name]]
    before = after

def train(runtime, steps=2):
    w = torch.linspace(-1, 1, 1 << 14).requires_grad_()
    for _ in range(steps):
        with runtime.step():
            (w * 2.0).exp().sin().sum().backward()

look("nothing")
import delta_runtime as delta
look("import")
from delta_runtime import cpu_pool
cpu_pool.install()
look("install the pool")
runtime = delta.Runtime("100%", device="cpu")
look("first runtime")
train(runtime)
look("train")
str(runtime.report()), runtime.report().as_dict()
look("report")
runtime.graph()
look("graph")
runtime.close()
look("close")
"""

SMALL = """
import delta_runtime as delta
for options in (
    dict(policy="recompute"), dict(policy="stress_random"), dict(host_budget="64MiB"),
    dict(policy="stress_mix", host_budget="64MiB"), dict(disk_budget="16MiB"), dict(verify="always"),
    dict(trace="%s"),
):
    other = delta.Runtime("100%%", device="cpu", min_bytes=0, **options)
    look("runtime " + str(sorted(options.items())))
    train(other, 4)
    look("train " + str(sorted(options.items())))
    str(other.report())
    other.close()
    look("close " + str(sorted(options.items())))
"""


def _moved(code: str, **environment: str) -> dict[str, Any]:
    plain = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nprint(json.dumps(moved))"],
        env=plain | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def _faults(moved: dict[str, list[str]]) -> dict[str, list[str]]:
    return {action: names for action, names in moved.items() if names}


def test_the_first_of_everything_in_a_process(tmp_path: Path) -> None:
    moved = _moved(ACTIONS + SMALL % (tmp_path / "trace.json"))
    assert len(moved) > 20
    assert _faults(moved) == {}


AMBIENT = """
import random
random.seed(5)
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy
numpy.random.seed(5)
import torch
torch.manual_seed(5)
%s
w = torch.linspace(-1, 1, 1 << 14).requires_grad_()
(w * 2.0).exp().sin().sum().backward()
own = (random.random(), numpy.random.rand(), torch.rand(1).item())
moved = {"entered": "delta_runtime" in sys.modules, "own": repr(own)}
"""


def test_a_budget_in_the_environment() -> None:
    """The same script with and without it draws the same numbers."""
    entered = "from delta_runtime.entered import entered; assert entered() is not None"
    settings = {"DELTA_BUDGET": "100%", "DELTA_DEVICE": "cpu", "DELTA_REPORT": "off"}
    without = _moved(AMBIENT % "")
    ambient = _moved(AMBIENT % entered, **settings)
    assert (without["entered"], ambient["entered"]) == (False, True)
    assert ambient["own"] == without["own"]

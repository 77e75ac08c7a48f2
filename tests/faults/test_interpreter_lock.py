"""PyTorch takes Python's lock (GIL) inside of plain C++ for what only Python holds: nobody waits for us with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.interpreter_lock_programs import OTHERS

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("other", OTHERS)
def test_nobody_waits_for_the_runtime_with_the_interpreter_s_lock(other: str) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "tests.faults.interpreter_lock_programs",
            other,
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,  # it hung for good
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0

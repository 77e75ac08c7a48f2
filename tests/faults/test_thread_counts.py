"""How many threads a thread uses is its own: to rebuild on it leaves that as it was, told or not yet told."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.faults.thread_count_programs import PROGRAMS

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """What a process that begins with two threads found wrong, by program."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.thread_count_programs"],
        env=os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PROGRAMS)
def test_backward_on_a_thread(found: dict[str, str], name: str) -> None:
    assert found[name] == ""

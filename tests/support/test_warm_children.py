"""Programs forked from a warm process come to what programs come to that are started as usual."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm_children

ROOT = Path(__file__).resolve().parents[2]
TOLD = """
import os, sys
import torch
print(__name__, globals().get("__file__"), sys.argv, sys.orig_argv[1:], sys.path[0], os.getcwd())
print(os.environ.get("MARK"), torch.get_num_threads())
print("trouble", file=sys.stderr)
"""


def env(**more: str) -> dict[str, str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    return clean | {"PYTHONPATH": str(ROOT)} | more


def both(arguments: list[str], cwd: Path, **variables: str) -> list[tuple[int, str, str]]:
    """Exit status, output and errors of a program: forked, and started as usual."""
    forked = warm_children.run(arguments, cwd=cwd, env=env(**variables), timeout=60)
    usual = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env(**variables),
        capture_output=True,
        text=True,
        timeout=60,
    )
    return [(done.returncode, done.stdout, done.stderr) for done in (forked, usual)]


def test_a_script_is_told_the_same(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "told.py").write_text(TOLD)
    arguments = ["inner/told.py", "--two", "words here"]
    forked, usual = both(arguments, tmp_path, MARK="x", OMP_NUM_THREADS="1")
    assert forked == usual
    assert (
        usual[1].startswith("__main__ ") and "['inner/told.py', '--two', 'words here']" in usual[1]
    )


def test_code_and_modules_are_told_the_same(tmp_path: Path) -> None:
    forked, usual = both(["-c", TOLD, "a"], tmp_path, OMP_NUM_THREADS="2")
    assert forked == usual
    (tmp_path / "told.py").write_text(TOLD)
    forked, usual = both(["-m", "told", "a"], tmp_path, OMP_NUM_THREADS="2")
    assert forked == usual


ENDS = {
    "registered": "import atexit; atexit.register(print, 'bye'); print('hello')",
    "a thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    "a status": "raise SystemExit(3)",
    "a word": "import sys; sys.exit('gone')",
    "at once": "import os; os._exit(5)",
    "a signal": f"import os; os.kill(os.getpid(), {int(signal.SIGTERM)})",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_the_same(tmp_path: Path, code: str) -> None:
    forked, usual = both(["-c", code], tmp_path)
    assert forked == usual


def test_an_error_is_told_at_its_line(tmp_path: Path) -> None:
    forked, usual = both(["-c", "x = 1\nx / 0"], tmp_path)
    assert forked[:2] == usual[:2] == (1, "")
    for told in (forked[2], usual[2]):
        assert told.startswith("Traceback (most recent call last):\n")
        assert told.endswith(
            'File "<string>", line 2, in <module>\nZeroDivisionError: division by zero\n'
        )


def test_the_runtime_starts_by_the_variables_of_the_program(tmp_path: Path) -> None:
    code = "import torch; from delta_runtime.entered import entered; print(entered() is not None)"
    for budget in ("off", "90%"):
        variables = {"DELTA_BUDGET": budget, "DELTA_REPORT": "off"}
        forked, usual = both(["-c", code], tmp_path, **variables)
        assert forked == usual == (0, f"{budget != 'off'}\n", "")


SLEEPS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def is_gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_what_takes_too_long_is_killed_and_the_next_one_runs(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired) as told:
        warm_children.run(["-c", SLEEPS], cwd=tmp_path, env=env(), timeout=5)
    assert is_gone(int(str(told.value.stdout)))
    done = warm_children.run(["-c", "print(2)"], cwd=tmp_path, env=env(), timeout=60)
    assert done.stdout == "2\n"


def test_it_is_killed_where_the_wait_for_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []
    answer = warm_children._Server._answer

    def cut(self) -> int:
        if pids:
            raise KeyboardInterrupt
        pids.append(answer(self))
        return pids[0]

    with monkeypatch.context() as patch:
        patch.setattr(warm_children._Server, "_answer", cut)
        with pytest.raises(KeyboardInterrupt):
            warm_children.run(["-c", SLEEPS], cwd=tmp_path, env=env(), timeout=60)
    assert is_gone(pids[0])
    done = warm_children.run(["-c", "print(2)"], cwd=tmp_path, env=env(), timeout=60)
    assert done.stdout == "2\n"


def test_options_of_the_interpreter_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no options"):
        warm_children.run(["-W", "error", "-c", "pass"], cwd=tmp_path, env=env(), timeout=60)

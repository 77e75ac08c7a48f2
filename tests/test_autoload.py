"""Starting from the environment: when it starts, when it stays off, and that it never raises."""

import importlib
import os
import subprocess
import sys
import textwrap
import types
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

import delta_runtime_autoload as autoload
from delta_runtime.config import VARIABLES
from delta_runtime.core.cgroup import cgroup_cores, cgroup_limit_bytes

ROOT = Path(__file__).resolve().parents[1]
TRAIN = ["python", "train.py"]


class Starts:
    """Stands for delta_runtime.ambient and counts how often it is started."""

    def __init__(self, monkeypatch):
        self.count = 0
        self.error = None
        module = types.ModuleType("delta_runtime.ambient")
        module.start_ambient = self._start
        monkeypatch.setitem(sys.modules, "delta_runtime.ambient", module)

    def _start(self):
        self.count += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def starts(monkeypatch):
    for variable in VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(autoload, "_DONE", False)
    monkeypatch.setattr(autoload, "_PENDING", False)
    monkeypatch.setattr(sys, "orig_argv", TRAIN)
    return Starts(monkeypatch)


def test_starts_when_there_is_a_budget(starts, monkeypatch):
    monkeypatch.setenv("DELTA_BUDGET", "50%")
    autoload._autoload()
    assert starts.count == 1


@pytest.mark.parametrize("text", [None, "", " ", "off", "OFF"])
def test_without_a_budget_nothing_is_imported(starts, monkeypatch, text):
    if text is not None:
        monkeypatch.setenv("DELTA_BUDGET", text)
    monkeypatch.setattr(autoload, "_start", lambda: pytest.fail("started"))
    autoload._autoload()


@pytest.mark.parametrize("text", ["0", "-1", "10 parsecs", "400%"])
def test_a_bad_budget_gives_one_clear_warning(starts, monkeypatch, text):
    monkeypatch.setenv("DELTA_BUDGET", text)
    with pytest.warns(RuntimeWarning, match="stays off.*DELTA_BUDGET") as caught:
        autoload._autoload()
    assert len(caught) == 1
    assert repr(text) in str(caught[0].message)
    assert starts.count == 0


def test_a_failing_start_gives_one_clear_warning(starts, monkeypatch):
    monkeypatch.setenv("DELTA_BUDGET", "1GiB")
    starts.error = OSError("no such device")
    with pytest.warns(RuntimeWarning, match="stays off: OSError: no such device") as caught:
        autoload._autoload()
    assert len(caught) == 1


def test_a_missing_extension_gives_a_warning(starts, monkeypatch):
    monkeypatch.setenv("DELTA_BUDGET", "1GiB")
    monkeypatch.setitem(sys.modules, "delta_runtime.ambient", None)
    with pytest.warns(RuntimeWarning, match="stays off: ModuleNotFoundError"):
        autoload._autoload()


def test_it_does_not_raise_where_warnings_are_errors(starts, monkeypatch, capsys):
    monkeypatch.setenv("DELTA_BUDGET", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autoload._autoload()
    assert "stays off" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"],
        ["python", "-c", "from multiprocessing.forkserver import main; main(3)"],
        ["python", "/venv/bin/torchrun", "--nproc-per-node=2", "train.py"],
        ["python", "-X", "faulthandler", "-u", "bin/torchrun", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["python", "/x/site-packages/torch/distributed/run.py", "train.py"],
        ["C:\\python.exe", "C:\\Scripts\\torchrun.exe", "train.py"],
        ["python", "/venv/bin/accelerate", "launch", "train.py"],
        ["python", "/x/torch/_inductor/compile_worker/__main__.py", "--workers=2"],
    ],
)
def test_helper_processes_stay_off(starts, monkeypatch, command):
    monkeypatch.setenv("DELTA_BUDGET", "1GiB")
    monkeypatch.setattr(sys, "orig_argv", command)
    autoload._autoload()
    assert starts.count == 0


@pytest.mark.parametrize(
    "command",
    [
        ["python"],
        ["python", "-"],
        ["python", "-c", "import torch"],
        ["python", "-u", "train.py", "--launcher", "torchrun"],
        ["python", "-m", "trainer", "torch.distributed.run"],
        ["python", "my_torchrun.py"],
        ["python", "-W", "ignore", "train.py"],
    ],
)
def test_training_processes_start(starts, monkeypatch, command):
    monkeypatch.setenv("DELTA_BUDGET", "1GiB")
    monkeypatch.setattr(sys, "orig_argv", command)
    autoload._autoload()
    assert starts.count == 1


def test_a_half_imported_package_is_started_once_it_is_whole(starts, monkeypatch):
    monkeypatch.setenv("DELTA_BUDGET", "1GiB")
    half = types.ModuleType("delta_runtime.record")
    half.__spec__ = ModuleSpec("delta_runtime.record", None)
    half.__spec__._initializing = True
    monkeypatch.setitem(sys.modules, "delta_runtime.record", half)
    autoload._autoload()
    assert starts.count == 0
    autoload.resume()
    autoload.resume()
    assert starts.count == 1


def test_resume_without_a_postponed_start_does_nothing(starts, monkeypatch):
    monkeypatch.setenv("DELTA_BUDGET", "1GiB")
    autoload.resume()
    assert starts.count == 0


def test_importlib_still_marks_modules_that_are_being_imported(tmp_path, monkeypatch):
    """Rule 3 leans on a private attribute of importlib; this fails when it goes away."""
    (tmp_path / "half_way.py").write_text(
        "import sys\nWAS_HALF = sys.modules[__name__].__spec__._initializing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("half_way").WAS_HALF


def test_the_command_line_keeps_it_from_starting_twice(starts, monkeypatch):
    monkeypatch.setenv("DELTA_BUDGET", "1GiB")
    autoload.hold()
    autoload._autoload()
    assert starts.count == 0


# --- in processes of their own --------------------------------------------------------------------

# A stand-in for torch whose import ends as torch's does, and a stand-in for the runtime.
FAKE_TORCH = "import delta_runtime_autoload\ndelta_runtime_autoload._autoload()\n"
FAKE_RUNTIME = """
import torch

import delta_runtime_autoload
delta_runtime_autoload.resume()
"""
FAKE_AMBIENT = """
import torch

def start_ambient():
    import delta_runtime.runtime
    print("started", flush=True)

import delta_runtime_autoload
delta_runtime_autoload.resume()
"""


@pytest.fixture
def site(tmp_path):
    """A folder with the real configuration and autoload, a fake torch and a fake runtime."""
    package = tmp_path / "delta_runtime"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "core").symlink_to(ROOT / "delta_runtime" / "core")
    (package / "config.py").symlink_to(ROOT / "delta_runtime" / "config.py")
    (package / "__main__.py").symlink_to(ROOT / "delta_runtime" / "__main__.py")
    (package / "cli").symlink_to(ROOT / "delta_runtime" / "cli")
    (package / "runtime.py").write_text(FAKE_RUNTIME)
    (package / "ambient.py").write_text(FAKE_AMBIENT)
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "delta_runtime_autoload.py").symlink_to(ROOT / "delta_runtime_autoload.py")
    return tmp_path


def run_in(site, *command, budget="1GiB"):
    environ = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    environ |= {"PYTHONPATH": str(site)} | ({"DELTA_BUDGET": budget} if budget else {})
    return subprocess.run(
        [sys.executable, *command],
        cwd=site,
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "program",
    [
        "import torch",
        "import delta_runtime; import torch",
        "import torch; import delta_runtime.runtime",
        "import delta_runtime.runtime",
        "from delta_runtime.ambient import start_ambient; import torch",
    ],
)
def test_it_starts_once_whatever_is_imported_first(site, program):
    done = run_in(site, "-c", program)
    assert (done.stdout, done.stderr) == ("started\n", "")


def test_spawned_children_stay_off(site):
    (site / "train.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing
            import torch  # again in each child, while it prepares its main module

            def work():
                print("worked", flush=True)

            if __name__ == "__main__":
                for method in ("spawn", "forkserver"):
                    child = multiprocessing.get_context(method).Process(target=work)
                    child.start()
                    child.join()
            """
        )
    )
    done = run_in(site, "train.py")
    assert (done.stdout, done.stderr) == ("started\nworked\nworked\n", "")


def test_run_starts_once_and_gives_the_script_its_own_arguments(site):
    (site / "scripts").mkdir()
    (site / "scripts" / "beside.py").write_text("NAME = 'beside'\n")
    (site / "scripts" / "train.py").write_text(
        "import os, sys, torch, beside\n"
        "print(__name__, sys.argv, beside.NAME, os.environ['DELTA_BUDGET'])\n"
        "print(os.environ['DELTA_STRICT'])\n"
    )
    script = os.path.join("scripts", "train.py")
    command = [
        "-m",
        "delta_runtime",
        "run",
        "--strict",
        "--budget",
        "2GiB",
        script,
        "--budget",
        "x",
    ]
    done = run_in(site, *command, budget=None)
    told = ["started", f"__main__ ['{script}', '--budget', 'x'] beside 2GiB", "1"]
    assert (done.stdout.splitlines(), done.stderr) == (told, "")


def test_run_takes_a_module(site):
    (site / "trainer.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    command = ["-m", "delta_runtime", "run", "--budget=auto", "-m", "trainer", "--", "-m", "x"]
    done = run_in(site, *command, budget=None)
    assert (done.stdout, done.stderr) == ("started\n__main__ ['--', '-m', 'x']\n", "")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--budget", "10 parsecs", "train.py"], "unknown unit 'parsecs'"),
        (["--budget", "0", "train.py"], "at least one byte"),
        (["train.py"], "There is no budget"),
        (["--budget", "1GiB"], "name a script"),
        (["--budget", "1GiB", "-m"], "name a script"),
        (["--budget", "1GiB", "nowhere.py"], "there is no 'nowhere.py'"),
        (["--bugdet", "1GiB", "train.py"], "--bugdet"),
    ],
)
def test_run_refuses_a_wrong_call_and_runs_nothing(site, arguments, told):
    (site / "train.py").write_text("print('ran')\n")
    done = run_in(site, "-m", "delta_runtime", "run", *arguments, budget=None)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_works_without_torch_and_extension(site):
    (site / "torch.py").write_text("raise ImportError('broken')\n")
    done = run_in(site, "-m", "delta_runtime", "doctor", budget="10 parsecs")
    assert (done.returncode, done.stderr) == (1, "")
    for told in ("pip install torch", "extension", "RAM", "disk tier", "parsecs", "3 missing"):
        assert told in done.stdout


def control_groups(folder: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Return where they are mounted, and the file that names those of this process."""
    (folder / "membership").write_text(membership)
    for name, text in files.items():
        (folder / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "root" / name).write_text(text + "\n")
    return folder / "root", folder / "membership"


@pytest.mark.parametrize(
    ("membership", "limits", "limit_bytes"),
    [
        ("0::/job", {"job/memory.max": "1000", "memory.max": "2000"}, 1000),
        ("0::/job", {"job/memory.max": "max", "memory.max": "2000"}, 2000),
        ("0::/job", {"job/memory.max": "max"}, None),
        ("0::/host/only", {"memory.max": "3000"}, 3000),
        ("4:cpu:/\n3:memory:/job", {"memory/job/memory.limit_in_bytes": "500"}, 500),
        ("3:memory:/", {"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ("", {}, None),
    ],
)
def test_doctor_finds_the_control_groups_limit(tmp_path, membership, limits, limit_bytes):
    assert cgroup_limit_bytes(*control_groups(tmp_path, membership, limits)) == limit_bytes


@pytest.mark.parametrize(
    ("membership", "limits", "cores"),
    [
        ("0::/job", {"job/cpu.max": "250000 100000", "cpu.max": "max 100000"}, 2.5),
        ("0::/job", {"job/cpu.max": "max 100000"}, None),
        ("0::/host/only", {"cpu.max": "100000 100000"}, 1.0),
        (
            "4:cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100"},
            None,
        ),
        (
            "4:cpu:/job",
            {"cpu/job/cpu.cfs_quota_us": "300", "cpu/job/cpu.cfs_period_us": "100"},
            3.0,
        ),
        ("", {}, None),
    ],
)
def test_the_cores_that_control_groups_leave(tmp_path, membership, limits, cores):
    assert cgroup_cores(*control_groups(tmp_path, membership, limits)) == cores


def test_a_bad_budget_leaves_an_unmodified_script_alone():
    """With the real torch: one warning, from whichever way the entry point is found."""
    program = (
        "import delta_runtime_autoload as a; import torch; a._autoload(); print(torch.ones(2))"
    )
    done = run_in(ROOT, "-c", program, budget="10 parsecs")
    assert done.stdout == "tensor([1., 1.])\n"
    assert done.stderr.count("stays off") == 1
    assert "DELTA_BUDGET: unknown unit 'parsecs'" in done.stderr

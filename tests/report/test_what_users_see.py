"""What a user reads: the closing sentence, lines per step, warnings and where they point, several processes, children.

Most of it in processes of their own, started as a user starts a script with DELTA_* variables. Does not cover: what
the variables mean (test_config.py), when the ambient runtime starts (test_autoload.py).
"""

from __future__ import annotations

import logging
import os
import subprocess
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime import device as device_module
from delta_runtime.config import Config, Launched
from delta_runtime.report.step_report import StepReport, StepTotals
from tests.support import warm_children
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.nets import net

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20

SCRIPT = """
import sys
import torch
import delta_runtime_autoload
delta_runtime_autoload._autoload()   # what torch does where the package is installed
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(steps=4, rows=1024):
    for _ in range(steps):
        model(torch.ones(rows, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""Needs 4 MiB for weights and gradients, and 17 MiB for activations."""


def run(
    program: str, tmp_path: Path, *arguments: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """A script of a user, with these arguments and variables."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + textwrap.dedent(program))
    clean = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    return warm_children.run(
        [script, *arguments],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(ROOT)} | environ,
        timeout=150,
    )


def line_of(program: str, words: str) -> int:
    """The number of a line in the script that `run` writes."""
    lines = (SCRIPT + textwrap.dedent(program)).splitlines()
    return next(number for number, line in enumerate(lines, 1) if words in line)


# ------------------------------------------------------------------------------ the closing sentence


def test_the_closing_sentence_is_about_all_steps_and_not_a_last_odd_one():
    model = net(activation=nn.Tanh)
    runtime = delta.Runtime(cpu_pool.allocated_bytes() + int(2.7e6), device="cpu")
    for rows in (1024, 1024, 1024, 8):
        with runtime.step():
            model(torch.ones(rows, 64)).square().mean().backward()
    report = runtime.report()
    assert report.last.drops == 0 and report.totals.drops > 0
    assert report.verdict().startswith("Freed ") and "over 4 steps" in report.verdict()
    runtime.close()


def a_report(**totals: object) -> StepReport:
    counted = StepTotals(**totals)  # type: ignore[arg-type]
    return StepReport(
        budget_bytes=10 * MIB, policy="auto", device="cpu", last=StepTotals(steps=1), totals=counted
    )


def test_a_budget_passed_once_is_not_one_that_was_passed_always():
    passed = a_report(steps=500, peak_bytes=12 * MIB, over_budget_steps=1)
    assert "passed by up to 2.00 MiB in 1 of 500 steps" in passed.verdict()
    one = a_report(steps=1, peak_bytes=12 * MIB, over_budget_steps=1)
    assert "passed by 2.00 MiB: beside" in one.verdict()
    fits = a_report(steps=3, peak_bytes=5 * MIB, packed_bytes=MIB)
    assert fits.verdict() == (
        "Nothing had to be evicted: the highest peak of 3 steps, 5.00 MiB, fits the budget."
    )
    kept = a_report(steps=3, peak_bytes=MIB, kept_bytes={"small": 100, "source": 5})
    assert "smaller than min_bytes" in kept.verdict()


def test_steps_over_the_budget_are_counted():
    model = net(activation=nn.Tanh)
    # Room for the second step only.
    runtime = delta.Runtime(cpu_pool.allocated_bytes() + int(0.9e6), device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (2048, 8, 8):
            with runtime.step():
                model(torch.ones(rows, 64)).square().mean().backward()
            model.zero_grad()
    assert runtime.report().totals.over_budget_steps == 1
    assert "in 1 of 3 steps" in runtime.report().verdict()
    runtime.close()


# ------------------------------------------------------------------------------- several processes


def test_processes_that_share_the_memory_share_auto_and_percentages(monkeypatch):
    device = torch.device("cpu")
    alone = {
        each: device_module.resolve_budget(Config(budget=each), device)
        for each in ("auto", "50%", "3GiB")
    }
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    together = {each: device_module.resolve_budget(Config(budget=each), device) for each in alone}
    assert together["3GiB"] == alone["3GiB"]
    assert together["50%"] == alone["50%"] // 4
    assert together["auto"] == pytest.approx(alone["auto"] / 4, rel=0.2)
    with cpu_pool.capacity("1GiB"):  # of this process's own pool
        assert device_module.resolve_budget(Config(budget="50%"), device) == 512 * MIB


def test_launchers_and_what_they_say():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert Launched.from_environment(torchrun) == Launched(5, 8, 1, 4)
    assert (
        Launched.from_environment(torchrun)
        .text()
        .startswith("rank 5 of 8 (1 of 4 on this machine), process ")
    )
    mpi = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")}
    assert Launched.from_environment(mpi) == Launched(2, 2, 2, 2)
    assert Launched.from_environment({}) == Launched()
    assert Launched.from_environment({"RANK": "0", "WORLD_SIZE": "1"}).text() == ""
    assert Launched.from_environment({"WORLD_SIZE": "many", "RANK": ""}) == Launched()


def test_each_of_several_processes_says_which_it_is(tmp_path):
    done = run(
        "train()",
        tmp_path,
        DELTA_BUDGET="15MiB",
        RANK="1",
        WORLD_SIZE="2",
        LOCAL_RANK="1",
        LOCAL_WORLD_SIZE="2",
        DELTA_REPORT="step",
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2, process " in done.stderr
    assert "delta_runtime: rank 1 of 2, step 4: peak" in done.stderr
    alone = run("train()", tmp_path, DELTA_BUDGET="15MiB")
    assert "rank" not in alone.stderr and "policy auto on cpu" in alone.stderr


CHILDREN = """
import multiprocessing, os, subprocess
from torch.utils.data import DataLoader, Dataset

class Samples(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        w = torch.ones(8, 8, requires_grad=True)
        return (w * index).detach() + 1

def work(number):
    return torch.ones(3).sum().item() + number

if __name__ == "__main__":
    train(2)
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method)
        assert len(list(DataLoader(Samples(), num_workers=1, multiprocessing_context=context))) == 8
        with context.Pool(1) as pool:
            assert pool.map(work, [1, 2]) == [4, 5]
    if os.fork() == 0:
        train(1)
        sys.exit(0)   # with atexit, and all
    os.wait()
    try:
        import joblib
        assert joblib.Parallel(n_jobs=2)(joblib.delayed(work)(n) for n in (1, 2)) == [4, 5]
    except ImportError:
        pass
    subprocess.run([sys.executable, "-c", "import torch, delta_runtime_autoload as a; a._autoload();"
                    "torch.ones(3).sum()"], check=True)
    print("done")
"""


@pytest.mark.timeout(300)
def test_children_that_only_load_data_say_nothing(tmp_path):
    done = run(CHILDREN, tmp_path, "fork", "spawn", "forkserver", DELTA_BUDGET="64MiB")
    assert done.stdout == "done\n", done.stderr
    assert done.stderr.count("policy auto on cpu") == 1  # the parent's report
    others = [line for line in done.stderr.splitlines() if "arning" in line]
    assert not [line for line in others if "delta" in line]
    bad = run(CHILDREN, tmp_path, "fork", "spawn", "forkserver", DELTA_BUDGET="5 parsecs")
    # The parent's, and that of a program of its own, which the last child is.
    assert bad.stderr.count("stays off") == 2


# ---------------------------------------------------------------------------------- lines of steps


def test_lines_of_steps_are_shown_without_logging_set_up(tmp_path):
    done = run("train(3)", tmp_path, DELTA_BUDGET="15MiB", DELTA_REPORT="step")
    lines = [line for line in done.stderr.splitlines() if line.startswith("delta_runtime: step")]
    assert len(lines) == 3 and "of 15.00 MiB" in lines[0]


def test_lines_of_steps_go_to_the_log_where_there_is_one(tmp_path):
    program = """
        import logging
        logging.basicConfig(level=logging.INFO, format="LOG %(message)s")
        train(3)
        logging.getLogger().setLevel(logging.WARNING)
        train(2)
    """
    done = run(program, tmp_path, DELTA_BUDGET="15MiB", DELTA_REPORT="step")
    lines = done.stderr.splitlines()
    assert sum(line.startswith("LOG step") for line in lines) == 3
    assert sum(line.startswith("delta_runtime: step") for line in lines) == 2


# --------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize("way", ["context", "step", "DELTA_BUDGET"])
def test_a_warning_points_at_the_line_of_the_program(way, tmp_path):
    if way == "DELTA_BUDGET":
        program = "train(2)"
        wanted = (
            line_of(program, "model(torch.ones(rows, 256))"),
            line_of(program, "optimizer.step()"),
        )
    elif way == "step":
        program = """
            import delta_runtime
            runtime = delta_runtime.Runtime("8MiB", device="cpu")
            for _ in range(3):
                with runtime.step():  # here
                    model(torch.ones(1024, 256)).sum().backward()
        """
        wanted = (line_of(program, "# here"),)
    else:
        program = """
            import delta_runtime
            with delta_runtime.Runtime("5MiB", device="cpu") as runtime:
                model(torch.ones(1024, 256)).sum().backward()
                torch.zeros(3)  # here
        """
        wanted = (line_of(program, "# here"),)
    environ = {"DELTA_BUDGET": "6MiB", "DELTA_REPORT": "off"} if way == "DELTA_BUDGET" else {}
    done = run(program, tmp_path, **environ)
    told = [line for line in done.stderr.splitlines() if "was passed" in line]
    assert len(told) == 1, done.stderr
    places = [f"{tmp_path / 'train.py'}:{number}: RuntimeWarning" for number in wanted]
    assert told[0].startswith(tuple(places)), told[0]


def test_a_warning_in_a_library_points_at_the_program_that_called_it(tmp_path, monkeypatch):
    """A trainer's own lines say nothing to who wrote the program."""
    from delta_runtime.core import warn as module

    library = tmp_path / "library"
    library.mkdir()
    (library / "trainer_of_a_test.py").write_text("def call(f):\n    f()\n")
    monkeypatch.syspath_prepend(str(library))
    prefixes = module._prefixes()
    monkeypatch.setattr(module, "_prefixes", lambda: (prefixes[0], (*prefixes[1], str(library))))
    import trainer_of_a_test

    with pytest.warns(RuntimeWarning, match="told") as caught:
        trainer_of_a_test.call(lambda: module.warn("told"))
    assert caught[0].filename == __file__


# ------------------------------------------------------------------------- variables that are wrong


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("5", '"5GiB" or "5%"'),
        ("50", '"50GiB" or "50%"'),
        ("512", '"512GiB"'),
        ("8192", '"8192MiB"'),
        ("5KB", '"5GiB" or "5%"'),
        ("1023KiB", '"1023GiB"'),
    ],
)
def test_a_budget_without_its_unit_is_asked_about(text, meant):
    with pytest.raises(delta.UsageError) as caught:
        Config.from_environment({"DELTA_BUDGET": text})
    assert str(caught.value).startswith("DELTA_BUDGET: ")
    assert f"Did you mean {meant}?" in str(caught.value)


@pytest.mark.parametrize("text", ["1MiB", "1048576", "auto", "50%", "0.5", "off"])
def test_other_budgets_are_taken_as_they_are(text):
    Config.from_environment({"DELTA_BUDGET": text})


def test_a_budget_of_five_bytes_gives_one_warning_and_stays_off(tmp_path):
    done = run("train(); print('trained')", tmp_path, DELTA_BUDGET="5")
    assert done.stdout == "trained\n"
    told = [line for line in done.stderr.splitlines() if "RuntimeWarning" in line]
    assert len(told) == 1 and "stays off" in told[0]
    assert '"5GiB"' in done.stderr
    assert "policy" not in done.stderr


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"DELTA_BUGDET": "1GiB"}, "There is no variable DELTA_BUGDET; did you mean DELTA_BUDGET?"),
        (
            {"DELTA_BUDGET": "1GiB", "DELTA_POLICIES": "x"},
            "There is no variable DELTA_POLICIES; did you mean DELTA_POLICY?",
        ),
        ({"DELTA_BUDGET": "1GiB", "DELTA_ZZZ": "x"}, "There is no variable DELTA_ZZZ."),
        ({"DELTA_BUDGET": "1GiB", "DELTA_PAGER": "less"}, ""),  # git-delta's
        ({"DELTA_POLICIES": "x"}, ""),  # without a budget it has no effect
        ({"DELTA_BUDGET": "1GiB", "DELTA_ZZZ": "x", "LOCAL_RANK": "1"}, ""),  # rank 0 says it
        ({"DELTA_BUDGET": "1GiB"}, ""),
    ],
)
def test_an_unknown_variable_is_told_with_the_nearest_one(environ, told, tmp_path):
    done = run("", tmp_path, **environ)
    warned = [line for line in done.stderr.splitlines() if "There is no variable" in line]
    assert len(warned) == bool(told), done.stderr
    assert told in "".join(warned)


# ----------------------------------------------------------------------------------------- strict


def test_strict_in_the_environment_raises_what_strict_in_code_raises(tmp_path):
    program = """
        import delta_runtime as delta
        for attempt in range(3):
            try:
                train(2)
                print("no error")
            except delta.BudgetInfeasible as error:
                print(type(error).__mro__.index(torch.OutOfMemoryError) > 0, error.asked_bytes)
                assert error.lower_bound_bytes > error.asked_bytes, str(error)
                assert error.lower_bound_op and error.lower_bound_op in str(error)
                assert "raise the budget" in str(error)
                del error
            optimizer.zero_grad()
        train(3, rows=64)   # a smaller batch fits: nothing is stuck
        print("trained")
    """
    done = run(program, tmp_path, DELTA_BUDGET="7MiB", DELTA_STRICT="1", DELTA_REPORT="off")
    assert done.stdout.splitlines() == [f"True {7 * MIB}"] * 3 + ["trained"], done.stderr
    uncaught = run("train()", tmp_path, DELTA_BUDGET="7MiB", DELTA_STRICT="1", DELTA_REPORT="off")
    assert uncaught.returncode == 1
    assert "The budget of 7.00 MiB cannot be met" in uncaught.stderr


def test_an_optimizer_that_raises_leaves_nothing_stuck():
    """While it steps nothing is taped; the next forward has to be, also where no step begins anew."""

    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            raise ValueError

    model = net(activation=nn.Tanh)
    optimizer = Failing(model.parameters(), lr=0.1)
    drops = 0
    with delta.Runtime("100%", device="cpu", policy="stress_drop_all") as runtime:
        for _ in range(3):
            model(torch.ones(512, 64)).square().mean().backward()
            now = runtime.session.counters().drops
            assert now > drops
            drops = now
            with pytest.raises(ValueError):
                optimizer.step()
    runtime.close()


def test_a_real_out_of_memory_is_still_one():
    """The capacity of the pool is no budget."""
    before = list(logging.getLogger("delta_runtime").handlers)
    with cpu_pool.capacity(cpu_pool.allocated_bytes() + MIB):
        with pytest.raises(torch.OutOfMemoryError, match="CPU pool out of memory") as caught:
            torch.ones(MIB)
    assert not isinstance(caught.value, delta.BudgetInfeasible)
    assert logging.getLogger("delta_runtime").handlers == before


def test_every_public_name_is_there():
    for name in delta.__all__:
        assert getattr(delta, name) is not None
    assert set(delta._HOME) <= set(delta.__all__)

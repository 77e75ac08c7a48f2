"""What is asked wrongly gives one clear error or warning, and leaves training as it was.

Covers: arguments of Runtime and of the CPU pool, wrong orders of calls, and bad DELTA_* variables with a script that
knows nothing of delta_runtime. How single settings are read is tested in test_config.py and core/test_units.py.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import _C, cpu_pool
from delta_runtime.entered import entered
from tests.support import warm_children
from tests.support.bitwise import Snapshot, assert_same_bits, gradients, parameters, random_state
from tests.support.fixtures import one_thread  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


def build() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(256, 64)).square().mean()


def one_step(model: nn.Module) -> Snapshot:
    model.zero_grad(set_to_none=True)
    loss_of(model).backward()
    return gradients(model) | random_state()


def is_clean() -> bool:
    return (
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and _C.cpu_pool.soft_limit_bytes() == 0
        and entered() is None
    )


@contextlib.contextmanager
def refused(*told: str):
    """The block raises UsageError with these words and changes nothing; training goes on as before."""
    model = build()
    before = parameters(model) | random_state()
    with pytest.raises(delta.UsageError) as caught:
        yield
    for words in told:
        assert words in str(caught.value)
    assert is_clean()
    assert_same_bits(parameters(model) | random_state(), before)
    assert_same_bits(one_step(model), one_step(build()))
    with delta.Runtime("100%", policy="stress_drop_all") as runtime:
        assert_same_bits(one_step(build()), one_step(build()))
    assert runtime.report().totals.drops > 0


# ---------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        (0, "at least one byte"),
        ("0", "at least one byte"),
        ("0%", "share"),
        (-1, "negative"),
        ("-5GiB", "negative"),
        (-0.5, "share"),
        (0.0, "share"),
        ("10 parsecs", "unknown unit 'parsecs'"),
        ("a lot", "not a number"),
        ("", "not a number"),
        ("400%", "share"),
        (1.5, "share"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (True, "bool"),
        (None, "NoneType"),
        ([1], "list"),
        (2**62, "more than the device has"),
        ("900PiB", "more than the device has"),
        (2**63, "2**63"),
    ],
)
def test_a_bad_budget(budget, told):
    with refused("budget", told, repr(budget)):
        delta.Runtime(budget, device="cpu")


def test_more_than_the_capacity_of_the_pool():
    with cpu_pool.capacity("1GiB"), refused("more than the device has", "1.00 GiB"):
        delta.Runtime("2GiB", device="cpu")


@pytest.mark.parametrize("limit", [0, -1, "10 parsecs", "", 1.5])
def test_a_bad_capacity(limit):
    before = cpu_pool.capacity_bytes()
    with refused("capacity"):
        cpu_pool.set_capacity(limit)
    assert cpu_pool.capacity_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"policy": "recompte"}, ("policy", "'recompte'", "Did you mean recompute")),
        ({"policy": "nonsense"}, ("policy", "Choose one of auto, recompute, off")),
        ({"policy": ""}, ("policy",)),
        ({"device": "tpu9"}, ("device", "'tpu9'")),
        ({"device": "meta"}, ("device", "'meta'")),
        ({"verify": "sometimes"}, ("verify", "always, first, off")),
        ({"min_bytes": -1}, ("min_bytes", "negative")),
        ({"min_bytes": "10 parsecs"}, ("min_bytes", "parsecs")),
        ({"strict": "maybe"}, ("strict", "'maybe'")),
        ({"host_budget": "100TiB"}, ("host_budget", "more than the machine has")),
        ({"host_budget": 0}, ("host_budget",)),
        ({"policy": "swap"}, ("policy 'swap'", "no tier", "host_budget")),
        ({"disk_budget": "900TiB"}, ("disk_budget", "does not have the room", "free")),
        ({"disk_budget": 1}, ("disk_budget", "does not have the room")),
        ({"spill_dir": "/no/such/folder"}, ("spill_dir", "no such directory", "/no/such/folder")),
        ({"spill_dir": __file__}, ("spill_dir", "no such directory")),
        ({"spill_dir": "/proc"}, ("spill_dir", "no file can be made there")),
        ({"link_bytes_per_s": "pcie33"}, ("link_bytes_per_s", "Did you mean pcie3")),
        ({"link_bytes_per_s": -1.0}, ("link_bytes_per_s",)),
        ({"trace": "/no/such/folder/trace.json"}, ("trace", "/no/such/folder")),
    ],
)
def test_a_bad_argument(arguments, told):
    with refused(*told):
        delta.Runtime("1GiB", **arguments)


def test_errors_say_what_was_asked_and_what_to_change():
    with pytest.raises(delta.UsageError) as caught:
        delta.Runtime("10 parsecs")
    assert caught.value.asked == "'10 parsecs'"
    assert "GiB" in caught.value.change
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, delta.DeltaError)


def test_a_failed_runtime_inside_another_disturbs_nothing():
    model, expected = build(), one_step(build())
    torch.manual_seed(0)
    model = build()
    with delta.Runtime("100%", policy="stress_drop_all") as runtime:
        with pytest.raises(delta.UsageError):
            delta.Runtime(0)
        assert_same_bits(one_step(model), expected)
    assert runtime.report().totals.rebuilds > 0


# ------------------------------------------------------------------------------------------ orders of calls


def test_nested_runtimes():
    model, expected = build(), one_step(build())
    model = build()
    other = delta.Runtime("50%")
    with delta.Runtime("100%", policy="stress_drop_all") as runtime:
        with pytest.raises(delta.UsageError, match="another runtime is entered"), other:
            pass
        with pytest.raises(delta.UsageError, match="another runtime is entered"), other.step():
            pass
        assert_same_bits(one_step(model), expected)  # the outer one goes on
    assert runtime.report().totals.rebuilds > 0
    assert is_clean()
    with other.step():  # and the inner one can be used afterwards
        one_step(model)
    assert other.report().totals.steps == 1


def test_nested_steps():
    expected = one_step(build())
    model = build()
    runtime = delta.Runtime("100%", policy="stress_drop_all")
    with runtime.step():
        with pytest.raises(delta.UsageError, match="inside runtime.step"), runtime.step():
            pass
        assert_same_bits(one_step(model), expected)
    assert runtime.report().totals.steps == 1
    assert runtime.report().totals.rebuilds > 0
    assert is_clean()


def test_use_after_close():
    runtime = delta.Runtime("100%")
    with runtime.step():
        one_step(build())
    runtime.close()
    runtime.close()  # idempotent
    with refused("closed"):
        runtime.__enter__()
    with refused("closed"), runtime.step():
        pass
    assert runtime.report().totals.steps == 1  # what was, can still be asked


def test_backward_after_close():
    expected = build()
    loss_of(expected).backward()
    model = build()
    runtime = delta.Runtime("100%", policy="stress_drop_all")
    with runtime:
        loss = loss_of(model)
    runtime.close()
    assert runtime.report().totals.drops > 0
    loss.backward()
    assert_same_bits(gradients(model), gradients(expected))


def test_second_backward_is_the_error_that_it_always_was():
    model = build()
    with delta.Runtime("100%") as runtime:
        loss = loss_of(model)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
    assert is_clean()
    assert runtime.report().totals.steps == 1


def test_an_inplace_change_is_the_error_that_it_always_was():
    weight = torch.ones(64, 64, requires_grad=True)
    with delta.Runtime("100%") as runtime:
        y = torch.ones(256, 64) @ weight
        z = y.exp()
        z.add_(1)  # exp needs its result
        with pytest.raises(delta.InplaceModification, match="modified by an inplace operation"):
            z.sum().backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()
    runtime.close()
    assert is_clean()


def test_mark_written_of_nonsense():
    with delta.Runtime("100%"), pytest.raises(TypeError):
        delta.mark_written("no tensor")
    assert is_clean()


# ---------------------------------------------------------------------------------------- the environment


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """An environment in which `import torch` finds delta_runtime, whether it is installed or only here."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    path = [str(ROOT)]
    points = importlib.metadata.entry_points(group="torch.backends")
    if all(point.name != "delta_runtime" for point in points):
        folder = tmp_path_factory.mktemp("site") / "delta_runtime-0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: delta-runtime\nVersion: 0\n")
        (folder / "entry_points.txt").write_text(
            "[torch.backends]\ndelta_runtime = delta_runtime_autoload:_autoload\n"
        )
        path.append(str(folder.parent))
    environ["PYTHONPATH"] = os.pathsep.join([*path, environ.get("PYTHONPATH", "")])
    return environ


def run_script(environment: dict[str, str], **variables: str) -> subprocess.CompletedProcess[str]:
    arguments = ["scripts/train_plain.py", "--model", "tiny", "--steps", "2"]
    return warm_children.run(arguments, cwd=ROOT, env=environment | variables, timeout=240)


@pytest.fixture(scope="module")
def ordinary_output(environment) -> str:
    done = run_script(environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"DELTA_BUDGET": "10 parsecs"}, "DELTA_BUDGET: unknown unit 'parsecs'"),
        ({"DELTA_BUDGET": "900PiB"}, "more than the device has"),
        ({"DELTA_BUDGET": "50%", "DELTA_POLICY": "recompte"}, "Did you mean recompute"),
        ({"DELTA_BUDGET": "50%", "DELTA_SPILL_DIR": "x"}, "spill_dir: no such directory"),
    ],
    ids=["unit", "too much", "policy", "no directory"],
)
def test_bad_variables_leave_an_unmodified_script_alone(
    environment, ordinary_output, variables, told
):
    done = run_script(environment, **variables)
    assert (done.returncode, done.stdout) == (0, ordinary_output)
    assert done.stderr.count("delta_runtime stays off") == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "delta_runtime: policy" not in done.stderr  # no report: it was off


def test_a_budget_far_too_small_is_told_and_the_script_trains_on(environment, ordinary_output):
    done = run_script(environment, DELTA_BUDGET="1MiB")
    assert (done.returncode, done.stdout) == (0, ordinary_output)
    assert done.stderr.count("RuntimeWarning") == 1
    assert "the budget of 1.00 MiB was passed" in done.stderr
    assert "aten::" in done.stderr


def test_strict_ends_an_unmodified_script_with_the_floor(environment):
    done = run_script(environment, DELTA_BUDGET="1MiB", DELTA_STRICT="1")
    assert done.returncode == 1
    assert "BudgetInfeasible" in done.stderr
    assert "aten::" in done.stderr

"""The demo's own functions on a workload of milliseconds, and the plain script with and without DELTA_BUDGET."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from scripts import demo, train_plain
from scripts.workloads import TrainState, Workload, allocate_adamw_state
from tests.support.fixtures import one_thread  # noqa: F401

STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for _ in range(10):
            blocks += [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(0.1)]
        self.body = nn.Sequential(*blocks)

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.body(x).square().mean())


def build(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = Net().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    allocate_adamw_state(optimizer)
    return TrainState(
        model,
        optimizer,
        lambda index: {"x": torch.randn(1024, 64, generator=torch.Generator().manual_seed(index))},
    )


WORKLOAD = Workload("small", "a small network", build)


@pytest.fixture(autouse=True)
def no_capacity():
    cpu_pool.install()
    gc.collect()
    yield
    assert cpu_pool.capacity_bytes() is None


def test_the_demo_shows_what_it_promises(tmp_path, capsys):
    result = demo.Result(WORKLOAD)
    demo.demonstrate(result, STEPS, tmp_path)
    assert result.holds, result.checks
    assert set(result.checks) == {
        "the ordinary run dies at half",
        "losses equal, bit for bit",
        "weights and AdamW's state equal",
        "peak within the capacity",
    }
    assert result.inside_bytes <= result.budget_bytes == result.ordinary_bytes // 2
    assert 0 < result.activations_kept < 0.5 < result.activation_bytes / result.ordinary_bytes
    assert result.time_ratio > 0
    assert (tmp_path / "demo_small.png").stat().st_size > 10_000
    demo.show_results([result])
    told = capsys.readouterr().out
    for words in ("CPU pool out of memory", "calibrating", "delta_runtime: policy", "percent of"):
        assert words in told
    assert "NO" not in told


def test_the_demo_can_fail(tmp_path, monkeypatch):
    """Another loss, another weight, or a run that does not die: each is noticed."""
    state = build(0)
    expected = demo.bits_of(state)
    assert demo.first_difference(state, expected) == ""
    with torch.no_grad():
        state.model.body[0].weight[0, 0] = torch.nextafter(
            state.model.body[0].weight[0, 0], torch.tensor(9.0)
        )
    assert demo.first_difference(state, expected) == "body.0.weight"

    monkeypatch.setattr(demo, "die_at", lambda workload, capacity_bytes: "")
    seeds = iter([0, 0, 1])  # the managed run starts from elsewhere
    monkeypatch.setattr(demo, "save_plot", lambda *arguments: None)
    result = demo.Result(Workload("other", "differs", lambda seed: build(next(seeds))))
    demo.demonstrate(result, STEPS, tmp_path)
    assert not result.holds
    assert [promise for promise, kept in result.checks.items() if not kept] == [
        "the ordinary run dies at half",
        "losses equal, bit for bit",
        "weights and AdamW's state equal",
    ]


def test_the_exit_status_tells(monkeypatch):
    monkeypatch.setattr(demo, "show_results", lambda results: None)
    monkeypatch.setattr(demo, "demonstrate_environment", lambda result, steps: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    for kept in (True, False):
        monkeypatch.setattr(
            demo, "demonstrate", lambda result, steps, out, kept=kept: result.check("p", kept)
        )
        assert demo.main(["--model", "gpt"]) == (0 if kept else 1)

    def infeasible(result, steps, out):
        raise delta.BudgetInfeasible(10, 20)

    monkeypatch.setattr(demo, "demonstrate", infeasible)
    assert demo.main(["--model", "gpt"]) == 1


def test_dying_leaves_nothing_live():
    base_bytes = cpu_pool.allocated_bytes()
    assert "out of memory" in demo.die_at(WORKLOAD, base_bytes + 2**21)
    assert cpu_pool.allocated_bytes() == base_bytes
    assert demo.die_at(WORKLOAD, base_bytes + 2**30) == ""


def test_a_curve_follows_the_pool():
    base_bytes = cpu_pool.allocated_bytes()
    with demo.sampled() as curve:
        block = torch.empty(2**20)
        demo.time.sleep(0.05)
        del block
    assert curve.live_bytes[0] == curve.live_bytes[-1] == base_bytes
    assert base_bytes + 2**22 <= max(curve.live_bytes) <= base_bytes + 2**22 + 8192
    assert curve.seconds == sorted(curve.seconds)


@pytest.fixture
def entry_point(tmp_path, monkeypatch):
    """Lets `import torch` find delta_runtime in child processes where it is not installed."""
    path = [str(demo.ROOT)]
    if not demo.environment_works():
        folder = tmp_path / "site" / "delta_runtime-0.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: delta-runtime\nVersion: 0\n")
        (folder / "entry_points.txt").write_text(
            "[torch.backends]\ndelta_runtime = delta_runtime_autoload:_autoload\n"
        )
        path.append(str(folder.parent))
        monkeypatch.syspath_prepend(str(folder.parent))
    path.append(os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


def test_the_plain_script_knows_nothing_of_delta_runtime():
    source = (demo.ROOT / "scripts" / "train_plain.py").read_text()
    code = source.split('"""', 2)[2]
    assert "delta" not in code


def test_the_plain_script_under_delta_budget(entry_point, capsys):
    torch.set_num_threads(train_plain.THREADS)
    gc.collect()
    base_bytes = cpu_pool.allocated_bytes()
    state = train_plain.build_tiny(demo.SEED)
    peak_bytes = demo.train(state, 1).peak_bytes - base_bytes
    result = demo.Result(Workload("tiny", "the plain script's", train_plain.build_tiny))
    result.budget_bytes = peak_bytes // 2
    demo.demonstrate_environment(result, 4)
    told = capsys.readouterr().out
    assert result.holds, told
    assert "DELTA_BUDGET=" in told
    assert "Freed" in told  # and not for want of anything to do

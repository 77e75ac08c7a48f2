"""An estimate: a step is found, recorded dry, and told for a card."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import measured_card
from delta_runtime.cli.main import main
from delta_runtime.core.errors import NeedsValues, UsageError
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.dry_step import card_of, record_dry_step
from delta_runtime.entered import entered
from tests.support.fixtures import short_search  # noqa: F401

pytestmark = pytest.mark.usefixtures("short_search")

WIDTH, DEPTH, ROWS = 1024, 6, 4096
GIB = 1 << 30
WEIGHTS = DEPTH * (WIDTH * WIDTH + WIDTH) * 4
SAVED = DEPTH * ROWS * WIDTH * 4


def build():
    """Build a model and its optimizer; return the function that trains a step."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_and_train() -> None:
    """Do it all at once."""
    build()()


@pytest.mark.parametrize("step", [build, build_and_train])
def test_weights_and_the_optimizers_state_persist(step) -> None:
    base_bytes = delta.cpu_pool.allocated_bytes() if delta.cpu_pool.installed() else 0
    dry = record_dry_step(step)
    persists = dry.graph.persistent_bytes - base_bytes
    assert persists == pytest.approx(3 * WEIGHTS + ROWS * WIDTH * 4, rel=0.01)
    assert dry.graph.activation_bytes == pytest.approx(SAVED, rel=0.01)
    assert dry.optimizer_peak_bytes - base_bytes > 4 * WEIGHTS  # and gradients


def test_an_estimate_says_what_fits_and_how_slow() -> None:
    told = delta.estimate(build, card="rtx3060", budget=["100%", "50MiB"])
    assert told.fits
    roomy, tight = told.budgets
    assert roomy.fits and roomy.seconds is not None
    assert roomy.seconds.least < roomy.seconds.likely < roomy.seconds.most
    assert not tight.fits and "least budget" in tight.why_not
    assert told.optimizer_peak_bytes <= told.least_budget_bytes <= told.peak_bytes
    text = str(told)
    assert "RTX 3060" in text and "An estimate" in text and told.least_op in text


def test_without_budgets_they_lie_between_the_least_and_the_card() -> None:
    told = delta.estimate(build, card="t4")
    budgets = [each.budget_bytes for each in told.budgets]
    assert budgets[0] == told.card.usable_bytes
    assert budgets == sorted(budgets, reverse=True)
    assert all(each.fits for each in told.budgets)
    kept = [each.kept_bytes for each in told.budgets]
    assert kept == sorted(kept, reverse=True)


def test_training_goes_on_after_an_estimate_as_without_one() -> None:
    """Weights, running statistics, gradients, the optimizer's state and random numbers are what they were."""

    def losses(*, estimated: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, y = torch.randn(512, 64), torch.randn(512, 1)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def step_without_result() -> None:
            step()

        seen = []
        for index in range(6):
            if estimated and index in (0, 3):
                delta.estimate(step_without_result, card="rtx3060", budget="100%")
            seen.append(float(step()))
        assert entered() is None
        return seen

    assert losses(estimated=True) == losses(estimated=False)


def test_of_two_optimizers_both_have_their_state() -> None:
    def build_two():
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
        weights = list(model.parameters())
        two = [torch.optim.AdamW(weights[:DEPTH]), torch.optim.AdamW(weights[DEPTH:])]
        x = torch.randn(ROWS, WIDTH)

        def step() -> None:
            model(x).square().mean().backward()
            for each in two:
                each.step()
            model.zero_grad()

        return step

    one = record_dry_step(build).graph
    for step in (build_two, lambda: build_two()()):
        two = record_dry_step(step).graph
        assert two.persistent_bytes == pytest.approx(one.persistent_bytes, rel=0.01)
        assert two.peak_bytes == pytest.approx(one.peak_bytes, rel=0.02)


def test_a_step_that_asks_for_a_number_names_its_line_and_leaves_all_as_it_was() -> None:
    def step() -> None:
        loss = build_model()(torch.randn(ROWS, WIDTH)).square().mean()
        if loss.item() > 1:
            loss.backward()

    def build_model() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    with pytest.raises(NeedsValues, match="if loss.item"):
        record_dry_step(step)
    assert entered() is None
    assert float(torch.ones(1000, 1000).sum()) == 1e6


def test_what_trains_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="No step was seen"):
        record_dry_step(lambda: None)


SCRIPT = f"""
import sys
import torch
from torch import nn

model = nn.Sequential(*(nn.Linear({WIDTH}, {WIDTH}) for _ in range({DEPTH})))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1_000_000):
    loss = model(torch.randn({ROWS}, {WIDTH})).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "--print" in sys.argv:
        print(loss.item())
"""


def test_a_script_ends_after_its_second_step(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["delta"])
    script, out = tmp_path / "train.py", tmp_path / "step.json"
    script.write_text(SCRIPT)
    call = ["estimate", "--card", "rtx3060,t4", "--budget", "100%,300MiB", "--out", str(out)]
    assert main([*call, str(script)]) == 0
    shown = capsys.readouterr().out
    assert "RTX 3060" in shown and "T4" in shown
    graph = StepGraph.from_json(out.read_text())
    assert graph.work is not None
    assert main(["simulate", str(out), "--card", "rtx3060", "--budget", "80%"]) == 0
    assert "auto" in capsys.readouterr().out
    assert (
        main(["plan", str(out), "--card", "t4", "--planners", "joint", "--bound-seconds", "0"]) == 0
    )


def test_a_script_that_saves_at_its_end_keeps_what_is_there(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["delta"])
    script, saved = tmp_path / "train.py", tmp_path / "weights.pt"
    script.write_text(
        f"{SCRIPT}\n".replace("for step", "try:\n  for step", 1).replace("\n    ", "\n      ")
        + f"finally:\n  torch.save(model.state_dict(), {str(saved)!r})\n"
    )
    with pytest.raises(SystemExit):
        main(["estimate", str(script)])
    assert "torch.save" in capsys.readouterr().err


def test_a_scripts_own_error_is_its_own(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["delta"])
    script = tmp_path / "train.py"
    for line, error in (
        ("open('nowhere')", FileNotFoundError),
        ("import nowhere_at_all", ImportError),
    ):
        script.write_text(line)
        with pytest.raises(error):
            main(["estimate", str(script)])
        assert entered() is None


def test_a_script_that_leaves_after_a_step_is_told_of(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["delta"])
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("1_000_000", "1") + "sys.exit()\n")
    assert main(["estimate", "--card", "t4", "--budget", "100%", str(script)]) == 0
    assert "NVIDIA T4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["--policy", "best"],
        ["--budget", "lots"],
        ["--card", "rtx9999"],
        ["--out", "nowhere/step.json"],
    ],
)
def test_a_wrong_option_is_told_before_the_script_runs(
    wrong, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["delta"])
    script = tmp_path / "train.py"
    script.write_text("raise AssertionError('it ran')")
    with pytest.raises(SystemExit):
        main(["estimate", *wrong, str(script)])
    assert wrong[1] in capsys.readouterr().err


def test_this_machine_is_a_card() -> None:
    card = card_of("here")
    assert card.memory_bytes > card.usable_bytes > GIB
    assert all(rate > 1e8 for rate in (*card.flops_per_s.values(), card.bytes_per_s))
    assert 0 < card.launch_s < 1e-3
    assert delta.estimate(build, card=card, budget="100%", policy="recompute").fits


@pytest.mark.parametrize(("long_from", "measured"), [(128, 128), (512, 512), (1 << 20, 1024)])
def test_a_dtype_that_takes_long_is_measured_by_a_smaller_product(
    monkeypatch, long_from: int, measured: int
) -> None:
    """As where a CPU emulates it: five products of 1024 take half a minute there."""
    sizes = []

    def mm(a: torch.Tensor, _: torch.Tensor) -> None:
        sizes.append(len(a))

    def seconds(_: torch.device, run) -> float:
        run()
        return 1.0 if sizes[-1] >= long_from else 1e-6

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(measured_card, "_least_s", seconds)
    rate = measured_card._flops_per_s(torch.device("cpu"), torch.bfloat16)
    assert sizes[-1] == max(sizes) == measured
    assert rate == 2 * measured**3 / (1.0 if measured >= long_from else 1e-6)


def test_a_script_that_prints_its_loss_is_told_the_line(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["delta"])
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with pytest.raises(SystemExit):
        main(["estimate", str(script), "--print"])
    told = capsys.readouterr().err
    assert f"{script}:14: print(loss.item())" in told

"""The callback for transformers' Trainer, against the real library: bits, budget, logs, errors, what is left behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool, entered
from tests.support.fixtures import one_thread  # noqa: F401

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from delta_runtime.integrations.transformers import DeltaCallback  # noqa: E402

MIB = 1 << 20
cpu_pool.install()
FIGURES = ("delta/peak_bytes", "delta/recompute_s", "delta/stall_s", "delta/budget_bytes")


class Net(nn.Module):
    """8 MiB of activations at 1,024 rows; raises at the call that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6))
        )
        self.calls = 0
        self.fails_at = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        y = self.blocks(x)
        if self.calls == self.fails_at:
            raise ValueError("as it was told")
        return {"loss": (y - labels).square().mean()}


class Reporter(transformers.TrainerCallback):
    """Stands before others, as those do that send logs to TensorBoard and the like."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def trainer_of(
    folder: Path, callbacks: list[Any], *, fails_at: int = 0, **options: Any
) -> transformers.Trainer:
    torch.manual_seed(0)
    model = Net()
    model.fails_at = fails_at
    rows = torch.randn(64, 256, 128, generator=torch.Generator().manual_seed(0))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=2,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **options,
    )
    data = [{"x": row, "labels": row} for row in rows]
    return transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=callbacks
    )


def give_budget(callback: DeltaCallback) -> int:
    """What lives now, and two thirds of what a step takes beside."""
    gc.collect()
    callback.budget = cpu_pool.allocated_bytes() + 7 * MIB
    return callback.budget


def train(trainer: transformers.Trainer) -> None:
    """Train; the Trainer itself seeds when it is made, not when it trains."""
    torch.manual_seed(1)
    trainer.train()


def weights(trainer: transformers.Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


def test_weights_are_equal_and_the_log_has_the_figures(tmp_path: Path) -> None:
    ordinary = trainer_of(tmp_path, [])
    ordinary.train()
    reporter, callback = Reporter(), DeltaCallback()
    budgeted = trainer_of(tmp_path, [reporter, callback])
    budget_bytes = give_budget(callback)
    budgeted.train()
    for one, other in zip(weights(ordinary), weights(budgeted), strict=True):
        assert torch.equal(one, other)
    assert callback.report is not None
    assert callback.report.totals.steps == 12  # micro-batches
    assert callback.report.totals.drops > 0
    assert callback.report.totals.peak_bytes <= budget_bytes
    for logs in (reporter.logs, budgeted.state.log_history):
        of_training = [each for each in logs if "loss" in each]
        assert len(of_training) == 3
        for each in of_training:
            assert all(name in each for name in FIGURES)
            assert 0 < each["delta/peak_bytes"] <= each["delta/budget_bytes"] == budget_bytes
        assert of_training[0]["delta/recompute_s"] > 0
    assert not any(name in logs for logs in reporter.logs if "loss" not in logs for name in FIGURES)
    assert "training_step" not in vars(budgeted)
    assert entered.entered() is None


def test_evaluation_within_training_is_left_alone(tmp_path: Path) -> None:
    ordinary = trainer_of(tmp_path, [], eval_strategy="steps", eval_steps=2)
    ordinary.train()
    callback = DeltaCallback()
    budgeted = trainer_of(tmp_path, [callback], eval_strategy="steps", eval_steps=2)
    give_budget(callback)
    budgeted.train()
    losses = [
        [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
        for trainer in (ordinary, budgeted)
    ]
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    assert callback.report is not None and callback.report.totals.steps == 12


def test_an_error_in_a_step_comes_up_and_training_can_begin_again(tmp_path: Path) -> None:
    callback = DeltaCallback()
    trainer = trainer_of(tmp_path, [callback], fails_at=3)
    ordinary = trainer_of(tmp_path, [], fails_at=3)
    give_budget(callback)
    with pytest.raises(ValueError, match="as it was told"):
        train(trainer)
    assert entered.entered() is None  # nothing is left to leave
    with pytest.raises(ValueError, match="as it was told"):
        train(ordinary)
    train(ordinary)
    give_budget(callback)
    train(trainer)
    for one, other in zip(weights(ordinary), weights(trainer), strict=True):
        assert torch.equal(one, other)
    assert callback.report is not None and callback.report.totals.steps == 12


def test_what_others_put_around_the_step_goes_on(tmp_path: Path) -> None:
    """Around it before training, it is called inside of the runtime's step, and is there again behind it."""
    callback = DeltaCallback()
    trainer = trainer_of(tmp_path, [callback])
    give_budget(callback)
    of_class, seen = trainer.training_step, []

    def mine(*args: Any, **kwargs: Any) -> Any:
        seen.append(entered.entered() is not None)
        return of_class(*args, **kwargs)

    trainer.training_step = mine
    trainer.train()
    assert seen == [True] * 12
    assert trainer.training_step is mine


def test_what_is_put_around_the_step_in_training_has_no_runtime_within_later(
    tmp_path: Path,
) -> None:
    class Wrapping(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                inner = trainer.training_step
                trainer.training_step = lambda *args, **kwargs: inner(*args, **kwargs)

    callback = DeltaCallback()
    trainer = trainer_of(tmp_path, [callback, Wrapping()])
    give_budget(callback)
    trainer.train()
    assert callback.report is not None and callback.report.totals.steps == 12
    trainer.remove_callback(callback)
    trainer.train()  # through what is left of the wrappers
    assert callback.report.totals.steps == 12


def test_close_ends_the_budget_of_a_training_that_raised(tmp_path: Path) -> None:
    callback = DeltaCallback()
    trainer = trainer_of(tmp_path, [callback], fails_at=3)
    give_budget(callback)
    with pytest.raises(ValueError, match="as it was told"):
        train(trainer)
    assert callback.runtime is not None and callback.report is None
    callback.close()
    callback.close()
    assert callback.runtime is None
    assert callback.report is not None and callback.report.totals.steps == 3
    assert "training_step" not in vars(trainer)


def test_senseless_options_are_said_before_training(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [DeltaCallback(policy="no such policy")])
    with pytest.raises(delta.UsageError, match="no such policy"):
        trainer.train()
    assert "training_step" not in vars(trainer)


def test_called_by_something_else_it_says_what_to_do(tmp_path: Path) -> None:
    callback = DeltaCallback()
    trainer = trainer_of(tmp_path, [])
    with pytest.raises(delta.UsageError, match="something else"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert callback.runtime is None

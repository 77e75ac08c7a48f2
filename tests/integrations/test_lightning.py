"""The callback for Lightning's Trainer, against the real library: bits, budget, logs, errors, what is left behind."""

from __future__ import annotations

import csv
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from delta_runtime import cpu_pool, entered
from tests.support.fixtures import one_thread  # noqa: F401

lightning = pytest.importorskip("lightning")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from delta_runtime.integrations.lightning import DeltaCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers and logging
MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
cpu_pool.install()


class Net(lightning.LightningModule):
    """8 MiB of activations at 1,024 rows; raises at the step that it is told to."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6))
        )
        self.fails_at = fails_at

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        loss = (self.blocks(x) - x).square().mean()
        if index == self.fails_at:
            raise ValueError("as it was told")
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        (x,) = batch
        self.log("val_loss", (self.blocks(x) - x).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def budget_bytes() -> int:
    """What lives now, the data of `fit`, and two thirds of what a step needs beside."""
    gc.collect()
    return cpu_pool.allocated_bytes() + 3 * MIB + 5 * MIB


def fit(model: Net, callbacks: list[Any], folder: Path | None = None, accumulate: int = 2) -> None:
    rows = torch.randn(6144, 128, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=1024)
    torch.manual_seed(1)
    lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulate,
        logger=CSVLogger(str(folder), name="", version="") if folder else False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    ).fit(model, loader, loader)


def test_weights_are_equal_and_the_logger_has_the_figures(tmp_path: Path) -> None:
    ordinary, budgeted = Net(), Net()
    fit(ordinary, [])
    callback = DeltaCallback(budget=budget_bytes())
    fit(budgeted, [callback], tmp_path)
    for one, other in zip(ordinary.parameters(), budgeted.parameters(), strict=True):
        assert torch.equal(one, other)
    assert callback.report is not None
    assert callback.report.totals.steps == 12  # micro-batches
    assert callback.report.totals.drops > 0
    assert callback.report.totals.peak_bytes <= callback.budget
    with (tmp_path / "metrics.csv").open() as file:
        peaks = [
            float(row["delta/peak_bytes"])
            for row in csv.DictReader(file)
            if row["delta/peak_bytes"]
        ]
    assert len(peaks) >= 6
    assert all(0 < peak <= callback.budget for peak in peaks)
    assert entered.entered() is None


def test_an_error_in_a_step_leaves_the_runtime(tmp_path: Path) -> None:
    callback = DeltaCallback(budget=budget_bytes(), log=False)
    with pytest.raises(ValueError, match="as it was told"):
        fit(Net(fails_at=2), [callback])
    assert entered.entered() is None
    assert callback.runtime is None
    fit(Net(), [callback])
    assert callback.report is not None and callback.report.totals.steps == 12


class Manual(Net):
    """Two backwards and two optimizer steps a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        (x,) = batch
        optimizer = self.optimizers()
        for scale in (1.0, 0.5):
            optimizer.zero_grad()
            self.manual_backward((self.blocks(x * scale) - x).square().mean())
            optimizer.step()


def test_manual_optimization_keeps_its_bits_too(tmp_path: Path) -> None:
    ordinary, budgeted = Manual(), Manual()
    fit(ordinary, [], accumulate=1)
    callback = DeltaCallback(budget=budget_bytes())
    fit(budgeted, [callback], accumulate=1)
    for one, other in zip(ordinary.parameters(), budgeted.parameters(), strict=True):
        assert torch.equal(one, other)
    assert callback.report is not None
    assert callback.report.totals.steps == 24
    assert callback.report.totals.drops > 0


OTHER_DISTRIBUTION = """
import torch, warnings
warnings.simplefilter("ignore")
import pytorch_lightning
from delta_runtime.integrations.lightning import DeltaCallback

assert issubclass(DeltaCallback, pytorch_lightning.Callback)

class Net(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def training_step(self, batch, index):
        return self.layer(batch[0]).tanh().square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

callback = DeltaCallback(budget="100%")
trainer = pytorch_lightning.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, callbacks=callback,
    enable_progress_bar=False, enable_model_summary=False,
)
data = torch.utils.data.TensorDataset(torch.randn(8, 8))
trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=4))
print("steps", callback.report.totals.steps)
"""


def test_it_serves_the_other_distribution_too() -> None:
    pytest.importorskip("pytorch_lightning")
    done = subprocess.run(
        [sys.executable, "-c", OTHER_DISTRIBUTION],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == ["steps 2"], done.stderr

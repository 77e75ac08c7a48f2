"""A Lightning module inside a byte budget: one more line, the callback. Its figures go to the Trainer's logger.

    python examples/lightning_module.py [--budget 120MiB]

`--budget off` trains without the runtime: the losses are the same. Takes a few seconds; needs lightning, no GPU.
"""

import argparse
import csv
import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from delta_runtime.integrations.lightning import DeltaCallback

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="120MiB")
options = parser.parse_args()


class Net(lightning.LightningModule):
    """A small convolutional net with batch norm."""

    def __init__(self):
        super().__init__()
        blocks = []
        for i in range(6):
            blocks += [nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU()]
        self.body = nn.Sequential(*blocks, nn.Dropout(0.1))
        self.head = nn.Linear(32, 10)

    def training_step(self, batch, index):
        images, labels = batch
        logits = self.head(self.body(images).mean((2, 3)))
        loss = nn.functional.cross_entropy(logits, labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


lightning.seed_everything(0)
generator = torch.Generator().manual_seed(0)
images = torch.randn(192, 3, 48, 48, generator=generator)
labels = torch.randint(0, 10, (192,), generator=generator)
callbacks = [] if options.budget == "off" else [DeltaCallback(budget=options.budget)]
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        log_every_n_steps=2,
        logger=CSVLogger(folder, name="", version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True))
    with (Path(folder) / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            print({name: text for name, text in row.items() if text})
if callbacks:
    print(callbacks[0].report.verdict())

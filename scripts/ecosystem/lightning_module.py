"""Lightning: a small convolutional net with batch norm, with a validation loop."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = []
        for i in range(6):
            blocks += [nn.Conv2d(32 if i else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU()]
        self.body = nn.Sequential(*blocks, nn.Dropout(0.1))
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        return self.head(self.body(images).mean((2, 3)))

    def training_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        print("loss", loss.item().hex(), flush=True)
        return loss

    def validation_step(self, batch, index):
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        print("evaluation", loss.item().hex(), flush=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 3, 48, 48, generator=generator), labels)


lightning.seed_everything(0)
model = Net()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    num_sanity_val_steps=0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    model,
    DataLoader(images(192, seed=0), batch_size=32, shuffle=True),
    DataLoader(images(32, seed=1), batch_size=32),
)
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

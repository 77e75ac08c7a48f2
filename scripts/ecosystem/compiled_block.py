"""A net of which two blocks are compiled; the rest of it runs eagerly.

python compiled_block.py [--backend inductor]
"""

import argparse

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="inductor")
backend = parser.parse_args().backend

torch.manual_seed(0)
eager = [
    nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.1), Block(128)) for _ in range(4)
]
compiled = [Block(128) for _ in range(2)]
for block in compiled:
    block.compile(backend=backend)
model = nn.Sequential(*eager[:2], compiled[0], *eager[2:], compiled[1], nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(0)

for _ in range(6):
    features = torch.randn(2048, 128, generator=generator)
    labels = torch.randint(0, 10, (2048,), generator=generator)
    loss = nn.functional.cross_entropy(model(features), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex(), flush=True)
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

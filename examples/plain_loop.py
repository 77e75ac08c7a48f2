"""A training loop of one's own: a byte-level transformer, with the runtime's figures in the progress bar.

    python examples/plain_loop.py [--budget 100MiB] [--steps 20]

`--budget off` trains without the runtime: the losses are the same. Takes a few seconds; needs no GPU. To log to
TensorBoard or wandb, give them `runtime.metrics()`, a flat dictionary.
"""

import argparse
import contextlib

import torch
from torch import nn
from tqdm import trange

import delta_runtime as delta

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="100MiB")
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()

device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.1, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(256, 192),
    nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
    nn.Linear(192, 256),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 256, (8, 129), generator=torch.Generator().manual_seed(0))
tokens = tokens.to(device)

runtime = None if options.budget == "off" else delta.Runtime(options.budget, device=device)
bar = trange(options.steps)
for _ in bar:
    with runtime.step() if runtime else contextlib.nullcontext():
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if runtime:
        bar.set_postfix_str(runtime.status())
print("loss", loss.item())
if runtime:
    runtime.close()
    print(runtime.metrics())
    print(runtime.report().verdict())

"""A loop with Hugging Face's accelerate, with gradient accumulation and clipping, inside a byte budget.

    python examples/accelerate_loop.py [--budget 100MiB]
    accelerate launch examples/accelerate_loop.py            # on a card, or several: each process has the budget

`--budget off` trains without the runtime: the losses are the same. Takes a few seconds; needs accelerate, no GPU.
"""

import argparse
import contextlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

import delta_runtime as delta

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="100MiB")
options = parser.parse_args()

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)
layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.1, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 192),
    nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
    nn.Linear(192, 1000),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(0, 1000, (96, 129), generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(tokens, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

runtime = None
if options.budget != "off":
    runtime = delta.Runtime(options.budget, device=accelerator.device)
for batch in loader:
    with accelerator.accumulate(model):
        with runtime.step() if runtime else contextlib.nullcontext():
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print("loss", loss.item())
if runtime:
    runtime.close()
    accelerator.print(runtime.report().verdict())

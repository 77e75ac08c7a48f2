"""DistributedDataParallel: each process has a budget of its own.

    torchrun --nproc-per-node 2 examples/ddp.py [--budget 50MiB]

`--budget off` trains without the runtime: the losses are the same. On cards each process gives the bytes that its own
card may hold; `auto` and shares such as 80% are of that card, and on a CPU of this process's part of the machine's RAM.
Takes a few seconds; needs no GPU: where there are fewer cards than processes, they train on the CPU.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import delta_runtime as delta

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="50MiB")
options = parser.parse_args()

dist.init_process_group()
rank = dist.get_rank()
device = torch.device("cpu")
if torch.accelerator.is_available():
    here, cards = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if cards >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(here)
        device = torch.device(torch.accelerator.current_accelerator().type, here)
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.1, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 192),
    nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    nn.Linear(192, 1000),
).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)

runtime = None if options.budget == "off" else delta.Runtime(options.budget, device=device)
for _ in range(6):
    tokens = torch.randint(0, 1000, (4, 129), generator=generator).to(device)
    with runtime.step() if runtime else contextlib.nullcontext():
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
told = f"rank {rank} loss {loss.item()}\n"
if runtime:
    runtime.close()
    told += f"rank {rank}: {runtime.report().verdict()}\n"
# At once, with the ends of the lines: the lines of two processes can run together otherwise.
print(told, end="", flush=True)
dist.destroy_process_group()

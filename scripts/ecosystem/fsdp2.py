"""FSDP2 on two processes, block by block: torchrun --nproc-per-node 2 fsdp2.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.1, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 192),
    nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
    nn.Linear(192, 1000),
)
for block in model[1].layers:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(rank)
torch.manual_seed(rank)

for _ in range(6):
    tokens = torch.randint(0, 1000, (4, 129), generator=generator)
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank} loss {loss.item().hex()}", flush=True)
total = sum(p.detach().to_local().double().sum() for p in model.parameters())
print(f"rank {rank} weights {total.item().hex()}", flush=True)
dist.destroy_process_group()

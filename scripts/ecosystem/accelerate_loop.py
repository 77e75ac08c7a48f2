"""A training loop with accelerate: accumulation, clipping, a schedule."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
layer = nn.TransformerEncoderLayer(192, 6, 768, dropout=0.1, batch_first=True, norm_first=True)
model = nn.Sequential(
    nn.Embedding(1000, 192),
    nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
    nn.Linear(192, 1000),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
tokens = torch.randint(0, 1000, (128, 129), generator=torch.Generator().manual_seed(0))
loader = torch.utils.data.DataLoader(tokens, batch_size=8, shuffle=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)

for batch in loader:
    with accelerator.accumulate(model):
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    print("loss", loss.item().hex(), flush=True)
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

"""A small GPT-2 with the 8-bit AdamW of torchao."""

import torch
from torchao.optim import AdamW8bit
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_layer=4, n_embd=192, n_head=6, vocab_size=1000, bos_token_id=0, eos_token_id=0)
).train()
optimizer = AdamW8bit(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(0)

for _ in range(8):
    tokens = torch.randint(0, 1000, (8, 128), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex(), flush=True)
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

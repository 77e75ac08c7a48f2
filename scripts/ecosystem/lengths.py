"""A small language model on batches of all lengths from 64 to 512, no two alike in a row."""

import torch
from torch import nn

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
embedding = nn.Embedding(1000, 128)
encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
head = nn.Linear(128, 1000)
model = nn.ModuleList([embedding, encoder, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
generator = torch.Generator().manual_seed(0)

for length in (512, 64, 448, 128, 384, 512, 192, 320, 256, 512, 96, 416):
    tokens = torch.randint(0, 1000, (2, length + 1), generator=generator)
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    hidden = encoder(embedding(tokens[:, :-1]), mask=mask, is_causal=True)
    loss = nn.functional.cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item().hex(), flush=True)
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

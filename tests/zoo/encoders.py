"""Encoders of text."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import ZooModel, classes, from_output, generator, tokens, zoo_model


@zoo_model("bert")
def bert() -> ZooModel:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    model = BertForMaskedLM(config)

    def batch(i: int) -> dict[str, Tensor]:
        ids = tokens(i, 12, 64, 64)
        mask = torch.ones_like(ids)
        mask[:, 56:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    return from_output(model, batch)


class TorchTransformer(nn.Module):
    """torch.nn.Transformer, encoder and decoder, as the library ships it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 48)
        self.transformer = nn.Transformer(
            d_model=48,
            nhead=4,
            num_encoder_layers=2,
            num_decoder_layers=2,
            dim_feedforward=96,
            dropout=0.1,
            batch_first=True,
        )
        self.head = nn.Linear(48, 10)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.transformer(
            self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True
        )
        return self.head(out.mean(1))


@zoo_model("torch_transformer")
def torch_transformer() -> ZooModel:
    model = TorchTransformer()

    def batch(i: int) -> dict[str, Tensor]:
        return {
            "source": tokens(i, 12, 48, 64),
            "target": torch.randint(0, 64, (12, 32), generator=generator(i + 60)),
            "y": classes(i, 12),
        }

    return ZooModel(
        model,
        batch,
        lambda b: F.cross_entropy(model(b["source"], b["target"]), b["y"]),
    )

"""Sound: strided 1-d convolutions, group norm, weight norm (a parametrization), layer drop, CTC loss."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.zoo.registry import ZooModel, from_output, generator, zoo_model


@zoo_model("wav2vec2")
def wav2vec2() -> ZooModel:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        conv_dim=[24, 24, 24],
        conv_kernel=[10, 3, 3],
        conv_stride=[5, 2, 2],
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        layerdrop=0.1,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        feat_proj_dropout=0.1,
        apply_spec_augment=False,  # it draws from numpy's generator
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
        pad_token_id=0,
    )
    model = Wav2Vec2ForCTC(config)

    def batch(i: int) -> dict[str, Tensor]:
        return {
            "input_values": torch.randn(6, 2000, generator=generator(i)),
            "labels": torch.randint(1, 32, (6, 12), generator=generator(i + 90)),
        }

    return from_output(model, batch)

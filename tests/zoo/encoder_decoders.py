"""Encoder-decoders of text and sound: cross attention, relative positions, tied embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.zoo.registry import ZooModel, from_output, generator, tokens, zoo_model


@zoo_model("t5")
def t5() -> ZooModel:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=64,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.1,
        decoder_start_token_id=0,
        use_cache=False,
    )
    model = T5ForConditionalGeneration(config)
    return from_output(
        model, lambda i: {"input_ids": tokens(i, 12, 48, 64), "labels": tokens(i + 70, 12, 32, 64)}
    )


@zoo_model("bart")
def bart() -> ZooModel:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=64,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=64,
        decoder_layerdrop=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    model = BartForConditionalGeneration(config)
    return from_output(
        model, lambda i: {"input_ids": tokens(i, 24, 48, 64), "labels": tokens(i + 70, 24, 32, 64)}
    )


@zoo_model("whisper")
def whisper() -> ZooModel:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=64,
        num_mel_bins=16,
        d_model=48,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        max_source_positions=64,
        max_target_positions=32,
        dropout=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)

    def batch(i: int) -> dict[str, Tensor]:
        return {
            "input_features": torch.randn(12, 16, 128, generator=generator(i + 80)),
            "labels": tokens(i, 12, 16, 64),
        }

    return from_output(model, batch)

"""The models that estimates are shown for: as large as people train them, built without memory in a dry run.

Question: none by itself; benchmarks/cards.py estimates and simulates their steps. Each builder makes a model, an
optimizer and a batch, and returns the function that trains a step; `delta_runtime.estimate` takes it as it is. Sizes
are those of the published models, with random weights. Needs transformers and peft.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

Step = Callable[[], None]
_TOKENS = 32_000


def _trains(model: nn.Module, inputs: dict[str, torch.Tensor], *, autocast: bool) -> Step:
    model.train()
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def llama_lora(
    *,
    batch: int = 1,
    tokens: int = 4096,
    rank: int = 16,
    targets: Sequence[str] = ("q_proj", "v_proj"),
    dropout: float = 0.0,
    checkpointing: bool = False,
    vocabulary: int = _TOKENS,
) -> Callable[[], Step]:
    """Return a builder of Llama-2 7B with LoRA in bfloat16, or of one with another vocabulary."""

    def build() -> Step:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModelForCausalLM, LlamaConfig

        config = LlamaConfig(use_cache=False, vocab_size=vocabulary)  # its defaults are those of 7B
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        lora = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            lora_dropout=dropout,
            target_modules=list(targets),
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        ids = torch.randint(0, _TOKENS, (batch, tokens))
        return _trains(model, {"input_ids": ids, "labels": ids}, autocast=False)

    return build


def _gpt2_medium() -> Step:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1024, n_layer=24, n_head=16, use_cache=False)
    model = GPT2LMHeadModel(config)
    ids = torch.randint(0, config.vocab_size, (8, 1024))
    return _trains(model, {"input_ids": ids, "labels": ids}, autocast=True)


def _bert_large() -> Step:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    ids = torch.randint(0, config.vocab_size, (32, 512))
    return _trains(BertForMaskedLM(config), {"input_ids": ids, "labels": ids}, autocast=True)


def _vit_large() -> Step:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        num_labels=1000,
    )
    inputs = {
        "pixel_values": torch.randn(64, 3, 224, 224),
        "labels": torch.randint(0, 1000, (64,)),
    }
    return _trains(ViTForImageClassification(config), inputs, autocast=True)


def _resnet50() -> Step:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=1000)  # its defaults are those of ResNet-50
    inputs = {
        "pixel_values": torch.randn(256, 3, 224, 224),
        "labels": torch.randint(0, 1000, (256,)),
    }
    return _trains(ResNetForImageClassification(config), inputs, autocast=False)


def _t5_large() -> Step:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_ff=4096,
        num_layers=24,
        num_heads=16,
        use_cache=False,
        vocab_size=32128,
        decoder_start_token_id=0,
    )
    ids = torch.randint(0, _TOKENS, (8, 512))
    inputs = {"input_ids": ids, "labels": ids}
    return _trains(T5ForConditionalGeneration(config), inputs, autocast=True)


MODELS: Mapping[str, Callable[[], Step]] = MappingProxyType(
    {
        "llama7b_lora": llama_lora(),
        "gpt2_medium": _gpt2_medium,
        "vit_large": _vit_large,
        "resnet50": _resnet50,
        "bert_large": _bert_large,
        "t5_large": _t5_large,
        "llama7b_lora_checkpointed": llama_lora(checkpointing=True),
    }
)
TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "llama7b_lora": "Llama-2 7B, LoRA of rank 16 on queries and values, 1 x 4,096 tokens, bfloat16",
        "gpt2_medium": "GPT-2 medium, 8 x 1,024 tokens, autocast to bfloat16",
        "vit_large": "ViT-L/16, 64 images of 224 x 224, autocast to bfloat16",
        "resnet50": "ResNet-50, 256 images of 224 x 224, float32",
        "bert_large": "BERT large, 32 x 512 tokens, autocast to bfloat16",
        "t5_large": "T5 large, 8 x 512 tokens in and out, autocast to bfloat16",
        "llama7b_lora_checkpointed": "the same Llama with torch.utils.checkpoint around each layer",
    }
)

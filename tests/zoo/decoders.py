"""Causal language models: attention as one op and as many, grouped queries, experts, a state-space scan."""

from __future__ import annotations

from tests.zoo.registry import ZooModel, from_output, tokens, zoo_model

VOCABULARY = 64


def _causal(model: object, count: int, length: int) -> ZooModel:
    # The loss that these models fall back to anyway; naming it spares a warning.
    model.loss_type = "ForCausalLM"

    def batch(i: int) -> dict:
        ids = tokens(i, count, length, VOCABULARY)
        return {"input_ids": ids, "labels": ids}

    return from_output(model, batch)


def _gpt2(attention: str) -> ZooModel:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=64,
        n_layer=3,
        n_head=4,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return _causal(GPT2LMHeadModel(config), 12, 64)


@zoo_model("gpt2_sdpa")
def gpt2_sdpa() -> ZooModel:
    return _gpt2("sdpa")


@zoo_model("gpt2_eager")
def gpt2_eager() -> ZooModel:
    return _gpt2("eager")


@zoo_model("llama")
def llama() -> ZooModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,
        use_cache=False,
    )
    return _causal(LlamaForCausalLM(config), 12, 64)


@zoo_model("mixtral")
def mixtral() -> ZooModel:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_dropout=0.1,
        output_router_logits=True,
        use_cache=False,
        # The grouped matmul's bits depend on the order of threads: it does not repeat even by itself.
        experts_implementation="eager",
    )
    return _causal(MixtralForCausalLM(config), 16, 64)


@zoo_model("mamba")
def mamba() -> ZooModel:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        expand=2,
        time_step_rank=4,
        use_cache=False,
    )
    return _causal(MambaForCausalLM(config), 12, 40)

"""Supervised fine-tuning with TRL: texts, a tokenizer trained here, a small Llama made from its config."""

import inspect
import tempfile
import textwrap

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

source = inspect.getsource(textwrap)
texts = [source[i : i + 400] for i in range(0, len(source) - 400, 100)]
backend = Tokenizer(models.BPE())
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
backend.train_from_iterator(
    texts,
    trainers.BpeTrainer(vocab_size=600, special_tokens=["<pad>", "<eos>"], show_progress=False),
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


class LoudTrainer(SFTTrainer):
    """Prints the loss of every micro-batch with all its digits."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print("loss", loss.item().hex(), flush=True)
        return loss


set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
)
model.to(torch.float32)
with tempfile.TemporaryDirectory() as folder:
    LoudTrainer(
        model=model,
        args=SFTConfig(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_length=128,
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
    ).train()
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

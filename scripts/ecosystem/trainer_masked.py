"""transformers.Trainer on masked language modelling: a small BERT, batches padded and masked by a collator.

The collator masks at random, and Trainer fetches all four batches of an accumulation before the first forward. The
tokenizer is trained here, on Python's own sources.
"""

import argparse
import inspect
import tempfile

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

lines = [line for line in inspect.getsource(argparse).splitlines() if line.strip()][:400]
backend = Tokenizer(models.BPE(unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
backend.train_from_iterator(
    lines,
    trainers.BpeTrainer(
        vocab_size=600, special_tokens=["[PAD]", "[UNK]", "[MASK]"], show_progress=False
    ),
)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
)
rows = [
    # Six lines of source each, so that lengths differ from row to row.
    tokenizer(" ".join(lines[i : i + 6]), truncation=True, max_length=128)
    for i in range(300)
]


class LoudTrainer(Trainer):
    """Prints the loss of every micro-batch with all its digits."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print("loss", loss.item().hex(), flush=True)
        return loss


set_seed(0)
model = BertForMaskedLM(
    BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=768,
    )
)
with tempfile.TemporaryDirectory() as folder:
    LoudTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.2),
    ).train()
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

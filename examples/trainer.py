"""transformers' Trainer inside a byte budget: one more line, the callback. Its figures are in the Trainer's log.

    python examples/trainer.py [--budget 120MiB]

`--budget off` trains without the runtime: the losses are the same. Takes a few seconds; needs transformers and
accelerate, no GPU, and downloads nothing.
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from delta_runtime.integrations.transformers import DeltaCallback

parser = argparse.ArgumentParser()
parser.add_argument("--budget", default="120MiB")
options = parser.parse_args()

set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_layer=4, n_embd=192, n_head=6, vocab_size=1000, bos_token_id=0, eos_token_id=0)
)
tokens = torch.randint(0, 1000, (64, 128), generator=torch.Generator().manual_seed(0))
callbacks = [] if options.budget == "off" else [DeltaCallback(budget=options.budget)]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            logging_steps=2,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=callbacks,
    )
    trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print("loss", entry["loss"])
if callbacks:
    print(callbacks[0].report.verdict())

"""transformers.Trainer on a small GPT-2 made from its config.

python trainer.py [--accumulation 4] [--evaluate] [--bf16]
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--evaluate", action="store_true")
parser.add_argument("--bf16", action="store_true")
options = parser.parse_args()


class Tokens(torch.utils.data.Dataset):
    """Rows of tokens that are made when they are asked for."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        row = torch.randint(0, 1000, (128,), generator=generator)
        return {"input_ids": row, "labels": row.clone()}


class LoudTrainer(Trainer):
    """Prints the loss of every micro-batch with all its digits."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print("loss", loss.item().hex(), flush=True)
        return loss


set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_layer=4, n_embd=192, n_head=6, vocab_size=1000, bos_token_id=0, eos_token_id=0)
)
with tempfile.TemporaryDirectory() as folder:
    trainer = LoudTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=6,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=options.accumulation,
            eval_strategy="steps" if options.evaluate else "no",
            eval_steps=2,
            bf16=options.bf16,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Tokens(256, seed=0),
        eval_dataset=Tokens(24, seed=1) if options.evaluate else None,
    )
    trainer.train()
for entry in trainer.state.log_history:
    if "eval_loss" in entry:
        print("evaluation", float(entry["eval_loss"]).hex())
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

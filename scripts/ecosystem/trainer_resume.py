"""transformers.Trainer that stops half way, and goes on from its checkpoint with everything new."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __init__(self, count):
        self.rows = torch.randint(0, 1000, (count, 128), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class LoudTrainer(Trainer):
    """Prints the loss of every micro-batch with all its digits."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        print("loss", loss.item().hex(), flush=True)
        return loss


def new_trainer(folder, stop_at):
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=1000,
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=6,
            attention_dropout=0.1,
        )
    )
    return LoudTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=stop_at,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            lr_scheduler_type="constant",
            save_steps=3,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Tokens(256),
    )


with tempfile.TemporaryDirectory() as folder:
    new_trainer(folder, stop_at=3).train()
    trainer = new_trainer(folder, stop_at=6)
    trainer.train(resume_from_checkpoint=True)
    model = trainer.model
print("weights", sum(p.detach().double().sum() for p in model.parameters()).item().hex())

"""The frozen training workloads that the demo, the benchmarks and the stress scripts share.

Question: none by itself. It is the one place that fixes the models, data, batch sizes and optimizers whose
figures the other scripts report, so that two figures can be compared. Run as a script it prints the size of each
workload and trains it for a few steps (about 40 s, no GPU needed).

Covers: three of one size. M1, a full-depth ResNet-50 on real images (scikit-learn's scanned digits, enlarged to RGB);
M2, a byte-level GPT-2 on the sources of the Python standard library; M3, a ViT on the digits. All weights are random,
everything runs offline. Activations are more than 70 % of the ordinary peak of M1 and of M2. Does not cover: budgets,
measuring, or anything of the runtime: this file imports nothing of it.

And eight whose batch and input can be made larger (`SIZED`), for what fits at an equal capacity: ResNet-50,
ResNet-101, GPT-2, a Llama, a ViT, a U-Net, and GPT-2 and Llama with a vocabulary as large as real ones have.

A change of a number below makes earlier figures incomparable: add a workload instead.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]

_MASK_63_BITS = (1 << 63) - 1


@dataclass(slots=True)
class TrainState:
    """A model in training mode with its optimizer, whose state is allocated, and its data.

    Args:
        model: the model; its forward returns an object with a `loss`.
        optimizer: AdamW over all parameters.
        batch: maps a step number to that step's batch; the same number gives the same batch, and the global
            random state is left alone.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Batch]

    def loss(self, batch: Batch) -> Tensor:
        """Run forward and returns the scalar loss."""
        loss: Tensor = self.model(**batch).loss
        return loss

    def train_step(self, index: int) -> Tensor:
        """Run one whole step (zero_grad, forward, backward, optimizer) and returns the detached loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.batch(index))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def persistent_bytes(self) -> int:
        """Bytes that live through the whole step: parameters, buffers and optimizer state."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


@dataclass(frozen=True, slots=True)
class Workload:
    """A named, fully determined training job.

    Args:
        name: short name used in tables and on command lines.
        title: one line for people.
        build: seed -> TrainState. The same seed gives the same weights, batches and dropout masks. It seeds the global
            generator, which dropout goes on drawing from.
    """

    name: str
    title: str
    build: Callable[[int], TrainState]


def allocate_adamw_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocates the state that AdamW would allocate in its first step, with the same values.

    Without this the first step has a lower peak than the others, and a figure depends on which step was measured.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


def _adamw(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    allocate_adamw_state(optimizer)
    return optimizer


def _generator(seed: int, index: int) -> torch.Generator:
    """Its own generator for each batch: batches do not depend on the order in which they are asked for."""
    return torch.Generator().manual_seed((seed * 1_000_003 + index + 1) & _MASK_63_BITS)


@cache
def _digits() -> tuple[Tensor, Tensor]:
    """All 1,797 scanned digits as (N, 1, 8, 8) in [-1, 1], and their classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
    return images, torch.tensor(data.target, dtype=torch.int64)


@cache
def _stdlib_bytes() -> Tensor:
    """Return the modules at the top of the Python standard library, sorted by name, as one tensor of bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 100_000:
        raise RuntimeError(
            f"the sources of the Python standard library are the training text; found {len(text)} bytes in {folder}"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def digit_images(seed: int, index: int, batch_size: int, pixels: int) -> Batch:
    """Return a batch of scanned digits enlarged to (batch_size, 3, pixels, pixels), with labels."""
    images, classes = _digits()
    chosen = torch.randint(0, len(images), (batch_size,), generator=_generator(seed, index))
    enlarged = F.interpolate(images[chosen], size=(pixels, pixels), mode="bilinear")
    return {
        "pixel_values": enlarged.expand(-1, 3, -1, -1).contiguous(),
        "labels": classes[chosen],
    }


def byte_windows(seed: int, index: int, batch_size: int, length: int) -> Batch:
    """Return a batch of random windows of the standard library's source text, as byte values."""
    text = _stdlib_bytes()
    starts = torch.randint(0, len(text) - length, (batch_size,), generator=_generator(seed, index))
    windows = torch.stack([text[start : start + length] for start in starts.tolist()]).long()
    return {"input_ids": windows, "labels": windows}


# --------------------------------------------------------------------------------------------- M1: ResNet-50

M1_BATCH_SIZE = 32
M1_PIXELS = 160


def _build_m1(seed: int) -> TrainState:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(seed)
    # The default configuration is ResNet-50: bottleneck blocks, depths 3, 4, 6, 3.
    model = ResNetForImageClassification(ResNetConfig(num_labels=10)).train()
    return TrainState(
        model,
        _adamw(model, 1e-4),
        lambda index: digit_images(seed, index, M1_BATCH_SIZE, M1_PIXELS),
    )


# ------------------------------------------------------------------------------------------- M2: byte-level GPT

M2_BATCH_SIZE = 6
M2_LENGTH = 256


def _build_m2(seed: int) -> TrainState:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=M2_LENGTH,
        n_embd=512,
        n_layer=8,
        n_head=8,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # what it falls back to anyway, without a warning
    return TrainState(
        model,
        _adamw(model, 3e-4),
        lambda index: byte_windows(seed, index, M2_BATCH_SIZE, M2_LENGTH),
    )


# ------------------------------------------------------------------------------------------------------ M3: ViT

M3_BATCH_SIZE = 16
M3_PIXELS = 160


def _build_m3(seed: int) -> TrainState:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    config = ViTConfig(
        image_size=M3_PIXELS,
        patch_size=16,
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=10,
    )
    model = ViTForImageClassification(config).train()
    return TrainState(
        model,
        _adamw(model, 3e-4),
        lambda index: digit_images(seed, index, M3_BATCH_SIZE, M3_PIXELS),
    )


M1 = Workload(
    "resnet50", f"ResNet-50, {M1_BATCH_SIZE} digits of {M1_PIXELS} x {M1_PIXELS}", _build_m1
)
M2 = Workload("gpt", f"GPT-2 8 x 512 on bytes, {M2_BATCH_SIZE} windows of {M2_LENGTH}", _build_m2)
M3 = Workload(
    "vit", f"ViT 12 x 384, {M3_BATCH_SIZE} digits of {M3_PIXELS} x {M3_PIXELS}", _build_m3
)

WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (M1, M2, M3)}


# ------------------------------------------------------------------- workloads whose batch and input may grow


@dataclass(frozen=True, slots=True)
class SizedWorkload:
    """A training job that is determined but for its batch and for the size of its input.

    Args:
        name: short name used in tables and on command lines.
        title: one line for people.
        batch_size: the ordinary one.
        size: the ordinary size of an input: tokens, or pixels of a side.
        size_step: sizes are multiples of it.
        unit: of the size: "tokens" or "pixels".
        blocks: the classes of modules that others put a checkpoint around.
        build_model: size -> the model; its forward returns an object with a `loss`.
        make_batch: (seed, index, batch size, size) -> Batch.
        in_a_row: whether each block takes what the one before it made, and nothing else reads that.
    """

    name: str
    title: str
    batch_size: int
    size: int
    size_step: int
    unit: str
    blocks: tuple[str, ...]
    build_model: Callable[[int], nn.Module]
    make_batch: Callable[[int, int, int, int], Batch]
    in_a_row: bool = True

    def build(
        self, seed: int, batch_size: int | None = None, size: int | None = None
    ) -> TrainState:
        """Return the job at a batch and an input size; the ordinary ones by default."""
        torch.manual_seed(seed)
        model = self.build_model(size or self.size).train()
        return TrainState(model, _adamw(model, 1e-4), self.batches(seed, batch_size, size))

    def batches(
        self, seed: int, batch_size: int | None = None, size: int | None = None
    ) -> Callable[[int], Batch]:
        """Return what maps a step to its batch."""
        sizes = batch_size or self.batch_size, size or self.size
        return lambda index: self.make_batch(seed, index, *sizes)


_VOCABULARY = 50_257


def _pairs_of_bytes(seed: int, index: int, batch_size: int, length: int) -> Batch:
    """Two neighbouring bytes make a token: a text with a vocabulary of `_VOCABULARY`."""
    text = byte_windows(seed, index, batch_size, 2 * length)["input_ids"]
    tokens = (text[:, ::2] * 256 + text[:, 1::2]) % _VOCABULARY
    return {"input_ids": tokens, "labels": tokens}


def _resnet(depths: tuple[int, ...]) -> Callable[[int], nn.Module]:
    def build(size: int) -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        return ResNetForImageClassification(ResNetConfig(num_labels=10, depths=list(depths)))

    return build


def gpt2(vocabulary: int, width: int, layers: int) -> Callable[[int], nn.Module]:
    """Return what builds a GPT-2 for sequences of a length, with heads 64 wide and no dropout of attention."""

    def build(size: int) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=vocabulary,
            n_positions=size,
            n_embd=width,
            n_layer=layers,
            n_head=width // 64,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"
        return model

    return build


def _llama(vocabulary: int, width: int, layers: int) -> Callable[[int], nn.Module]:
    def build(size: int) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=8 * width // 3 // 32 * 32,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 128,
            max_position_embeddings=size,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = LlamaForCausalLM(config)
        model.loss_type = "ForCausalLM"
        return model

    return build


def _vit(size: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=size,
        patch_size=16,
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        intermediate_size=1536,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.0,
        num_labels=10,
    )
    return ViTForImageClassification(config)


def _unet(size: int) -> nn.Module:
    from scripts.unet import DenoisingUNet

    return DenoisingUNet(width=64)


_RESNET_BLOCKS = ("ResNetBottleNeckLayer",)

SIZED: dict[str, SizedWorkload] = {
    workload.name: workload
    for workload in (
        SizedWorkload(
            *("resnet50", "ResNet-50 on digits", 32, 128, 32, "pixels"),
            *(_RESNET_BLOCKS, _resnet((3, 4, 6, 3)), digit_images),
        ),
        SizedWorkload(
            *("resnet101", "ResNet-101 on digits", 16, 128, 32, "pixels"),
            *(_RESNET_BLOCKS, _resnet((3, 4, 23, 3)), digit_images),
        ),
        SizedWorkload(
            *("gpt", "GPT-2 12 x 384 on bytes", 4, 256, 64, "tokens"),
            *(("GPT2Block",), gpt2(256, 384, 12), byte_windows),
        ),
        SizedWorkload(
            *("llama", "Llama 12 x 384 on bytes", 4, 256, 64, "tokens"),
            *(("LlamaDecoderLayer",), _llama(256, 384, 12), byte_windows),
        ),
        SizedWorkload(
            *("vit", "ViT 12 x 384 on digits", 8, 160, 16, "pixels"),
            *(("ViTLayer",), _vit, digit_images),
        ),
        SizedWorkload(
            *("unet", "U-Net 64 wide, denoising digits", 4, 64, 16, "pixels"),
            *(("ResidualBlock", "Attention"), _unet, digit_images, False),
        ),
        SizedWorkload(
            *("gpt_words", "GPT-2 6 x 384, vocabulary 50,257", 4, 256, 64, "tokens"),
            *(("GPT2Block",), gpt2(_VOCABULARY, 384, 6), _pairs_of_bytes),
        ),
        SizedWorkload(
            *("llama_words", "Llama 6 x 384, vocabulary 50,257", 4, 256, 64, "tokens"),
            *(("LlamaDecoderLayer",), _llama(_VOCABULARY, 384, 6), _pairs_of_bytes),
        ),
    )
}
"""AdamW, learning rate 1e-4, weight decay 0.01."""


def main() -> None:
    import time

    torch.set_num_threads(min(2, os.cpu_count() or 1))
    for workload in (*WORKLOADS.values(), *SIZED.values()):
        state = workload.build(0)
        parameters = sum(p.numel() for p in state.model.parameters())
        print(f"{workload.name}: {workload.title}; {parameters / 1e6:.1f} M parameters")
        for index in range(3):
            begin = time.perf_counter()
            loss = state.train_step(index)
            print(
                f"  step {index}: loss {loss.item():.6f}, {time.perf_counter() - begin:.2f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()

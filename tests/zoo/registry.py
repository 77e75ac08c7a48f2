"""The list of small real models that the sweeps train.

Covers: how a model of the zoo is declared and built. Does not cover: how it is trained (tests/support/training.py).

Note: what a model of the zoo must be
1. Deterministic by seed: `build` seeds the global generator once, and batches come from generators of their own.
2. Bit for bit repeatable by itself, with dropout active (tests/zoo/test_zoo.py).
3. Well above its weights in activations, so that 40 % of the ordinary peak is a hard budget, not an impossible one.
4. Fast: a step takes less than 0.3 s on one thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A built model in training mode, with its data.

    Args:
        model: the module whose parameters are trained.
        batch: step number -> batch; the same number gives the same batch.
        loss: batch -> scalar loss.
    """

    model: nn.Module
    batch: Callable[[int], Batch]
    loss: Callable[[Batch], Tensor]


@dataclass(frozen=True, slots=True)
class ZooEntry:
    """A model of the zoo that has not been built.

    Args:
        name: unique name.
        build_unseeded: builds it from the global generator.
    """

    name: str
    build_unseeded: Callable[[], ZooModel]

    def build(self, seed: int = 0) -> ZooModel:
        """Seeds the global generator, builds the model and puts it into training mode."""
        torch.manual_seed(seed)
        built = self.build_unseeded()
        built.model.train()
        return built


ZOO: dict[str, ZooEntry] = {}


def zoo_model(name: str) -> Callable[[Callable[[], ZooModel]], Callable[[], ZooModel]]:
    """Declares the decorated function as the builder of the model called `name`."""

    def declare(build: Callable[[], ZooModel]) -> Callable[[], ZooModel]:
        if name in ZOO:
            raise ValueError(f"two models of the zoo are called {name}")
        ZOO[name] = ZooEntry(name, build)
        return build

    return declare


def generator(index: int) -> torch.Generator:
    """The generator of batch number `index`."""
    return torch.Generator().manual_seed(7919 * (index + 1))


def images(index: int, count: int, pixels: int, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, pixels, pixels, generator=generator(index))


def classes(index: int, count: int, number_of_classes: int = 10) -> Tensor:
    return torch.randint(0, number_of_classes, (count,), generator=generator(index + 500))


def tokens(index: int, count: int, length: int, vocabulary: int) -> Tensor:
    return torch.randint(0, vocabulary, (count, length), generator=generator(index + 1000))


def from_output(model: nn.Module, batch: Callable[[int], Batch]) -> ZooModel:
    """For transformers models: the batch is the keyword arguments, the output carries the loss."""
    return ZooModel(model, batch, lambda b: model(**b).loss)

"""The small net that most tests train: linear layers of one width, each with an activation behind it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def net(
    width: int = 64,
    layers: int = 8,
    activation: Callable[[], nn.Module] = nn.GELU,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build it, with the same weights each time.

    Args:
        width: of all layers.
        layers: how many.
        activation: makes the module behind each of them.
        dropout: the share that is dropped behind that; 0: nothing, and no module for it.
    """
    torch.manual_seed(0)

    def layer() -> nn.Sequential:
        modules = [nn.Linear(width, width), activation()]
        return nn.Sequential(*modules, *([nn.Dropout(dropout)] if dropout else []))

    return nn.Sequential(*(layer() for _ in range(layers)))

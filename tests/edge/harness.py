"""How a hand-made case is run: ordinarily, and under modes that drop all or a random part of what is saved.

Most cases compare bits. Where an ordinary run raises, the runtime must raise; where it cannot know the right answer it
must raise rather than give a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.bitwise import Snapshot, assert_same_bits, freeze_all, random_state
from tests.support.managed import managed

Body = Callable[[], Any]
MANAGED_MODES = ("drop_all", "random")


def leaf(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).requires_grad_()


def constant(*sizes: int, seed: int = 100) -> Tensor:
    return leaf(*sizes, seed=seed).detach()


def boundary() -> None:
    """An op, before which something can be evicted."""
    torch.zeros(1).add(1.0)


def run(body: Body, mode: str, seed: int = 0) -> tuple[Snapshot, int]:
    """Returns what `body` returned and the random state after it, and how many values were rebuilt."""
    torch.manual_seed(42)
    with managed(mode, seed=seed) as probe:
        result = body()
    tensors = [result] if isinstance(result, Tensor) else list(result)
    return freeze_all("result", tensors) | random_state(), probe.rebuilt


def check(body: Body, *, rebuilds: bool = True, modes: tuple[str, ...] = MANAGED_MODES) -> None:
    """Asserts that `body` gives the ordinary bits under every mode, and that dropping everything really rebuilt."""
    expected, _ = run(body, "ordinary")
    for mode in modes:
        for seed in (1, 2, 3) if mode == "random" else (0,):
            actual, rebuilt = run(body, mode, seed)
            assert_same_bits(actual, expected, f"{mode}, seed {seed}")
            if mode == "drop_all" and rebuilds:
                assert rebuilt > 0, "nothing was rebuilt, so nothing was tested"


def check_same_or_error(body: Body) -> None:
    """Asserts that `body` gives the ordinary bits or a RuntimeError that says why: never other bits."""
    expected, _ = run(body, "ordinary")
    for mode in MANAGED_MODES:
        complaint = ""
        try:
            actual, _ = run(body, mode, 1)
        except RuntimeError as error:
            complaint = str(error)
        if complaint:
            assert "delta_runtime" in complaint
        else:
            assert_same_bits(actual, expected, mode)


def check_raises(body: Body, match: str) -> None:
    """Asserts that `body` raises a RuntimeError with `match` ordinarily and under every mode."""
    for mode in ("ordinary", *MANAGED_MODES):
        with pytest.raises(RuntimeError, match=match):
            run(body, mode, 1)


class DirtyClamp(torch.autograd.Function):
    """Writes its argument, and saves it beside what it made of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x.abs() < 1
        x.clamp_(-1, 1)
        where = mask.nonzero()
        ctx.mark_dirty(x)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(mask, x, x.exp())
        return x, where

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:
        mask, x, e = ctx.saved_tensors
        return grad * mask * x.cos() * e

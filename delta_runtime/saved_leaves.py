"""Gives custom autograd Functions the very leaves that they saved.

Under saved-tensor hooks, whichever they are, PyTorch hands out a new tensor in `ctx.saved_tensors` where it
would hand out the parameter itself without them. What a program has attached to the parameter is then gone:
fused gradient accumulation looks for `weight.main_grad` there. Here the parameter is found again: it is the
variable that the function's own edge to it accumulates into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_plain = torch._C._FunctionBase.saved_tensors


def _is_view_of_all(tensor: torch.Tensor, leaf: torch.Tensor) -> bool:
    return (
        tensor.shape == leaf.shape
        and tensor.stride() == leaf.stride()
        and tensor.dtype == leaf.dtype
        and tensor.data_ptr() == leaf.data_ptr()
    )


def _saved_tensors(self: Any) -> tuple[Any, ...]:
    saved: tuple[Any, ...] = _plain.__get__(self)
    if not any(_looks_like_a_leaf(each) for each in saved):
        return saved
    leaves = [
        leaf
        for node, _ in self.next_functions
        if (leaf := getattr(node, "variable", None)) is not None
    ]

    def found(tensor: Any) -> Any:
        if not _looks_like_a_leaf(tensor):
            return tensor
        return next((leaf for leaf in leaves if _is_view_of_all(tensor, leaf)), tensor)

    return tuple(found(each) for each in saved)


def _looks_like_a_leaf(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.requires_grad
        and tensor.grad_fn is None
        and tensor.layout == torch.strided
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    )


def install() -> None:
    """Put the property in place. Idempotent; where nobody uses hooks it changes nothing."""
    if "saved_tensors" not in vars(BackwardCFunction):
        BackwardCFunction.saved_tensors = property(_saved_tensors)

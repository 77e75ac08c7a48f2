"""Gives custom autograd Functions the very tensors that they saved, with what the program has attached to them.

Under saved-tensor hooks, whichever they are, PyTorch hands out a new tensor in `ctx.saved_tensors` where it
would hand out the saved one itself without them. What a program has attached to that is then gone: fused
gradient accumulation looks for `weight.main_grad` there. Here `ctx.save_for_backward` notes what it is given.
A tensor that still lives is handed out itself. One that has died, as it would not have without hooks, comes
back with its attributes. A Function's own results are new tensors without hooks, too: they are left alone.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

_NOTES = "_delta_saved"
_plain_saved_tensors = torch._C._FunctionBase.saved_tensors
_plain_save_for_backward = FunctionCtx.save_for_backward


class _Note(NamedTuple):
    """A saved tensor. It is not held itself, or its memory could never be freed."""

    tensor: weakref.ref[torch.Tensor]
    attributes: dict[str, Any]


def _note_of(tensor: Any) -> _Note | None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(
        tensor, torch.nn.Parameter
    ):
        return None
    return _Note(weakref.ref(tensor), vars(tensor))


def _save_for_backward(self: Any, *tensors: Any) -> None:
    _plain_save_for_backward(self, *tensors)
    setattr(self, _NOTES, tuple(map(_note_of, tensors)))


def _is_view_of_all(tensor: torch.Tensor, original: torch.Tensor) -> bool:
    return (
        tensor.layout == original.layout == torch.strided
        and tensor.shape == original.shape
        and tensor.stride() == original.stride()
        and tensor.dtype == original.dtype
        and tensor.data_ptr() == original.data_ptr()
    )


def _saved_tensors(self: Any) -> tuple[Any, ...]:
    saved: tuple[Any, ...] = _plain_saved_tensors.__get__(self)
    notes: tuple[_Note | None, ...] = getattr(self, _NOTES, ())
    if len(notes) != len(saved):
        return saved

    def found(tensor: Any, note: _Note | None) -> Any:
        if tensor is None or note is None:
            return tensor
        original = note.tensor()
        if original is tensor or tensor.grad_fn is self:
            return tensor
        if original is None:
            vars(tensor).update(note.attributes)
            return tensor
        return original if _is_view_of_all(tensor, original) else tensor

    return tuple(map(found, saved, notes))


def install() -> None:
    """Put both in place. Idempotent; where nobody uses hooks it changes nothing."""
    if "saved_tensors" not in vars(BackwardCFunction):
        BackwardCFunction.saved_tensors = property(_saved_tensors)
        FunctionCtx.save_for_backward = _save_for_backward  # type: ignore[method-assign]

"""Runs Python code whose ops compute nothing: each says what it returns, and that is allocated but never touched.

Shapes come from `torch._subclasses.fake_tensor`; csrc/dry_run says which ops are asked for theirs. All tensors are
ordinary ones of the CPU, so a runtime records such a step as it records any other.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn import init

from delta_runtime import _C
from delta_runtime.core.errors import NeedsValues

_NOT_THE_PROGRAM = (
    f"{Path(str(torch.__file__)).parent}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
)
_CPU = torch.device("cpu")
_READERS = ("tolist", "numpy", "__array__")
_aten = torch.ops.aten
_CONTIGUOUS = frozenset(
    {_aten.native_layer_norm_backward.default, _aten._log_softmax_backward_data.default}
)
"""The first result of these is contiguous on the CPU, whatever shapes are derived from."""


def _asks_for(what: str) -> NeedsValues:
    return NeedsValues(
        f"This step cannot be run without computing: {what}.",
        found=_line_of_the_program(),
        change="Leave that out of the step, or make it depend on shapes alone.",
    )


def _line_of_the_program() -> str:
    """Return the innermost line that is neither of torch nor of this package."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_NOT_THE_PROGRAM, "<")):
            line = linecache.getline(path, frame.f_lineno).strip()
            return f"{path}:{frame.f_lineno}: {line}"
        frame = frame.f_back
    return ""


class _Shapes:
    """Says what an op returns, from the shapes of its arguments."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_fallback_kernels=False)

    def __call__(
        self,
        op: Any,
        args: list[Any],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        known: bool,
        numbers: bool,
    ) -> tuple[list[Any], list[Any]] | None:
        """Return what each return of the op is made of, and which arguments were resized.

        None where that depends on their content, and the content is known: then the op computes.
        """
        fakes = {id(t): FakeTensor(self._mode, t, _CPU) for t in tensors}
        before = [fakes[id(t)].shape for t in tensors]

        def fake(x: Any) -> Any:
            if isinstance(x, list):
                return [fake(each) for each in x]
            return fakes[id(x)] if isinstance(x, torch.Tensor) else x

        call = op.overloadpacket if numbers else op  # another overload of it takes a number
        try:
            with self._mode:
                result = call(*map(fake, args), **{name: fake(x) for name, x in kwargs.items()})
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            if known:
                return None
            raise _asks_for(f"{error.func} asks for numbers that were not computed") from None
        except UnsupportedOperatorException as error:
            raise _asks_for(f"{error.func} does not say what shapes it returns") from None
        order = [fakes[id(t)] for t in tensors]
        number = {id(each): index for index, each in enumerate(order)}
        storages = {each.untyped_storage()._cdata: index for index, each in enumerate(order)}
        returns = result if isinstance(result, tuple) else (result,)
        if op in _CONTIGUOUS and returns[0] is not None:
            with self._mode:
                returns = (
                    torch.empty_like(returns[0], memory_format=torch.contiguous_format),
                    *returns[1:],
                )
        if len(op._schema.returns) == 0:
            returns = ()
        told = [_told(each, number, storages, order) for each in returns]
        resized = [
            (index, list(each.shape))
            for index, (each, was) in enumerate(zip(order, before, strict=True))
            if each.shape != was
        ]
        return told, resized


def _told(returned: Any, number: dict[int, int], storages: dict[int, int], order: list[Any]) -> Any:
    if isinstance(returned, (list, tuple)):
        return [_one(each, number, storages, order) for each in returned]
    if returned is None or isinstance(returned, torch.Tensor):
        return [_one(returned, number, storages, order)]
    return (returned,)


def _one(t: Any, number: dict[int, int], storages: dict[int, int], order: list[Any]) -> Any:
    if t is None:
        return None
    if id(t) in number:
        return number[id(t)]
    geometry = list(t.shape), list(t.stride())
    of = storages.get(t.untyped_storage()._cdata)
    if of is not None:
        return (*geometry, of, t.storage_offset() - order[of].storage_offset())
    return (*geometry, t.dtype)


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Have ops of this thread, and of the backward that it calls, compute nothing.

    Small tensors that depend on no big ones (masks, positions, an optimizer's count of steps) are computed still.

    Raises:
        NeedsValues: from within; code asked for a number that was not computed. The tensors are worth nothing then.
    """
    _C.dry_run.enter(_Shapes())
    with contextlib.ExitStack() as guards:
        for name in _READERS:
            guards.enter_context(_guarded(name))
        guards.enter_context(_filled_at_once())
        try:
            yield
        finally:
            _C.dry_run.leave()


@contextlib.contextmanager
def _filled_at_once() -> Iterator[None]:
    """Have no initializer draw again until all numbers lie within bounds: there are no numbers."""
    name = "_no_grad_trunc_normal_"
    draws = getattr(init, name, None)
    if draws is None:
        yield
        return

    @functools.wraps(draws)
    def draw(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _C.dry_run.is_entered():
            return draws(tensor, *args, **kwargs)
        with torch.no_grad():
            return tensor.normal_()

    setattr(init, name, draw)
    try:
        yield
    finally:
        if getattr(init, name) is draw:
            setattr(init, name, draws)


@contextlib.contextmanager
def _guarded(name: str) -> Iterator[None]:
    """Have a method of tensors that reads their memory, and is no op, refuse what was not computed."""
    inherited = name not in vars(torch.Tensor)
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def guarded(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _C.dry_run.is_entered() and not _C.dry_run.is_known(self):
            raise _asks_for(f"Tensor.{name} asks for numbers that were not computed")
        return method(self, *args, **kwargs)

    setattr(torch.Tensor, name, guarded)
    try:
        yield
    finally:
        if vars(torch.Tensor).get(name) is guarded:  # else somebody has put another one over it
            if inherited:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, method)

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
import sysconfig
import threading
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
from torch.utils import deterministic

from delta_runtime import _C
from delta_runtime.core.errors import NeedsValues, UsageError

_NOT_THE_PROGRAM = (
    f"{Path(str(torch.__file__)).parent}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
)
_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")}
)
_CPU = torch.device("cpu")
_READERS = ("tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__")
"""Methods of tensors that give their content away, and are no ops."""
_SAFETENSORS = ("_flatten_as_ptr", "_flatten", "_tobytes")
"""What saving goes through in `safetensors.torch`, by its versions: it reads memory by its address."""
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
    """Return the innermost line of the program itself, else of a library: neither of torch nor of this package."""
    frame: FrameType | None = sys._getframe()
    of_a_library = ""
    while frame is not None:
        path, number = frame.f_code.co_filename, frame.f_lineno
        if not path.startswith((*_NOT_THE_PROGRAM, "<frozen", "<string>")):
            told = f"{path}:{number}: {linecache.getline(path, number).strip()}".rstrip(": ")
            if not path.startswith(_LIBRARIES):
                return f"{told}, by way of {of_a_library}" if of_a_library else told
            of_a_library = of_a_library or told
        frame = frame.f_back
    return of_a_library


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
        if any(t.layout is not torch.strided or t.is_quantized for t in tensors):
            raise _asks_for(f"{op} takes a sparse or quantized tensor")
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
    if t.layout is not torch.strided or t.is_quantized:
        raise _asks_for("an op returns a sparse or quantized tensor")
    geometry = list(t.shape), list(t.stride())
    of = storages.get(t.untyped_storage()._cdata)
    if of is not None:
        return (*geometry, of, t.storage_offset() - order[of].storage_offset())
    return (*geometry, t.dtype)


_owner: threading.Thread | None = None
"""The thread that a dry run is on."""


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
    """Have ops of this thread, and of the backward that it calls, compute nothing.

    Small tensors that depend on no big ones (masks, positions, an optimizer's count of steps) are computed still; those
    that were there before have their content back afterwards. From the first dry run on, methods that give a tensor's
    content away (`numpy`, `tolist`, pickling) look whether there is one.

    Raises:
        NeedsValues: from within; code asked for a number that was not computed. The tensors are worth nothing then.
        UsageError: another thread is in a dry run.
    """
    global _owner
    outermost = _owner is None
    if not outermost and _owner is not threading.current_thread():
        raise UsageError("Another thread is in a dry run.", change="Let it end first.")
    _guard_readers()
    filled = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False  # type: ignore[assignment]
    _owner = threading.current_thread()
    _C.dry_run.enter(_Shapes())
    try:
        with _filled_at_once():
            yield
    finally:
        _C.dry_run.leave()
        deterministic.fill_uninitialized_memory = filled  # type: ignore[assignment]
        if outermost:
            _owner = None


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


def _guard_readers() -> None:
    """Have what reads a tensor's memory, and is no op, refuse what was not computed. Idempotent."""
    for name in _READERS:
        _guard(torch.Tensor, name, f"Tensor.{name}")
    saving = sys.modules.get("safetensors.torch")
    for name in _SAFETENSORS:
        if hasattr(saving, name):
            _guard(saving, name, "safetensors")


_guarded: set[tuple[int, str]] = set()


def _guard(owner: Any, name: str, told: str) -> None:
    if (id(owner), name) in _guarded:
        return
    _guarded.add((id(owner), name))
    method = getattr(owner, name)

    @functools.wraps(method)
    def guarded(given: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = given.values() if isinstance(given, dict) else (given,)
        if _C.dry_run.is_entered() and not all(map(_C.dry_run.is_known, tensors)):
            raise _asks_for(f"{told} asks for numbers that were not computed")
        return method(given, *args, **kwargs)

    setattr(owner, name, guarded)

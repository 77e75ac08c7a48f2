"""What Python code does to a tensor's memory past PyTorch's dispatcher, made visible to the runtime.

Covers the methods that write to a tensor without an op (`apply_`, `map_`, those of storages), the collectives of a
backend's own object, compiled functions that write to their inputs, and the methods that hand a tensor's memory to
others who may write to it (`numpy`, `__array__`, DLPack, slices of a storage). From the first time that a runtime is
entered until it is closed, and nothing that it saved is left, they tell it first; what they do is unchanged. (Not from
step to step: each change of a class costs all that uses it.)
An array is a loan: when it is gone, nobody can write through it any more.

Not covered: code that has the address of a tensor (`data_ptr`, C++ extensions, ctypes, consumers of
`__cuda_array_interface__` and of `__dlpack_c_exchange_api__`), ops that `OpOverload.redispatch` calls below where
PyTorch counts writes, and methods that were taken off their class before a runtime was entered
(`to_numpy = torch.Tensor.numpy`). What such code changes is found by evidence, or told by
`delta_runtime.mark_written`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from delta_runtime.extension import _C

_WRITERS = ("apply_", "map_", "map2_")
_LENDERS = ("numpy", "__array__")
_COLLECTIVES = (
    *("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "_allgather_base"),
    *("allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter", "alltoall"),
    *("alltoall_base", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("send", "recv", "recv_anysource"),
)
"""Of a backend, called past `torch.distributed`: no op tells of them. All tensors count as written."""
_STORAGE_WRITERS = ("fill_", "copy_", "byteswap", "resize_", "__setitem__", "_set_from_file")


class _Loan(weakref.ref):  # type: ignore[type-arg]
    """An array that was handed out."""

    __slots__ = ("number",)
    number: int


_lock = threading.RLock()
_listeners: list[weakref.ref[Any]] = []
_FOR_GOOD = -1  # no loan
_loans = itertools.count()
_lent: dict[int, _Loan] = {}
"""The arrays that were handed out and live, by the numbers of their loans."""
_gone: list[_Loan] = []
"""Those that do not. It is filled by a function in C: no signal is handled, and lost, in there."""
_returned: list[int] = []
"""Loans that ended otherwise: their arrays never came to be."""
_MOST_GONE = 512
# No WeakSet: its callbacks run Python code whenever a session dies, and what a signal handler raises in
# there is lost.
_originals: list[tuple[Any, str, Any, Any]] = []
"""Of each method: its owner, its name, what was there (None: it is inherited), and what is there now."""
_original_code: list[tuple[Any, CodeType, CodeType]] = []
"""Of each function whose code was exchanged: itself, its own code, and ours."""


def listen(session: Any) -> None:
    """Tell this session of raw accesses from now on. Idempotent."""
    with _lock:
        if not _originals:
            _install()
        if all(listener() is not session for listener in _listeners):
            _listeners.append(weakref.ref(session))


def stop_listening(session: Any) -> None:
    """Tell it only as long as it has tensors saved. With the last that hears the methods are PyTorch's own again.

    Idempotent.
    """
    with _lock:
        _forget(session)


def forget_lock() -> None:
    """In a forked child: whoever held it does not exist there."""
    global _lock
    _lock = threading.RLock()


def _forget(session: Any) -> None:
    """Of a session, and of those that died without being closed. Under the lock."""
    _listeners[:] = [each for each in _listeners if each() not in (None, session)]
    if not _listeners and not _C.any_watches():
        _remove()
        _lent.clear()
        _gone.clear()
        _returned.clear()


def take_back() -> None:
    """Tell of the arrays that are gone by now."""
    if not _gone and not _returned:
        return
    with _lock:
        ended = _taken(_returned)
        for loan in _taken(_gone):
            _lent.pop(loan.number, None)
            ended.append(loan.number)
    if ended:
        _C.take_back(ended, _that_listen())


def _taken(items: list[Any]) -> list[Any]:
    """All of them, out of a list that others go on filling."""
    taken = items[:]
    del items[: len(taken)]
    return taken


def _that_listen() -> list[Any]:
    return [session for listener in tuple(_listeners) if (session := listener()) is not None]


def _tell(tensor_or_storage: Any, *, writes: bool, loan: int = _FOR_GOOD) -> None:
    if not _C.before_raw_access(tensor_or_storage, writes, loan, _that_listen()):
        with _lock:
            _forget(None)


def _always(*_: Any) -> bool:
    return True


def _is_slice(index: Any) -> bool:
    """Return whether an index takes a slice of a storage: that is another storage over the same memory, no number."""
    return isinstance(index, slice)


def _wrap(owner: Any, name: str, *, writes: bool, where: Callable[..., bool] = _always) -> None:
    """Tell before the method is called, `where` its arguments say that there is something to tell."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if where(*args):
            _tell(self, writes=writes)
        return original(self, *args, **kwargs)

    _put(owner, name, original, method)


def _tensors_in(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in arguments:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors_in(each)


def _wrap_collective(owner: Any, name: str) -> None:
    """Tell of all tensors that it is given, before it is called."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors_in((*args, *kwargs.values())):
            _tell(tensor, writes=True)
        return original(self, *args, **kwargs)

    _put(owner, name, original, method)


def _increment_version(tensor: Any) -> None:
    """Do what `torch.autograd.graph.increment_version` does, while sessions listen. It runs among the names of PyTorch.

    The wrapper of a compiled function counts the writes to its inputs before it makes them. What anybody else counts
    has been written, and is found by its version.
    """
    import sys

    if isinstance(tensor, torch.Tensor):
        tensor = (tensor,)
    caller = sys._getframe().f_back
    if caller is not None and "/torch/_functorch/_aot_autograd/" in caller.f_code.co_filename:
        from delta_runtime.raw_access import about_to_be_written

        tensor = about_to_be_written(tensor)
    torch._C._increment_version(tensor)


def about_to_be_written(tensors: Iterable[Any]) -> tuple[Any, ...]:
    """Tell of all that compiled code is about to write to, and return it."""
    told = tuple(tensors)
    for tensor in told:
        for plain in _plain_tensors(tensor):
            _tell(plain, writes=True)
    return told


def _plain_tensors(tensor: Any) -> Iterator[torch.Tensor]:
    """Return the tensor, or those that a wrapper subclass holds inside."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    elif isinstance(tensor, torch.Tensor):
        yield tensor


def _put_code(function: Any, ours: Any) -> None:
    """Change what the function does and not what it is: compiled code and dynamo's tables hold it.

    It goes on to be PyTorch's by its file: dynamo traces what is not.
    """
    code = ours.__code__.replace(co_filename=function.__code__.co_filename)
    _original_code.append((function, function.__code__, code))
    function.__code__ = code


def _wrap_lender(owner: Any, name: str) -> None:
    """Tell before an array is made, and remember that."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = next(_loans)
        _tell(self, writes=False, loan=number)
        try:
            array = original(self, *args, **kwargs)
        except BaseException:
            _returned.append(number)
            raise
        if isinstance(array, np.ndarray):  # what else a subclass may return has it for good
            loan = _Loan(array, _gone.append)
            loan.number = number
            _lent[number] = loan
        if len(_gone) >= _MOST_GONE:
            take_back()
        return array

    _put(owner, name, original, method)


def _keep_from_dynamo(function: Any) -> None:
    """Dynamo leaves the function's frames alone, and those of all that it calls; see csrc/util/plain_frames.h."""
    with contextlib.suppress(ImportError):  # some builds are without dynamo
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(
            function.__code__, eval_frame._FrameExecStrategy(skip, skip)
        )


def _put(owner: Any, name: str, original: Any, method: Any) -> None:
    _keep_from_dynamo(method)
    _originals.append((owner, name, original if name in vars(owner) else None, method))
    setattr(owner, name, method)


def _install() -> None:
    for name in _WRITERS:
        _wrap(torch.Tensor, name, writes=True)
    for name in _LENDERS:
        _wrap_lender(torch.Tensor, name)
    _wrap(torch.Tensor, "__dlpack__", writes=False)
    for name in _STORAGE_WRITERS:
        _wrap(torch.UntypedStorage, name, writes=True)
    _wrap(torch.UntypedStorage, "__getitem__", writes=False, where=_is_slice)
    _put_code(torch.autograd.graph.increment_version, _increment_version)
    distributed = getattr(torch._C, "_distributed_c10d", None)  # some builds are without
    backend = getattr(distributed, "Backend", None)
    for name in _COLLECTIVES:
        if hasattr(backend, name):
            _wrap_collective(backend, name)
    for module in (torch, torch.utils.dlpack):
        _wrap(module, "to_dlpack", writes=False)


def _remove() -> None:
    while _original_code:
        function, code, our_code = _original_code.pop()
        if function.__code__ is our_code:
            function.__code__ = code
    while _originals:
        owner, name, original, ours = _originals.pop()
        if vars(owner).get(name) is not ours:
            continue  # somebody has wrapped it since; alone, ours does nothing
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

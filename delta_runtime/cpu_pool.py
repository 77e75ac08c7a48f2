"""The CPU pool: a process-wide CPU allocator with a capacity.

It gives every machine a device that runs out of memory for real: exact peak, and
`torch.OutOfMemoryError` at the capacity. It counts what was allocated after `install()`; blocks from
before are freed as they always were and never counted.

    from delta_runtime import cpu_pool

    cpu_pool.install()
    with cpu_pool.capacity("2GiB"):
        train()          # torch.OutOfMemoryError above 2 GiB
    print(cpu_pool.peak_bytes())
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import cast

import torch

from delta_runtime.core.units import BytesSpec, parse_bytes
from delta_runtime.extension import _C

_pool = _C.cpu_pool


_older: list[weakref.ref[torch.Tensor]] = []


def install() -> None:
    """Make the pool the CPU allocator of this process. Idempotent; cannot be undone."""
    if not installed():
        _older[:] = [weakref.ref(each) for each in _weights()]
    _pool.install()


def _weights() -> list[torch.Tensor]:
    """Return all parameters, their gradients, and the state of all optimizers, as far as gc sees them."""
    found: list[torch.Tensor] = []
    for each in gc.get_objects():
        # It belongs to others: half made, without its state, changed by another thread.
        with contextlib.suppress(Exception):
            found += _weights_of(each)
    return [getattr(each, "_local_tensor", each) for each in found]  # a DTensor's own part


def _weights_of(thing: object) -> list[torch.Tensor]:
    kind = type(thing)
    if issubclass(kind, torch.Tensor):
        tensor = cast(torch.Tensor, thing)
        if not issubclass(kind, torch.nn.Parameter) and not getattr(tensor, "_is_param", False):
            return []
        return [tensor] if tensor.grad is None else [tensor, tensor.grad]
    if issubclass(kind, torch.optim.Optimizer):
        states = [each for each in thing.state.values() if isinstance(each, dict)]  # type: ignore[attr-defined]
        values = [value for state in states for value in state.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]
    return []


def older_weights() -> list[torch.Tensor]:
    """Return the weights, gradients and optimizer states that live and are older than the pool, which counts none.

    What the garbage collector does not see is not among them, such as what was there before a `gc.freeze()`.
    """
    return [each for ref in _older if (each := ref()) is not None]


def installed() -> bool:
    """Whether the pool is the CPU allocator."""
    return bool(_pool.installed())


def set_capacity(limit: BytesSpec | None) -> None:
    """Set the most bytes that may live at any moment; installs the pool.

    Args:
        limit: bytes, text such as ``"2GiB"``, or None to lift the capacity.

    Raises:
        UsageError: the limit cannot be read; nothing has changed.
    """
    size_bytes = 0 if limit is None else parse_bytes(limit, allow_zero=False, name="capacity")
    install()
    _pool.set_capacity(size_bytes)


def capacity_bytes() -> int | None:
    """Return the capacity in bytes; None when there is none."""
    return int(_pool.capacity_bytes()) or None


def allocated_bytes() -> int:
    """Bytes that live now."""
    return int(_pool.live_bytes())


def resident_bytes() -> int:
    """Bytes that the process holds of the system for large blocks (256 KiB and more), in use and free.

    Free memory serves later allocations. It goes back to the system where the two together are more
    than 5/4 of the capacity, of the budget of an entered Runtime, or, without either, of the most
    that was in use (6/4, where only parts of huge pages are free).
    """
    return int(_pool.resident_bytes())


def peak_bytes() -> int:
    """Most bytes that lived at once since `install()` or the last `reset_peak()`."""
    return int(_pool.peak_bytes())


def reset_peak() -> None:
    """Start a new window for `peak_bytes()`."""
    _pool.reset_peak()


@contextlib.contextmanager
def capacity(limit: BytesSpec) -> Iterator[None]:
    """Set a capacity for the duration of a block, then put the former one back."""
    former = capacity_bytes()
    set_capacity(limit)
    try:
        yield
    finally:
        _pool.set_capacity(former or 0)

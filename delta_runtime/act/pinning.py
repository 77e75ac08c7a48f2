"""Pinning host memory, so that an accelerator's copy engines reach it by themselves.

The runtime registers parts of one reservation with the driver, exactly as large as it wants them: no
allocator's rounding to powers of two. It asks CuPy for that where CuPy is installed, torch otherwise.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from delta_runtime.act.cupy_driver import cupy_driver

Pinning: TypeAlias = Callable[[int, int], bool]
"""Address and bytes, both multiples of 4,096; whether it worked."""


class Driver(Protocol):
    """What pinning takes of a CUDA runtime."""

    def register(self, address: int, bytes_: int) -> bool:
        """Pin memory of the host; whether it worked. What failed is not told to whoever comes next."""

    def unregister(self, address: int) -> bool:
        """Let go of memory that was pinned, by its first address; whether it worked."""


def pinning(device: torch.device) -> tuple[Pinning, Pinning] | None:
    """How host memory is pinned, and let go of, for a device; None where nobody knows.

    Memory that is not pinned does as well, but the device's copies of it wait for the host.
    """
    if device.type != "cuda":  # CUDA, and ROCm under the same name
        return None
    driver: Driver = cupy_driver() or TorchDriver()

    def pin(address: int, bytes_: int) -> bool:
        with torch.cuda.device(device):
            return driver.register(address, bytes_)

    def unpin(address: int, bytes_: int) -> bool:
        return driver.unregister(address)

    return pin, unpin


class TorchDriver:
    """The CUDA runtime that torch is linked to."""

    def __init__(self) -> None:
        self._runtime = torch.cuda.cudart()

    def register(self, address: int, bytes_: int) -> bool:
        """See `Driver`."""
        worked = int(self._runtime.cudaHostRegister(address, bytes_, 0)) == 0
        if not worked:
            _forget_last_error()
        return worked

    def unregister(self, address: int) -> bool:
        """See `Driver`."""
        return int(self._runtime.cudaHostUnregister(address)) == 0


def _forget_last_error() -> None:
    """Else the next launch of a kernel would be blamed for what failed here."""
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(library)).cudaGetLastError()

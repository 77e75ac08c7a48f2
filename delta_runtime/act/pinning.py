"""Pinning host memory, so that an accelerator's copy engines reach it by themselves.

The runtime registers parts of one reservation with the driver, exactly as large as it wants them: no
allocator's rounding to powers of two, and no library beside torch.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

Pinning: TypeAlias = Callable[[int, int], bool]
"""Address and bytes, both multiples of 4,096; whether it worked."""


def pinning(device: torch.device) -> tuple[Pinning, Pinning] | None:
    """How host memory is pinned, and let go of, for a device; None where nobody knows.

    Memory that is not pinned does as well, but the device's copies of it wait for the host.
    """
    if device.type != "cuda":  # CUDA, and ROCm under the same name
        return None
    runtime = torch.cuda.cudart()

    def pin(address: int, bytes_: int) -> bool:
        with torch.cuda.device(device):
            worked = int(runtime.cudaHostRegister(address, bytes_, 0)) == 0
            if not worked:
                _forget_last_error()
            return worked

    def unpin(address: int, bytes_: int) -> bool:
        return int(runtime.cudaHostUnregister(address)) == 0

    return pin, unpin


def _forget_last_error() -> None:
    """Else the next launch of a kernel would be blamed for what failed here."""
    library = Path(torch.__file__).parent / "lib" / "libc10_cuda.so"
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(library)).cudaGetLastError()

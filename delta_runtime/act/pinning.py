"""Pinning host memory, so that an accelerator's copy engines reach it by themselves.

The runtime registers parts of one reservation with the driver, exactly as large as it wants them: no
allocator's rounding to powers of two, and no library beside torch.
"""

from __future__ import annotations

from collections.abc import Callable
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
            return int(runtime.cudaHostRegister(address, bytes_, 0)) == 0

    def unpin(address: int, bytes_: int) -> bool:
        return int(runtime.cudaHostUnregister(address)) == 0

    return pin, unpin

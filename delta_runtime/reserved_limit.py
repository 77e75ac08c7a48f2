"""CUDA's caching allocator kept inside the budget with all that it reserves, where `delta_runtime._cuda` is built.

Without it the allocator may take more than the budget from a card that has more: its fragments are known behind some
steps only. With it an allocation that would pass the budget asks for room from inside, and is tried again; where no
room is to be had the budget is passed, and counted (csrc/pool/limited_allocator.h).

Covers which devices are kept so. Does not cover what is evicted for it (csrc/evict), nor that plans leave room for
fragments (allocator_margin.py).

Note: who is left alone
  1. Whoever says DELTA_LIMIT_RESERVED=0.
  2. Other allocators (`backend:cudaMallocAsync`, a pluggable one), and ROCm.
What was put in front of PyTorch's allocator stays there until the process ends, and hands everything on while no
runtime is entered. Each time that it has to make room, PyTorch's allocator counts an OutOfMemoryError of its own
(`torch.cuda.memory_stats()["num_ooms"]`), and calls who wants to be told of one; the program sees none.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from delta_runtime.extension import _C
from delta_runtime.growing_segments import is_native

_EXTENSION = "delta_runtime._cuda"


def keeps_to_limits(device: torch.device) -> bool:
    """Whether runtimes of a device that are made from now on keep what it reserves inside their budget."""
    return device.type != "cpu" and _C.has_limited_allocator(str(device))


def let_allocator_keep_to_limits(
    device: torch.device, load: Callable[[], Any] | None = None
) -> bool:
    """Put an allocator in front of PyTorch's own that can keep to a limit, if the device is a card that it knows.

    Args:
        device: any, with its index; without effect where it is not a CUDA card.
        load: gives the module `delta_runtime._cuda`; None: imports it.

    Returns:
        Whether it is there now. Where it cannot be put there, for whatever reason, all is as before.
    """
    if keeps_to_limits(device):
        return True
    if device.type != "cuda" or torch.version.hip or not is_native():
        return False
    try:
        cuda = (load or _import)()
        _check_version(cuda)
        allocator = cuda.limited_allocator(device.index)
        _C.set_limited_allocator(str(device), allocator)
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == _EXTENSION:
            return False  # it is optional
        warnings.warn(
            f"delta_runtime: the allocator of this card is kept to no limit ({error}).",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _import() -> Any:
    return importlib.import_module(_EXTENSION)


def _check_version(cuda: Any) -> None:
    """Refuse an extension whose table of functions may be another one than that of this PyTorch."""
    here = torch.__version__.partition("+")[0]
    if cuda.built_for_torch != here:
        raise ImportError(f"{_EXTENSION} is built for torch {cuda.built_for_torch}, here is {here}")

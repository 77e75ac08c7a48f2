"""CUDA's caching allocator told to let its segments grow (`expandable_segments`), where nobody has said otherwise.

By default that allocator cuts up segments of a few sizes, and a segment stays whole as long as one tensor lives on it.
Inside a tight budget an op may then find no room with half of the device free in pieces. Segments that grow and shrink
by pages leave few such pieces: tests/accelerator/test_fragments.py shows both.

Covers whose word counts, and that a card whose driver cannot do it is left as it was. Does not cover what is left to
fragments (allocator_margin.py).

Note: who is left alone
  1. Whoever names `expandable_segments` in PYTORCH_ALLOC_CONF, in PYTORCH_CUDA_ALLOC_CONF, or in the last call that
     changed the allocator's settings: their word counts.
  2. Other allocators (`backend:cudaMallocAsync`, a pluggable one), ROCm, and WSL, whose driver may fail to map pages
     (https://github.com/pytorch/pytorch/issues/192330).
Settings are the process's: they stay when the runtime is closed. What was allocated before stays where it is. Tensors
on segments that grow cannot be handed to another process (CUDA IPC) where the system forbids `pidfd_getfd`, as many
containers do, nor by libraries that ask CUDA itself for a handle. A training process that does so, or that brings an
allocator of its own which needs segments as they were, names `expandable_segments:False`.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OPTION = "expandable_segments"


def segments_expand() -> bool:
    """Whether CUDA's allocator has been told to let its segments grow."""
    return f"{_OPTION}:true" in _words(_settings() or _of_the_environment())


def is_native() -> bool:
    """Whether the allocator is PyTorch's own, and not one that the program has put in its place."""
    asked = getattr(torch._C, "_cuda_getAllocatorBackend", None)  # absent from builds without CUDA
    return asked is None or asked() == "native"


def let_segments_grow(
    device: torch.device, allocate: Callable[[torch.device], None] | None = None
) -> bool:
    """Have the allocator of a card let its segments grow from now on, unless the user or the system is against it.

    Args:
        device: any; without effect where it is not a CUDA card.
        allocate: what is tried on the card; an error of it takes the setting back, with a warning. None: an
            allocation on a side stream, which costs 2 MiB that stay in the allocator's cache.

    Returns:
        Whether the setting is new.
    """
    if device.type != "cuda" or not _is_ours_to_set():
        return False
    before = _settings().strip(", ")
    try:
        _set(_with(before, "True"))
        (allocate or _allocate)(device)
    except torch.OutOfMemoryError:
        pass  # the card is full, which says nothing about its driver
    except (RuntimeError, ValueError) as error:
        _set(_with(before, "False"))
        warnings.warn(
            f"delta_runtime: segments of the allocator do not grow on this card ({error}); fragments cost more.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _with(settings: str, word: str) -> str:
    return ",".join(filter(None, [settings, f"{_OPTION}:{word}"]))


def _is_ours_to_set() -> bool:
    said = _words(_settings() + "," + _of_the_environment())
    return (
        hasattr(torch._C, "_accelerator_setAllocatorSettings")
        and hasattr(torch._C, "_accelerator_getAllocatorSettings")
        and not torch.version.hip
        and _OPTION not in said
        and "backend:" not in said.replace("backend:native", "")
        and is_native()
        and "microsoft" not in platform.release().lower()
    )


def _settings() -> str:
    """Return what the allocator was told last: by the environment, or by a call since."""
    asked = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    return (asked() or "") if asked else ""


def _set(settings: str) -> None:
    """Replace the settings; of those that are not named again, some go back to their defaults."""
    torch._C._accelerator_setAllocatorSettings(settings)


def _of_the_environment() -> str:
    return ",".join(os.environ.get(name, "") for name in _VARIABLES)


def _words(settings: str) -> str:
    return settings.replace(" ", "").lower()


def _allocate(device: torch.device) -> None:
    """On a stream that most likely has nothing in the cache, so that the allocator has to ask the driver for pages."""
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.empty(1, dtype=torch.uint8, device=device)

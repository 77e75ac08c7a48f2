"""The device that the sweeps and the accelerator tests run on: the CPU, a real accelerator, or the simulated one.

DELTA_TEST_DEVICE says which: "cpu" (where it is not set), "fake" for tests/support/fake_accelerator, or a device type
of torch such as "cuda". One process has one of them, because loading the simulated one changes the whole process.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

TYPE = os.environ.get("DELTA_TEST_DEVICE") or "cpu"


@functools.cache
def device_under_test() -> torch.device:
    """The device, with what it needs loaded and deterministic kernels asked for.

    Raises:
        RuntimeError: there is none of that type here.
    """
    if TYPE == "cpu":
        return torch.device("cpu")
    if TYPE == "fake":
        from delta_runtime import _C
        from tests.support import fake_accelerator

        fake = fake_accelerator.load()
        _C.set_limited_allocator("fake:0", fake.limited_allocator())
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or current.type != TYPE:
        raise RuntimeError(f"DELTA_TEST_DEVICE={TYPE}: torch finds {current or 'no accelerator'}")
    torch.use_deterministic_algorithms(True, warn_only=True)
    return torch.device(TYPE, 0)


def device_module() -> ModuleType | None:
    """torch.cuda and the like; None on the CPU."""
    device = device_under_test()
    return None if device.type == "cpu" else torch.get_device_module(device)


def seed(number: int) -> None:
    """Seeds the CPU's generator and the device's.

    torch.manual_seed also takes down a stack trace for each kind of device that could be there, which takes a
    millisecond within pytest.
    """
    torch.default_generator.manual_seed(number)
    module = device_module()
    if module is not None:
        module.manual_seed_all(number)


def moved(tree: Any) -> Any:
    """All tensors of a tree on the device."""
    device = device_under_test()
    return tree_map_only(Tensor, lambda t: t.to(device), tree)

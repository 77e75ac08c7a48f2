"""The device that a runtime manages, and how many bytes of it a budget means."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from delta_runtime.config import Config, Launched
from delta_runtime.core.cgroup import cgroup_cores, cgroup_limit_bytes
from delta_runtime.core.cores import usable_cores
from delta_runtime.core.errors import UsageError
from delta_runtime.extension import _C

_AUTO_MARGIN = 0.05


def resolve_device(name: str | None) -> torch.device:
    """Return the device of that name; for None the current accelerator, or the CPU where there is none.

    Raises:
        UsageError: there is no such device here.
    """
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    try:
        device = torch.device(name)
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        torch.empty(0, device=device)
    except Exception as error:
        raise UsageError(
            f"device: {name!r} cannot be used.", found=f"{type(error).__name__}: {error}"
        ) from error
    return device


def cores_of_its_own() -> float:
    """Return how many cores this process has that do not slow each other down.

    Two hardware threads of a core count as one, and no more count than its control groups leave it.
    """
    real = psutil.cpu_count(logical=False) or 1
    return min(usable_cores(), real, cgroup_cores() or real)


def core_idles(device: torch.device) -> Callable[[], bool]:
    """Return what tells, at little cost, whether training on this device leaves a core of the machine idle.

    On the CPU it computes on as many as torch has threads then, on an accelerator on one, in each of the processes that
    a launcher started together. A core counts once, whatever hardware threads it has. What else runs on the machine is
    not known.
    """
    cores = cores_of_its_own() / Launched.from_environment().local_world_size
    if device.type != "cpu":
        return lambda: cores >= 2
    return lambda: cores >= 1 + torch.get_num_threads()


def resolve_budget(config: Config, device: torch.device) -> int:
    """Return the budget in bytes on this device.

    Processes that a launcher started together on one machine share its RAM: on the CPU "auto" and
    shares are of one process's part of it.

    Raises:
        UsageError: more than the device has.
    """
    if device.type == "cpu":
        pool_bytes = _C.cpu_pool.capacity_bytes()
        held_bytes = _C.cpu_pool.live_bytes()
        memory = psutil.virtual_memory()
        total_bytes = min(memory.total, cgroup_limit_bytes() or memory.total)
        processes = Launched.from_environment().local_world_size
        shared = config.budget_bytes() is None  # else it is in bytes, and anybody's own business
        capacity_bytes = pool_bytes or total_bytes // (processes if shared else 1)
        free_bytes = min(memory.available + _C.cpu_pool.idle_bytes(), total_bytes) // processes
    else:
        pool_bytes = 0
        held_bytes = torch.accelerator.memory_allocated(device)
        free_bytes, capacity_bytes = torch.accelerator.get_memory_info(device)
    given = config.budget_bytes(capacity_bytes)
    if given is not None:
        return given
    if pool_bytes:
        return int(pool_bytes)  # a pool's capacity is all ours
    return int((free_bytes + held_bytes) * (1 - _AUTO_MARGIN))

"""What lies below the device: whether there is host memory to swap to, and how much of it.

A CPU device is RAM itself, so there is nothing below it unless it stands in for an accelerator:
`host_budget` or `link_bytes_per_s` make it one (the virtual accelerator). Then the CPU pool is the
device's memory and RAM outside of the pool is the host's.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from delta_runtime.act.links import link_bytes_per_s
from delta_runtime.core.cgroup import cgroup_limit_bytes
from delta_runtime.core.errors import UsageError
from delta_runtime.core.units import format_bytes

_SHARE_OF_AVAILABLE = 0.5


@dataclass(frozen=True, slots=True)
class HostTier:
    """Host memory to swap to, and the lanes to it.

    Args:
        budget_bytes: most bytes of host memory that are taken.
        link_bytes_per_s: throttle of each lane; 0 for none.
    """

    budget_bytes: int
    link_bytes_per_s: float


def open_host_tier(
    device: torch.device, host_budget_bytes: int | None, link: float | str | None
) -> HostTier | None:
    """What a runtime on this device may swap to; None where there is nothing below the device.

    Args:
        device: the device that is managed.
        host_budget_bytes: most bytes of host memory; None for half of what is available now.
        link: the throttle of the lanes, as `link_bytes_per_s` takes it.

    Raises:
        UsageError: more host memory than there is, no such profile, or a device whose lanes this
            version does not have. Nothing has been changed.
    """
    if host_budget_bytes is None and link is None:
        return None
    if device.type != "cpu":
        raise UsageError(
            "host_budget, link_bytes_per_s: this version swaps on the CPU device only.",
            asked=f"swapping on {device}",
            change="Leave them out: there this version makes room by recomputation.",
        )
    memory = psutil.virtual_memory()
    total_bytes = min(memory.total, cgroup_limit_bytes() or memory.total)
    if host_budget_bytes is None:
        host_budget_bytes = int(min(memory.available, total_bytes) * _SHARE_OF_AVAILABLE)
    elif host_budget_bytes > total_bytes:
        raise UsageError(
            "host_budget: more than the machine has.",
            asked=format_bytes(host_budget_bytes),
            found=format_bytes(total_bytes),
            change="Give less, or leave it out for half of what is available.",
        )
    return HostTier(host_budget_bytes, link_bytes_per_s(link))

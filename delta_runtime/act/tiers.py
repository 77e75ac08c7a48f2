"""What lies below the device: host memory, disk, or nothing.

A CPU device is RAM itself, so there is no host memory below it unless it stands in for an
accelerator: `host_budget` or `link_bytes_per_s` make it one (the virtual accelerator). Then the CPU
pool is the device's memory and RAM outside of the pool is the host's. Below an accelerator there is
pinned host memory; its link is made slower by more bytes that cross it. Disk lies below
them all, where `disk_budget` or `spill_dir` ask for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from delta_runtime.act.links import link_bytes_per_s, own_link_bytes_per_s
from delta_runtime.act.spill import SpillFile, open_spill_file
from delta_runtime.config import Config
from delta_runtime.core.cgroup import cgroup_limit_bytes
from delta_runtime.core.errors import UsageError
from delta_runtime.core.units import format_bytes

_SHARE_OF_AVAILABLE = 0.5
_AS_FAST = 1.1  # times a speed that was measured once
_MOST_CROSSINGS = 64  # the host queues a copy for each


@dataclass(frozen=True, slots=True)
class Tiers:
    """What a runtime may swap to.

    Args:
        host_bytes: most bytes of host memory; 0 where there is no such tier.
        link_bytes_per_s: throttle of each direction; 0 for none.
        link_measured: whether that throttle rests on a speed of the link that was measured once; else lanes keep to it.
        crossings_out, crossings_in: how many bytes cross an accelerator's link for each that is swapped, which makes
            it so many times slower.
        spill: the file on disk; None where there is no such tier.
    """

    host_bytes: int = 0
    link_bytes_per_s: float = 0.0
    link_measured: bool = False
    crossings_out: float = 1.0
    crossings_in: float = 1.0
    spill: SpillFile | None = None

    def close(self) -> None:
        """Close this process's first descriptor of the spill file."""
        if self.spill is not None:
            os.close(self.spill.descriptor)

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return self.host_bytes > 0 or self.spill is not None


def open_tiers(config: Config, device: torch.device) -> Tiers:
    """Return what a runtime with these settings may swap to on this device. Opens the spill file.

    An accelerator has host memory below it without being asked.

    Raises:
        UsageError: more host memory or disk than there is, no such profile or directory, a link that
            is faster than the accelerator's own or far slower, or no room to measure that. Nothing
            has been changed.
    """
    asked = {
        name: value
        for name in ("host_budget", "link_bytes_per_s", "disk_budget", "spill_dir")
        if (value := getattr(config, name)) is not None
    }
    on_accelerator = device.type != "cpu"
    has_host = on_accelerator or "host_budget" in asked or "link_bytes_per_s" in asked
    host_bytes = _host_bytes(config.host_budget_bytes) if has_host else 0
    link = link_bytes_per_s(config.link_bytes_per_s, device) if has_host else 0.0
    crossings = (1.0, 1.0)
    if on_accelerator and link:
        crossings = _crossings_for(link, own_link_bytes_per_s(device), config.link_bytes_per_s)
    spill = None
    if "disk_budget" in asked or "spill_dir" in asked:
        spill = open_spill_file(config.spill_dir, config.disk_budget_bytes)
    return Tiers(host_bytes, link, on_accelerator, *crossings, spill)


def _crossings_for(
    link: float, own: tuple[float, float], asked: float | str | None
) -> tuple[float, float]:
    """Return how often each byte is to cross an accelerator's own link, out and in."""
    if link > _AS_FAST * min(own):
        raise UsageError(
            "link_bytes_per_s: faster than the accelerator's own link.",
            asked=f"{asked!r}, {link / 1e9:.3g} GB/s",
            found=f"{min(own) / 1e9:.3g} GB/s",
            change="Give less, or leave it out for the link as it is.",
        )
    if _MOST_CROSSINGS * link < max(own):
        raise UsageError(
            f"link_bytes_per_s: more than {_MOST_CROSSINGS} times slower than the accelerator's own link.",
            asked=f"{asked!r}, {link / 1e9:.3g} GB/s",
            found=f"{max(own) / 1e9:.3g} GB/s",
            change="Give more.",
        )
    return max(1.0, own[0] / link), max(1.0, own[1] / link)


def _host_bytes(asked_bytes: int | None) -> int:
    memory = psutil.virtual_memory()
    total_bytes = min(memory.total, cgroup_limit_bytes() or memory.total)
    if asked_bytes is None:
        return int(min(memory.available, total_bytes) * _SHARE_OF_AVAILABLE)
    if asked_bytes > total_bytes:
        raise UsageError(
            "host_budget: more than the machine has.",
            asked=format_bytes(asked_bytes),
            found=format_bytes(total_bytes),
            change="Give less, or leave it out for half of what is available.",
        )
    return asked_bytes

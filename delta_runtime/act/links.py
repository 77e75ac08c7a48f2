"""The virtual accelerator's link: how fast its lanes are, as bytes per second or by a card's name.

A profile keeps a real card's ratio of link bytes to compute: bytes that its link carries, in one
direction, while the card does one FLOP in float32. On this machine the ratio is multiplied by what
its cores really do, measured once by a matrix product. There swapping and recomputation trade off
as they do on the card.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from delta_runtime.core.errors import UsageError

_MEASURE_SIZE = 1024
_MEASURE_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """A card and its link.

    Args:
        description: One line for users.
        link_bytes_per_s: What the link carries in one direction, as measured by its users.
        flops_per_s: Peak of the card in float32 without tensor cores, by its data sheet.
    """

    description: str
    link_bytes_per_s: float
    flops_per_s: float

    @property
    def bytes_per_flop(self) -> float:
        """Link bytes in one direction for each FLOP."""
        return self.link_bytes_per_s / self.flops_per_s


PROFILES: Mapping[str, LinkProfile] = MappingProxyType(
    {
        "pcie3": LinkProfile("V100 on PCIe 3 x16", 12e9, 15.7e12),
        "pcie4": LinkProfile("A100 on PCIe 4 x16", 25e9, 19.5e12),
        "pcie5": LinkProfile("H100 PCIe on PCIe 5 x16", 53e9, 51.2e12),
        "c2c": LinkProfile("GH200 on NVLink-C2C", 375e9, 66.9e12),
    }
)
"""Every profile, by name."""

_measured: dict[int, float] = {}


def flops_per_s() -> float:
    """Return what this machine does in a float32 matrix product with its present number of threads.

    Measured once for each number of threads (about 0.1 s): the best of a few rounds.
    """
    threads = torch.get_num_threads()
    if threads not in _measured:
        n = _MEASURE_SIZE
        a = torch.ones(n, n)
        best = float("inf")
        for _ in range(_MEASURE_ROUNDS):
            begin = time.perf_counter()
            torch.mm(a, a)
            best = min(best, time.perf_counter() - begin)
        _measured[threads] = 2 * n**3 / best
    return _measured[threads]


def link_bytes_per_s(setting: float | str | None) -> float:
    """Return the throttle of each lane in bytes per second; 0 for none.

    Args:
        setting: bytes per second, the name of a profile, or None.

    Raises:
        UsageError: there is no such profile.
    """
    if setting is None:
        return 0.0
    if not isinstance(setting, str):
        return float(setting)
    name = setting.strip().lower()
    if name not in PROFILES:
        close = difflib.get_close_matches(name, PROFILES, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise UsageError(
            "link_bytes_per_s: no such profile.",
            asked=repr(setting),
            change=f"{hint}Give bytes per second, or one of {', '.join(PROFILES)}.",
        )
    return PROFILES[name].bytes_per_flop * flops_per_s()

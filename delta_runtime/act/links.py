"""The speed that lanes are to have, in bytes per second or by a card's name, below the CPU or an accelerator.

A profile keeps a real card's ratio of link bytes to compute: bytes that its link carries, in one
direction, while the card does one FLOP in float32. On the device at hand the ratio is multiplied by
what it really does, measured once by a matrix product. There swapping and recomputation trade off
as they do on the card.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from delta_runtime.core.errors import UsageError

_MEASURE_SIZE = 1024
_MEASURE_ROUNDS = 6
_LARGEST_SIZE = 8192
_LONG_ENOUGH_S = 2e-3
_COPIED_BYTES = 32 << 20


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

_CPU = torch.device("cpu")
_flops: dict[tuple[torch.device, int], float] = {}
_own_links: dict[torch.device, tuple[float, float]] = {}


def flops_per_s(device: torch.device = _CPU) -> float:
    """Return what a device does in a float32 matrix product without tensor cores, a CPU with its present threads.

    Measured once for each number of threads (about 0.1 s on a CPU): the best of a few rounds.
    """
    key = (device, torch.get_num_threads() if device.type == "cpu" else 0)
    if key not in _flops:
        with _without_tensor_cores():
            _flops[key] = _flops_of_products(device)
    return _flops[key]


def _flops_of_products(device: torch.device) -> float:
    """Of products so large that an accelerator's launch and the wait for it do not count."""
    n = _MEASURE_SIZE
    while True:
        a, product = torch.ones(n, n, device=device), torch.empty(n, n, device=device)
        # Into `product`, so that autocast leaves it alone.
        seconds = _best_seconds(functools.partial(torch.mm, a, a, out=product), device)
        if device.type == "cpu" or seconds >= _LONG_ENOUGH_S or n >= _LARGEST_SIZE:
            return 2 * n**3 / seconds
        n *= 2


@contextlib.contextmanager
def _without_tensor_cores() -> Iterator[None]:
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "ieee"
    try:
        yield
    finally:
        products.fp32_precision = before


def own_link_bytes_per_s(device: torch.device) -> tuple[float, float]:
    """Return what an accelerator's link to pinned host memory carries, out and in, each by itself.

    Measured once for each device, with 32 MiB there and here: the best of a few rounds. What is free in the
    accelerator's cache is given back; the 32 MiB here stay with PyTorch's own pinned memory.

    Raises:
        UsageError: the accelerator has no 32 MiB left.
    """
    if device not in _own_links:
        try:
            there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise UsageError(
                "link_bytes_per_s: no room on the device to measure its own link.",
                asked="32 MiB",
                change="Make the runtime before the model, or leave it out.",
            ) from error
        here = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
        out_s = _best_seconds(lambda: here.copy_(there, non_blocking=True), device)
        in_s = _best_seconds(lambda: there.copy_(here, non_blocking=True), device)
        _own_links[device] = (_COPIED_BYTES / out_s, _COPIED_BYTES / in_s)
        del there
        torch.accelerator.empty_cache()
    return _own_links[device]


def _best_seconds(work: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    best = float("inf")
    for _ in range(_MEASURE_ROUNDS):
        wait()
        begin = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best


def link_bytes_per_s(setting: float | str | None, device: torch.device = _CPU) -> float:
    """Return the throttle of each lane in bytes per second; 0 for none.

    Args:
        setting: bytes per second, the name of a profile, or None.
        device: whose compute a profile's ratio is multiplied with.

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
    return PROFILES[name].bytes_per_flop * flops_per_s(device)

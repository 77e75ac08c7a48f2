"""The one place where the tests plug in the runtime.

Covers: running a block under a mode of eviction, what the runtime did in it, the peak of live bytes, sabotage switches.
Does not cover: the public API as such; its own tests use it directly.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from tests.support.device import device_under_test

MODES = ("ordinary", "drop_all", "random", "swap_all", "disk_all", "mix", "budget")

SABOTAGES = (
    "NoRngRestore",
    "EmptyAsOp",
    "InplaceWithoutCopy",
    "WrappedNumberLost",
    "PreWriteValue",
    "NoCloneOnWrite",
)
"""Ways to break recording and replaying on purpose; csrc/observe/op_info.h has them all."""
STREAM_SABOTAGES = ("NoOrderOut", "NoOrderIn", "NoOrderSide")
"""Ways to break the order between the streams of an accelerator."""


@dataclass(slots=True)
class Probe:
    """What the runtime did in a block; filled when the block ends.

    Args:
        rebuilt: values that were made again or copied back.
        dropped_bytes: bytes freed by dropping or swapping.
        packed: saved tensors seen.
        mismatches: values that came back different.
        reasons: bytes not managed, by reason.
    """

    rebuilt: int = 0
    dropped_bytes: int = 0
    packed: int = 0
    mismatches: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Peak:
    """The highest live bytes of a block, by the allocator's own count; filled when the block ends."""

    peak_bytes: int = 0


@contextlib.contextmanager
def managed(mode: str, *, seed: int = 0, budget_bytes: int | None = None) -> Iterator[Probe]:
    """Runs a block under a mode of eviction.

    Args:
        mode: "ordinary": no runtime at all. "drop_all": everything that can be dropped is dropped at once.
            "random": a seeded random choice is dropped at random op boundaries. "swap_all", "disk_all": everything is
            swapped out at once, to host memory or to disk. "mix": random choices are swapped
            out, dropped and brought back. "budget": policy "recompute" under `budget_bytes`.
        seed: of modes "random" and "mix".
        budget_bytes: of mode "budget".
    """
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}")
    if (mode == "budget") != (budget_bytes is not None):
        raise ValueError("mode 'budget' and no other takes budget_bytes")
    probe = Probe()
    if mode == "ordinary":
        yield probe
        return

    import delta_runtime as delta
    from delta_runtime.online.policies import get_policy

    device = str(device_under_test())
    if mode == "budget":
        runtime = delta.Runtime(budget_bytes, policy="recompute", device=device, min_bytes=0)
    else:
        stress = "swap_all" if mode == "disk_all" else mode
        policy = dataclasses.replace(get_policy(f"stress_{stress}"), seed=seed)
        host_budget: str | int | None = "2GiB" if mode in ("swap_all", "mix") else None
        if mode == "disk_all" and device != "cpu":
            host_budget = 1  # an accelerator has host memory below it without being asked
        disk_budget = "512MiB" if mode == "disk_all" else None
        runtime = delta.Runtime(
            policy=policy,
            device=device,
            min_bytes=0,
            host_budget=host_budget,
            disk_budget=disk_budget,
        )
    try:
        with runtime:
            yield probe
    finally:
        totals = runtime.report().totals
        runtime.close()
        probe.rebuilt = totals.rebuilds + totals.swap_ins
        probe.dropped_bytes = totals.dropped_bytes + totals.swapped_out_bytes
        probe.packed = totals.packs
        probe.mismatches = totals.mismatches
        probe.reasons = dict(totals.kept_bytes)


@contextlib.contextmanager
def measured() -> Iterator[Peak]:
    """Measures the peak of live bytes of a block."""
    from delta_runtime import cpu_pool

    device = device_under_test()
    peak = Peak()
    if device.type == "cpu":
        cpu_pool.install()
        cpu_pool.reset_peak()
    else:
        torch.accelerator.reset_peak_memory_stats(device)
    try:
        yield peak
    finally:
        if device.type == "cpu":
            peak.peak_bytes = cpu_pool.peak_bytes()
        else:
            peak.peak_bytes = torch.accelerator.max_memory_allocated(device)


def live_bytes() -> int:
    """Live bytes of the CPU pool, counted from its installation, or of the accelerator."""
    from delta_runtime import cpu_pool

    device = device_under_test()
    if device.type != "cpu":
        return torch.accelerator.memory_allocated(device)
    cpu_pool.install()
    return cpu_pool.allocated_bytes()


@contextlib.contextmanager
def poisoned_host_memory() -> Iterator[None]:
    """Fills host memory that is given back with NaN for the duration of the block."""
    from delta_runtime import _C

    _C.set_poison(True)
    try:
        yield
    finally:
        _C.set_poison(False)


@contextlib.contextmanager
def sabotage(name: str) -> Iterator[None]:
    """Breaks one rule, by its name in csrc/observe/op_info.h, for the duration of the block. "None" breaks nothing."""
    from delta_runtime import _C

    _C.set_sabotage(_C.sabotage_names().index(name))
    try:
        yield
    finally:
        _C.set_sabotage(0)

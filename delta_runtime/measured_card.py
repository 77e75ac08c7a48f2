"""This machine as a card: its rates as they are measured, in a few seconds."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

import psutil
import torch

from delta_runtime.simulate.card import LIKELY, Card

_ROUNDS = 5
_SIZE = {"cpu": 1024, "cuda": 4096}  # of the matrices, at the most
_SMALLER = 8  # so many times, to begin with
_LONG_S = 0.1  # a product that takes as long tells the rate
_COPIED = {"cpu": 64 << 20, "cuda": 512 << 20}  # bytes, out of any cache
_SMALL_OPS = 200
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def measured_card() -> Card:
    """Return this machine's accelerator as a card, or its CPU where there is none.

    Rates are such that what was measured is what ops reach (`card.LIKELY`). Lanes are as fast as copies to pinned host
    memory; on the CPU, whose host memory is its own, as a copy in memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    flops = {str(dtype).removeprefix("torch."): _flops_per_s(device, dtype) for dtype in _DTYPES}
    on_cpu = device.type == "cpu"
    moved = _bytes_per_s(device, device)
    out = moved / 2 if on_cpu else _bytes_per_s(device, torch.device("cpu"))
    back = moved / 2 if on_cpu else _bytes_per_s(torch.device("cpu"), device)
    memory = psutil.virtual_memory().total if on_cpu else torch.cuda.mem_get_info(device)[1]
    return Card(
        title=_title(device),
        memory_bytes=int(memory),
        usable_share=0.94,
        flops_per_s={dtype: rate / LIKELY.flops for dtype, rate in flops.items()},
        bytes_per_s=moved / LIKELY.bytes,
        out_bytes_per_s=out,
        in_bytes_per_s=back,
        launch_s=_launch_s(device),
        sources={"all": "measured here"},
        device=device.type,
    )


def _title(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, measured"
    name = platform.processor() or platform.machine()
    return f"this CPU ({name}, {torch.get_num_threads()} threads), measured"


def _least_s(device: torch.device, run: Callable[[], object]) -> float:
    """Return the least seconds of a few runs."""
    least = float("inf")
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - begin)
    return least


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Return what a product reaches: a large one, or a smaller one that takes long (a CPU may emulate a dtype)."""

    def product_s(n: int) -> float:
        a = torch.ones(n, n, device=device, dtype=dtype)
        return _least_s(device, lambda: torch.mm(a, a))

    n = _SIZE[device.type] // _SMALLER
    seconds = product_s(n)
    while seconds < _LONG_S and n < _SIZE[device.type]:
        n *= 2
        seconds = product_s(n)
    return 2 * n**3 / seconds


def _bytes_per_s(source: torch.device, target: torch.device) -> float:
    """Return the bytes that a copy reads and writes in a second; those that cross, where it crosses a bus."""
    crosses = source != target
    bytes_ = _COPIED["cuda" if crosses else source.type]

    def memory(device: torch.device) -> torch.Tensor:
        pinned = crosses and device.type == "cpu"
        return torch.ones(bytes_, dtype=torch.uint8, device=device, pin_memory=pinned)

    a, b = memory(source), memory(target)
    clock = target if target.type == "cuda" else source
    seconds = _least_s(clock, lambda: b.copy_(a, non_blocking=True))
    return bytes_ * (1 if crosses else 2) / seconds


def _launch_s(device: torch.device) -> float:
    a = torch.ones(8, device=device)

    def run() -> None:
        for _ in range(_SMALL_OPS):
            a.add_(1.0)

    return _least_s(device, run) / _SMALL_OPS

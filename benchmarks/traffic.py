"""Does copying beside it slow compute down, on this machine, at the speed of the links of the virtual accelerator?

A benchmark. What a lane copies goes through the memory that compute uses too; the runtime cannot count that, and no
timing of whole steps on a shared machine is good to the few tenths of a per cent that it may be. So another process
copies blocks of 1 MiB at the speed of a link, or does not, in turns of some milliseconds in a random order, while one
thread here runs a matrix product (bound by arithmetic) or an addition of 10 MB (bound by memory). Reported is the
median over the pairs of turns of how much slower the turn with copying was, with the standard error of that median. A
lane that is not busy all the time does less. Takes about two minutes; needs no GPU.

    python -m benchmarks.traffic [--links pcie3,pcie4,pcie5,c2c] [--seconds 15]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from delta_runtime.act.links import PROFILES, link_bytes_per_s

BLOCK_BYTES = 1 << 20
POOL_BYTES = 256 << 20
"""Of which blocks are copied in turn: more than any cache."""


def copy_blocks(bytes_per_s: float, copying: Any, ending: Any) -> None:
    """Copy at the speed of a link whenever it is told to. Runs in a process of its own."""
    source = np.ones(POOL_BYTES, np.uint8)
    target = np.zeros_like(source)
    begin, at = 0, time.perf_counter()
    while not ending.value:
        if not copying.value:
            time.sleep(0.0002)
            at = time.perf_counter()
            continue
        end = begin + BLOCK_BYTES
        target[begin:end] = source[begin:end]
        begin = end % POOL_BYTES
        at += BLOCK_BYTES / bytes_per_s
        time.sleep(max(at - time.perf_counter(), 0.0))


def slowdowns(work: Callable[[], object], copying: Any, seconds: float) -> np.ndarray:
    """By how much each turn with copying was slower than the one beside it without, as a share."""
    found = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        took = {}
        for on in random.sample((0, 1), 2):
            copying.value = on
            work()  # the turn before has ended by then
            begin = time.perf_counter()
            work()
            took[on] = time.perf_counter() - begin
        found.append(took[1] / took[0] - 1)
    copying.value = 0
    return np.array(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--links", default=",".join(PROFILES), help="separated by commas")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each link and kind")
    arguments = parser.parse_args()
    links = arguments.links.split(",")
    for link in links:
        if link not in PROFILES:
            parser.error(f"--links: {link!r} is none of {', '.join(PROFILES)}")
    torch.set_num_threads(1)
    processes = multiprocessing.get_context("spawn")
    x, w, y = torch.randn(1616, 384), torch.randn(384, 1536), torch.empty(1616, 1536)
    a, b = torch.randn(2_500_000), torch.empty(2_500_000)
    kinds: dict[str, Callable[[], object]] = {
        "matrix product": lambda: torch.mm(x, w, out=y),
        "addition": lambda: torch.add(a, 1.0, out=b),
    }
    table = Table(title="Slower in % while a lane copies", title_justify="left")
    for heading in ("link", "MB/s", *kinds):
        table.add_column(heading)
    for link in links:
        bytes_per_s = link_bytes_per_s(link)
        copying, ending = (processes.Value("b", 0, lock=False) for _ in range(2))
        process = processes.Process(
            target=copy_blocks, args=(bytes_per_s, copying, ending), daemon=True
        )
        process.start()
        try:
            cells = []
            for work in kinds.values():
                slower = slowdowns(work, copying, arguments.seconds) * 100
                # 1.2533 = sqrt(pi / 2): of a median beside a mean; the spread by its quartiles.
                spread = (np.percentile(slower, 75) - np.percentile(slower, 25)) / 1.349
                error = 1.2533 * spread / len(slower) ** 0.5
                cells.append(f"{np.median(slower):+.2f} ± {error:.2f} ({len(slower)} pairs)")
        finally:
            ending.value = 1
            process.join()
        table.add_row(link, f"{bytes_per_s / 1e6:.0f}", *cells)
    Console(highlight=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

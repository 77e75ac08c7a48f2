"""Programs in which one thread needs the runtime's lock while it has Python's, and another one the other way round.

    python -m tests.faults.interpreter_lock_programs NAME

They end, and print the steps that they took, or hang.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import delta_runtime as delta
from delta_runtime import cpu_pool
from tests.faults.harness import boundary

N = 64
SECONDS = {"lends_arrays": 3.0, "reads_generators": 15.0, "waits_for_generators": 15.0}


def lends_arrays(ended: Callable[[], bool]) -> None:
    """Asks the runtime for its lock while it has Python's."""
    t = torch.randn(8)
    while not ended():
        for _ in range(50):
            t.numpy()


def reads_generators(ended: Callable[[], bool]) -> None:
    """Allocates while it has Python's lock and that of a generator, which another thread waits for with Python's."""
    kept = []
    while not ended():
        kept.append(torch.get_rng_state())
        if len(kept) > 200:
            kept.clear()


def waits_for_generators(ended: Callable[[], bool]) -> None:
    """Waits for the lock of a generator while it has Python's."""
    while not ended():
        torch.get_rng_state()


OTHERS = {f.__name__: f for f in (lends_arrays, reads_generators, waits_for_generators)}


def step(w: Tensor) -> None:
    """Drops what is made again from memory that only a Python object of it holds."""
    loss = torch.zeros(())
    held = []
    for _ in range(20):
        x = torch.randn(N, N)
        held.append(x.untyped_storage())
        a = x * 1.5
        del x
        loss = loss + (a * w).sum()
        del a
        boundary()
        if len(held) > 3:
            held.pop(0)
    loss.backward()


def long_step() -> None:
    w = torch.randn(128, 128, requires_grad=True)
    x = torch.randn(128, 128)
    loss = torch.zeros(())
    for _ in range(60):
        x = (x * w).sin()
        loss = loss + x.sum()
    loss.backward()


def draw_short_of_room(inputs: list[Tensor], count: int) -> None:
    """An op asks for room while it has a generator's lock; what is dropped is made from what only Python holds."""
    loss = torch.zeros(())
    held = []
    w = torch.full((32768,), 0.5, requires_grad=True)
    while inputs:
        x = inputs.pop()
        h = x + 1.0
        loss = loss + (h * w).sum()
        held.append(x.untyped_storage())
        del x, h
    weights = torch.ones(400_000 + 1000 * (count % 40))
    for draw in range(3):
        torch.multinomial(
            weights, 1_000_000 + 100_000 * draw + 1000 * (count % 40), replacement=True
        )
    loss.backward()


def runtime_for(other: Callable[[Callable[[], bool]], None]) -> delta.Runtime:
    if other is lends_arrays:
        return delta.Runtime(policy="stress_drop_all", device="cpu", min_bytes=0)
    # Allocations have to ask for room.
    bytes_ = 3_000_000 if other is reads_generators else 20_000_000
    budget_bytes = cpu_pool.allocated_bytes() + bytes_
    return delta.Runtime(budget_bytes, policy="recompute", device="cpu", min_bytes=0)


def main() -> None:
    other = OTHERS[sys.argv[1]]
    warnings.simplefilter("ignore")
    cpu_pool.install()
    torch.set_num_threads(1)
    w = torch.randn(N, N, requires_grad=True)
    end = threading.Event()
    threads = [threading.Thread(target=other, args=(end.is_set,), daemon=True) for _ in range(3)]
    if other is lends_arrays:
        sys.setswitchinterval(1e-5)
    runtime = runtime_for(other)
    steps, until = 0, time.monotonic() + SECONDS[other.__name__]
    for thread in threads:
        thread.start()
    while time.monotonic() < until:
        inputs = []
        if other is waits_for_generators:
            inputs = [torch.randn(32768) for _ in range(150)]
            runtime = runtime_for(other)  # it knows nothing of any step: each asks for room anew
        with runtime.step():
            if other is lends_arrays:
                step(w)
            elif other is reads_generators:
                long_step()
            else:
                draw_short_of_room(inputs, steps)
        steps += 1
    end.set()
    for thread in threads:
        thread.join()
    print(steps)


if __name__ == "__main__":
    main()

"""Programs in which one thread needs the runtime's lock while it has Python's, and another one the other way round.

    python -m tests.faults.interpreter_lock_programs NAME

They end, and print the steps that they took, or hang.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

import delta_runtime as delta
from delta_runtime import cpu_pool
from tests.faults.harness import boundary

N = 64
SECONDS = 3.0


def lends_arrays(ended: Callable[[], bool]) -> None:
    """Asks the runtime for its lock while it has Python's."""
    t = torch.randn(8)
    while not ended():
        for _ in range(50):
            t.numpy()


def saves_tensors(ended: Callable[[], bool]) -> None:
    v = torch.randn(8, 8, requires_grad=True)
    while not ended():
        v.sin().cos().sum()


def lets_go_of_graphs(ended: Callable[[], bool]) -> None:
    v = torch.randn(8, 8, requires_grad=True)
    while not ended():
        kept = [v.exp().tanh().sum() for _ in range(20)]
        del kept


OTHERS = {f.__name__: f for f in (lends_arrays, saves_tensors, lets_go_of_graphs)}


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


def main() -> None:
    other = OTHERS[sys.argv[1]]
    cpu_pool.install()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    w = torch.randn(N, N, requires_grad=True)
    end = threading.Event()
    thread = threading.Thread(target=other, args=(end.is_set,), daemon=True)
    runtime = delta.Runtime(policy="stress_drop_all", device="cpu", min_bytes=0)
    steps, until = 0, time.monotonic() + SECONDS
    thread.start()
    while time.monotonic() < until:
        with runtime.step():
            step(w)
        steps += 1
    end.set()
    thread.join()
    print(steps)


if __name__ == "__main__":
    main()

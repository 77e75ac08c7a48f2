"""What the tests of swapping share: a small network in ordinary and managed runs, a graph that was swapped out whole.

Covers both the host tier (test_swap.py) and the disk tier (test_disk.py).
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from tests.support.bitwise import Snapshot, freeze, gradients, prefixed

WIDTH, ROWS, LAYERS = 256, 1024, 10
LAYER_BYTES = 4 * WIDTH * ROWS  # 1 MiB


class Net(nn.Module):
    """Matrix products that are dear to run again, between functions that are cheap."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x).tanh(), 0.1)
        return x.square().mean()


def batch(index: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(index))


def train(runtime: delta.Runtime | None = None, steps: int = 4) -> Snapshot:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    snapshot: Snapshot = {}
    for index in range(steps):
        x = batch(index)
        optimizer.zero_grad(set_to_none=True)
        with runtime.step() if runtime else contextlib.nullcontext():
            loss = model(x)
            loss.backward()
        optimizer.step()
        snapshot |= prefixed(f"step {index}", {"loss": freeze(loss)} | gradients(model))
        del loss
    return snapshot


def ordinary_run() -> tuple[Snapshot, int]:
    """An ordinary run's bits, and what it needs above what lived before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cpu_pool.install()
    train(steps=1)
    gc.collect()
    base_bytes = cpu_pool.allocated_bytes()
    cpu_pool.reset_peak()
    snapshot = train()
    torch.set_num_threads(threads)
    return snapshot, cpu_pool.peak_bytes() - base_bytes


def budget(ordinary: tuple[Snapshot, int], share: float) -> int:
    """A budget that leaves `share` of what the ordinary run needs."""
    gc.collect()
    return cpu_pool.allocated_bytes() + int(share * ordinary[1])


@contextlib.contextmanager
def walled(budget_bytes: int) -> Iterator[None]:
    """The pool ends at the budget."""
    cpu_pool.set_capacity(budget_bytes)
    try:
        yield
    finally:
        cpu_pool.set_capacity(None)


_EXITING = 0x4
"""Of a thread's flags: it has ended, and the system is about to forget it. See PF_EXITING in Linux."""


def lanes() -> int:
    """Threads of lanes in this process; not those that have ended, which are listed for a moment longer."""
    gc.collect()
    found = 0
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/stat") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
            found += name == "delta-lane" and not int(rest.split()[6]) & _EXITING
    return found


def sines() -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a chain of six, each of which autograd saves, and its leaf."""
    x = y = torch.linspace(0, 1, 1 << 18, requires_grad=True)
    for _ in range(6):
        y = y.sin()
    return y.sum(), x


def swap_out_a_graph(runtime: delta.Runtime) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss whose saved tensors are in host memory, and its leaf."""
    with runtime.step():
        loss, x = sines()
        runtime.session.make_room(1 << 40)
    assert runtime.session.levels().swapped_now_bytes >= 5 << 20
    return loss, x


def expected_gradient() -> torch.Tensor:
    loss, x = sines()
    loss.backward()
    return x.grad

"""The CPU pool's own account, and the memory below it: alignment, reuse, what goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import psutil
import pytest
import torch

from delta_runtime import cpu_pool

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _pool():
    cpu_pool.install()
    yield
    cpu_pool.set_capacity(None)


def _resident() -> int:
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("size_bytes", [1, 4096, 256 * 1024 - 1, 256 * 1024, MIB + 1, 40 * MIB])
def test_counts_what_is_live_and_gives_it_back(size_bytes: int) -> None:
    before = cpu_pool.allocated_bytes()
    tensor = torch.empty(size_bytes, dtype=torch.uint8)
    taken = cpu_pool.allocated_bytes() - before
    assert size_bytes <= taken <= size_bytes + 8192
    assert tensor.data_ptr() % 64 == 0
    del tensor
    assert cpu_pool.allocated_bytes() == before


def test_blocks_do_not_overlap() -> None:
    """Random sizes come and go; what was written into each is still there."""
    generator = torch.Generator().manual_seed(0)
    kept: list[tuple[int, torch.Tensor]] = []
    for step in range(600):
        if kept and torch.rand((), generator=generator) < 0.45:
            place = int(torch.randint(len(kept), (), generator=generator))
            number, tensor = kept.pop(place)
            assert bool((tensor == number).all())
        else:
            size = int(torch.randint(200_000, 1_500_000, (), generator=generator))
            kept.append((step % 251, torch.full((size,), step % 251, dtype=torch.uint8)))
        if len(kept) > 40:
            kept.clear()
    for number, tensor in kept:
        assert bool((tensor == number).all())


def test_free_memory_is_used_again() -> None:
    """A repeated pattern of sizes takes nothing more from the system."""

    def pattern() -> None:
        tensors = [torch.ones(n * MIB, dtype=torch.uint8) for n in (3, 7, 5, 2)]
        del tensors[1]
        tensors.append(torch.ones(6 * MIB, dtype=torch.uint8))

    pattern()
    held = cpu_pool.resident_bytes()
    for _ in range(20):
        pattern()
    assert cpu_pool.resident_bytes() <= held


def test_a_capacity_sends_free_memory_back() -> None:
    """Free blocks of a former phase do not stay resident beside a budget."""
    former = torch.ones(300 * MIB, dtype=torch.uint8)
    high = _resident()
    del former
    cpu_pool.set_capacity(cpu_pool.allocated_bytes() + 64 * MIB)
    assert cpu_pool.resident_bytes() <= (cpu_pool.allocated_bytes() + 64 * MIB) * 9 / 8
    assert high - _resident() > 200 * MIB


def test_the_process_stays_inside_the_capacity() -> None:
    """Sizes that never fit a free block of their own do not pile up."""
    capacity = cpu_pool.allocated_bytes() + 128 * MIB
    cpu_pool.set_capacity(capacity)
    start = _resident()
    for n in range(40, 100):
        kept = torch.ones(n * MIB // 2, dtype=torch.uint8)
        other = torch.ones(n * MIB // 3, dtype=torch.uint8)
        assert cpu_pool.resident_bytes() <= capacity * 9 / 8
        del kept, other
    assert _resident() - start < 160 * MIB


def test_above_the_capacity_nothing_is_taken() -> None:
    cpu_pool.set_capacity(cpu_pool.allocated_bytes() + 32 * MIB)
    before = cpu_pool.allocated_bytes(), cpu_pool.resident_bytes()
    with pytest.raises(torch.OutOfMemoryError, match="CPU pool out of memory"):
        torch.empty(64 * MIB, dtype=torch.uint8)
    assert (cpu_pool.allocated_bytes(), cpu_pool.resident_bytes()) <= before


def test_blocks_may_die_on_another_thread() -> None:
    before = cpu_pool.allocated_bytes()
    shelf = [torch.ones(2 * MIB, dtype=torch.uint8) for _ in range(50)]
    errors: list[BaseException] = []

    def work(offset: int) -> None:
        try:
            for _ in range(200):
                mine = torch.full((MIB + 4096 * offset,), offset, dtype=torch.uint8)
                assert bool((mine == offset).all())
                if shelf:
                    shelf.pop()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    assert cpu_pool.allocated_bytes() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_allocates_and_ends() -> None:
    """While another thread allocates all the time: the child must not inherit a held lock."""
    program = """
import os, threading, torch
from delta_runtime import cpu_pool
torch.set_num_threads(1)
cpu_pool.install()
stop = threading.Event()
def work():
    while not stop.is_set():
        torch.empty(1 << 20)
thread = threading.Thread(target=work)
thread.start()
for _ in range(30):
    child = os.fork()
    if child == 0:
        torch.empty(1 << 20)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
thread.join()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "done", done.stderr

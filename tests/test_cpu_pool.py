"""The CPU pool's own account, and the memory below it: alignment, reuse, what goes back to the system."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch

import delta_runtime as delta
from delta_runtime import _C, cpu_pool
from tests.support import warm_children

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[1]


pytestmark = pytest.mark.timeout(120)


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
    assert cpu_pool.resident_bytes() <= (cpu_pool.allocated_bytes() + 64 * MIB) * 6 / 4
    assert high - _resident() > 200 * MIB


def test_lifting_a_capacity_keeps_what_is_resident() -> None:
    """A capacity that comes and goes with each step must not cost the step its memory."""
    cpu_pool.set_capacity(cpu_pool.allocated_bytes() + 256 * MIB)
    block = torch.ones(200 * MIB, dtype=torch.uint8)
    del block
    for _ in range(3):
        cpu_pool.set_capacity(None)
        assert cpu_pool.resident_bytes() >= 200 * MIB
        cpu_pool.set_capacity(cpu_pool.allocated_bytes() + 250 * MIB)


def test_the_process_stays_inside_the_capacity() -> None:
    """Sizes that never fit a free block of their own do not pile up."""
    capacity = cpu_pool.allocated_bytes() + 128 * MIB
    cpu_pool.set_capacity(capacity)
    start = _resident()
    for n in range(40, 100):
        kept = torch.ones(n * MIB // 2, dtype=torch.uint8)
        other = torch.ones(n * MIB // 3, dtype=torch.uint8)
        assert cpu_pool.resident_bytes() <= capacity * 6 / 4
        del kept, other
    assert _resident() - start < 200 * MIB


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
    """While another thread allocates all the time: the child must not inherit a held lock.

    Each op has been called once before: a fork in the middle of an op's first call, while torch looks it up under a
    guard, leaves the child waiting for that guard, in about one of a thousand programs and without any pool.
    """
    program = """
import os, threading, torch
from delta_runtime import cpu_pool
torch.set_num_threads(1)
cpu_pool.install()
torch.empty(1 << 20)
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


# ------------------------------------------------------------------------------------ capacity and peak


def test_an_allocation_above_the_capacity_raises_and_changes_nothing():
    cpu_pool.install()
    kept = torch.arange(1000)
    live_bytes = cpu_pool.allocated_bytes()
    with cpu_pool.capacity(live_bytes + MIB):
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match="capacity"):
                torch.empty(2 * MIB, dtype=torch.uint8)
            assert cpu_pool.allocated_bytes() == live_bytes
        block = torch.ones(MIB // 8)  # what fits still comes
        assert cpu_pool.allocated_bytes() > live_bytes
        assert float(block.sum()) == MIB // 8
    assert kept.tolist() == list(range(1000))


def test_the_peak_never_passes_the_capacity():
    """Not by a byte: what malloc adds to a block counts too."""
    cpu_pool.install()
    generator = torch.Generator().manual_seed(3)
    over = []
    for nbytes in torch.randint(1, 400_000, (300,), generator=generator).tolist():
        for room in (0, 8, 16, 40, 64, 4096):
            capacity = cpu_pool.allocated_bytes() + nbytes + room
            with cpu_pool.capacity(capacity), contextlib.suppress(torch.OutOfMemoryError):
                cpu_pool.reset_peak()
                torch.empty(nbytes, dtype=torch.uint8)
            over.append(cpu_pool.peak_bytes() - capacity)
    assert max(over) <= 0


def test_the_peak_is_exact():
    cpu_pool.install()
    start = cpu_pool.allocated_bytes()
    cpu_pool.reset_peak()
    assert cpu_pool.peak_bytes() == start
    a = torch.empty(MIB, dtype=torch.uint8)
    b = torch.empty(2 * MIB, dtype=torch.uint8)
    highest = cpu_pool.allocated_bytes()
    assert highest - start >= 3 * MIB
    del a
    c = torch.empty(MIB // 2, dtype=torch.uint8)
    assert cpu_pool.peak_bytes() == highest
    del b, c
    assert cpu_pool.allocated_bytes() == start
    assert cpu_pool.peak_bytes() == highest
    cpu_pool.reset_peak()
    assert cpu_pool.peak_bytes() == start


def test_the_peak_sees_what_lives_only_inside_an_op():
    """A matrix product of a transposed batch copies it; from outside, before and after look the same."""
    cpu_pool.install()
    x = torch.randn(64, 128, 128)
    torch.einsum("bij,bkj->bik", x, x)
    start = cpu_pool.allocated_bytes()
    cpu_pool.reset_peak()
    total = float((x + x).sum())
    assert cpu_pool.allocated_bytes() == start
    assert cpu_pool.peak_bytes() - start >= x.untyped_storage().nbytes()
    assert total == total


def test_a_capacity_is_put_back():
    cpu_pool.install()
    assert cpu_pool.capacity_bytes() is None
    with cpu_pool.capacity("8GiB"):
        with cpu_pool.capacity("4GiB"):
            assert cpu_pool.capacity_bytes() == 4 * 2**30
        assert cpu_pool.capacity_bytes() == 8 * 2**30
        with contextlib.suppress(KeyError), cpu_pool.capacity("2GiB"):
            raise KeyError
        assert cpu_pool.capacity_bytes() == 8 * 2**30
    assert cpu_pool.capacity_bytes() is None


@pytest.mark.parametrize("limit", [0, -1, "0", "10 parsecs", 1.5, True])
def test_a_capacity_that_makes_no_sense_changes_nothing(limit):
    with cpu_pool.capacity("8GiB"):
        with pytest.raises(delta.UsageError):
            cpu_pool.set_capacity(limit)
        with pytest.raises(delta.UsageError), cpu_pool.capacity(limit):
            pass
        assert cpu_pool.capacity_bytes() == 8 * 2**30


def test_a_soft_limit_without_a_runtime_does_nothing():
    cpu_pool.install()
    _C.cpu_pool.reset_counters()
    _C.cpu_pool.set_soft_limit(cpu_pool.allocated_bytes() + 1)
    try:
        block = torch.ones(MIB)
        assert float(block.sum()) == MIB
        assert _C.cpu_pool.rescue_count() == 0
        assert _C.cpu_pool.over_limit_peak_bytes() >= 4 * MIB
    finally:
        _C.cpu_pool.set_soft_limit(0)


def test_threads_cannot_both_have_the_last_room():
    """Reserve first, then act: among threads that race for a capacity, no peak passes it."""
    cpu_pool.install()
    start = cpu_pool.allocated_bytes()
    failures = []

    def work() -> None:
        for _ in range(200):
            try:
                torch.empty(MIB, dtype=torch.uint8)
            except torch.OutOfMemoryError:
                failures.append(1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    limit = start + 2 * MIB + 65536
    with cpu_pool.capacity(limit):
        cpu_pool.reset_peak()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert cpu_pool.peak_bytes() <= limit
    assert cpu_pool.allocated_bytes() == start


OLDER_MODEL = """
import warnings
warnings.simplefilter("error")
import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)))
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(1024, 512)
if {trained}:
    model(x[:8]).mean().backward()
    optimizer.step()

import delta_runtime as delta
from delta_runtime import cpu_pool

runtime = delta.Runtime("{budget_mib}MiB", device="cpu")
for _ in range(2):
    with runtime.step():
        model(x).square().mean().backward()
    print(runtime.report().last.peak_bytes <= runtime.budget_bytes, runtime.report().last.drops > 0)
weights = sum(p.nbytes for p in model.parameters())
told = sum(each.nbytes for each in cpu_pool.older_weights() if each.ndim)  # but for Adam's numbers of steps
print(told == weights * (4 if {trained} else 1))
"""


@pytest.mark.parametrize(("trained", "budget_mib"), [(False, 36), (True, 52)])
def test_weights_older_than_the_pool_have_their_place_in_the_first_step(trained, budget_mib):
    """The pool counts none of them; without their place the step comes out above the budget by the later layers'."""
    program = OLDER_MODEL.format(trained=trained, budget_mib=budget_mib)
    clean = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    done = warm_children.run(
        ["-c", program], cwd=ROOT, env=clean | {"PYTHONPATH": str(ROOT)}, timeout=120
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["True True", "True True", "True"]


def test_looking_for_weights_bears_what_others_have_made():
    """Optimizers that are half made, without a state, or with numbers in it."""
    weight = torch.nn.Parameter(torch.ones(8))
    with_number = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.sum().backward()
    with_number.step()
    with_number.state["global_step"] = 3

    class Wrapper(torch.optim.Optimizer):
        def __init__(self):  # has not called Optimizer.__init__
            pass

    kept = [with_number, Wrapper(), torch.optim.SGD.__new__(torch.optim.SGD)]
    momentum = with_number.state[weight]["momentum_buffer"]
    found = cpu_pool._weights()
    assert len(kept) == 3
    for each in (weight, weight.grad, momentum):
        assert any(each is other for other in found)

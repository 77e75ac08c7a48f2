"""With the mend of a fault switched off, evidence alone tells of it: loud in the first two steps, never silent.

Classes that make no value come out different are not here: a version counter of an unpacked tensor, the thread that an
op runs on, and the generators of Python and numpy are guarded by their own tests.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import delta_runtime as delta
from delta_runtime import _C
from tests.faults.harness import Loud, N, Same, Step, leaf, outcome, taken
from tests.faults.test_subclass_operands import ScaledWeight
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(120)

Forward = Callable[[Tensor, int], Tensor]

_held: list[Tensor] = []
"""What a program still holds when backward runs."""


@contextmanager
def broken(name: str) -> Iterator[None]:
    _C.set_sabotage(_C.sabotage_names().index(name))
    try:
        yield
    finally:
        _C.set_sabotage(0)


class _Halved(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.mm.default else out


def under_a_mode(w: Tensor, k: int) -> Tensor:
    with _Halved():
        h = w @ w
    return h.sin() * h


def on_a_subclass(w: Tensor, k: int) -> Tensor:
    h = w.detach() @ ScaledWeight(torch.linspace(0, 1, N * N).view(N, N))
    return h.sin() * w


def factory_filled_by_address(w: Tensor, k: int) -> Tensor:
    values = torch.linspace(0, 1 + k, N * N)
    m = torch.zeros(N, N)
    ctypes.memmove(m.data_ptr(), values.data_ptr(), m.nbytes)
    return (m * 1.5).sin() * w


def written_by_a_method(w: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        h = w * 1.5
        h[:2].apply_(lambda v: v + 1.0 + k)
    return h * w


def array_changed_after_its_use(w: Tensor, k: int) -> Tensor:
    array = np.full((N, N), 0.5 + k, np.float32)
    x = torch.from_numpy(array)
    y = x.sin().cos() * w
    boundary_op()
    array *= 2.0
    _held[:] = [x]
    return y


def convolution_with_another_library(w: Tensor, k: int) -> Tensor:
    x = w.view(1, 4, 64, 64)
    kernel = torch.linspace(-1, 1, 16 * 4 * 25).view(16, 4, 5, 5)
    with torch.backends.mkldnn.flags(enabled=False):
        h = torch.nn.functional.conv2d(x.detach() * 1.7, kernel)
    return h.sin() * w.mean()


def overlapping_windows_zeroed(w: Tensor, k: int) -> Tensor:
    with torch.no_grad():
        b = (w * 1.5).view(-1)[: N * N].clone()
        b[: N * N // 2 + 1].unfold(0, 2, 1).zero_()
    return b.view(N, N) * w


def boundary_op() -> None:
    torch.ones(4).add(1.0)


CASES: dict[str, Forward] = {
    "ModesUnseen": under_a_mode,
    "SubclassesUnseen": on_a_subclass,
    "FactoryContentTrusted": factory_filled_by_address,
    "RawWritesUnseen": written_by_a_method,
    "ForeignMemoryTrusted": array_changed_after_its_use,
    "NumericContextLost": convolution_with_another_library,
    "CoverageByCount": overlapping_windows_zeroed,
}


def program_of(forward: Forward) -> Callable[[], Step]:
    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor | None]:
            loss = forward(w, k).square().mean()
            boundary_op()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    return program


@pytest.mark.parametrize("name", CASES)
def test_evidence_alone_is_loud(name: str) -> None:
    program = program_of(CASES[name])
    assert isinstance(outcome(program, "drop_all"), Same), "the mend itself does not hold"
    with broken(name):
        found = outcome(program, "drop_all", steps=4)
    assert isinstance(found, Loud), f"{name}: {found}"
    assert found.steps[0] <= 1, f"{name}: {found}"
    assert found.last not in found.steps, f"{name}: the steps after it do not work: {found}"


def test_a_value_is_compared_again_within_fifty_steps() -> None:
    """What begins to differ later is found by the sample."""
    w = leaf(N, N)
    with delta.Runtime("100%", device="cpu", policy="stress_drop_all") as runtime:
        for _ in range(120):
            with torch.no_grad():
                pass
            (w.sin() * w.cos()).sum().backward()
            w.grad = None
            runtime._boundary()
        counted = runtime._session.counters()["comparisons"]
    saved = 2  # values that are dropped in each step
    assert saved * (2 + 120 // 50) <= counted <= saved * (2 + 120 // 20)


def test_evidence_off_compares_nothing() -> None:
    w = leaf(N, N)
    with delta.Runtime("100%", device="cpu", policy="stress_drop_all", verify="off") as runtime:
        (w.sin() * w.cos()).sum().backward()
        assert runtime._session.counters()["comparisons"] == 0


def test_writes_of_another_thread_are_loud_without_the_watch() -> None:
    def forward(w: Tensor, k: int) -> Tensor:
        table = torch.linspace(0, 1, N * N).view(N, N).clone()
        y = (table * 2.0).sin() * w
        boundary_op()
        writer = threading.Thread(target=lambda: table.data.mul_(3.0))
        writer.start()
        writer.join()
        _held[:] = [table]
        return y

    program = program_of(forward)
    assert isinstance(outcome(program, "drop_all"), Same)
    with broken("OtherThreadsUnseen"):
        found = outcome(program, "drop_all", steps=4)
    assert isinstance(found, Loud), str(found)

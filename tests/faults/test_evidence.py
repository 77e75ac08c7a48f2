"""With the mend of a fault switched off, evidence alone tells of it: loud in the first two steps, never silent.

Classes that make no value come out different are not here: a version counter of an unpacked tensor, the thread that an
op runs on, and the generators of Python and numpy are guarded by their own tests.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import delta_runtime as delta
from tests.faults.collective_programs import ALONE, complaint, process_group
from tests.faults.harness import Loud, N, Same, Step, leaf, outcome, taken, threads_running
from tests.faults.test_subclass_operands import ScaledWeight
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.managed import sabotage

pytestmark = pytest.mark.timeout(120)

Forward = Callable[[Tensor, int], Tensor]

_held: list[Tensor] = []
"""What a program still holds when backward runs."""


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


def kernel_that_counts_its_write(w: Tensor, k: int) -> Tensor:
    """As kernels that are compiled at run time do it: by address, and the version moves."""
    other = torch.linspace(0, 1 + k, N * N).view(N, N)
    with torch.no_grad():
        m = w * 1.5
        m.exp()
    ctypes.memmove(m.data_ptr(), other.data_ptr(), m.nbytes)
    torch.autograd.graph.increment_version(m)
    return (m * 0.5).sin() * w


def storage_that_comes_back_as_another(w: Tensor, k: int) -> Tensor:
    other = torch.linspace(0, 1 + k, N * N).view(N, N)
    with torch.no_grad():
        m = w * 1.5
    resize = (
        torch.ops.inductor.resize_storage_bytes_
    )  # an op whose schema does not say what it does
    resize(m, 0)
    held = [torch.empty_like(other) for _ in range(4)]  # so that it lies elsewhere then
    resize(m, other.nbytes)
    del held
    ctypes.memmove(m.data_ptr(), other.data_ptr(), m.nbytes)
    return (m * 0.5).sin() * w


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
    "AliasVersionsUnseen": kernel_that_counts_its_write,
    "ResizesUnseen": storage_that_comes_back_as_another,
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
    with sabotage(name):
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
            runtime.steps.end_and_begin()
        counted = runtime.session.counters().comparisons
    saved = 2  # values that are dropped in each step
    assert saved * (2 + 120 // 50) <= counted <= saved * (2 + 120 // 20)


def test_evidence_off_compares_nothing() -> None:
    w = leaf(N, N)
    with delta.Runtime("100%", device="cpu", policy="stress_drop_all", verify="off") as runtime:
        (w.sin() * w.cos()).sum().backward()
        assert runtime.session.counters().comparisons == 0


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
    with sabotage("OtherThreadsUnseen"):
        found = outcome(program, "drop_all", steps=4)
    assert isinstance(found, Loud), str(found)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not in this build of torch")
def test_collectives_that_are_taken_for_other_ops_are_loud() -> None:
    """Where what they fill is made again from its recipe; a few leave what they found, and those are the same."""
    loud = 0
    with process_group(0, 1, dist.HashStore()):
        for forward in ALONE:
            assert not complaint(forward, "drop_all"), forward.__name__
            with sabotage("CollectivesUnseen"):
                told = complaint(forward, "drop_all")
            assert "SILENTLY" not in told, told
            loud += "RecomputeMismatch" in told
    assert loud >= 2


@torch.library.custom_op("delta_evidence_tests::masked_late", mutates_args=())
def masked_late(x: Tensor) -> Tensor:
    """Takes its time before it draws, and has no argument for a generator."""
    time.sleep(0.02)
    return x.exp() * torch.rand(x.shape)


masked_late.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def test_draws_from_the_program_s_own_generator_are_loud() -> None:
    """Another thread draws in the middle of a replay."""

    def program() -> Step:
        w = leaf(N, N)

        def draw(stop: threading.Event) -> None:
            while not stop.is_set():
                torch.rand(4)
                time.sleep(0.001)

        def step(k: int) -> list[Tensor | None]:
            torch.manual_seed(k)
            loss = masked_late(w).square().mean()
            boundary_op()
            # In the first step the op is looked at, before it is dropped at all.
            with threads_running(*[draw] * min(k, 1)):
                loss.backward()
            torch.manual_seed(99)
            return [loss.detach(), *taken(w)]

        return step

    for name in ("None", "SharedGenerator"):  # the mend is loud itself: the state shows the draw
        with sabotage(name):
            found = outcome(program, "drop_all", steps=3)
        assert isinstance(found, Loud), f"{name}: {found}"
        assert found.steps == (1,), f"{name}: {found}"


class _Drift:
    """What the op below adds from some call on, another amount each time."""

    calls = 0
    begins_at = 1 << 60


@torch.library.custom_op("delta_evidence_tests::drifting", mutates_args=())
def drifting(x: Tensor) -> Tensor:
    _Drift.calls += 1
    return x.exp() + max(0, _Drift.calls - _Drift.begins_at)


drifting.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def test_an_op_that_was_trusted_is_loud_within_fifty_steps_of_the_first_difference() -> None:
    first = 8
    w = leaf(N, N)
    with (
        sabotage("AuditedForEver"),
        delta.Runtime("100%", device="cpu", policy="stress_drop_all") as runtime,
    ):
        for k in range(first + 51):
            _Drift.begins_at = _Drift.calls if k == first else _Drift.begins_at
            loss = drifting(w).sum()
            boundary_op()
            try:
                loss.backward()
            except delta.RecomputeMismatch:
                break
            finally:
                w.grad = None
            assert k < first + 50
            runtime.steps.end_and_begin()
        assert first <= k
        drifting(w).sum().backward()  # the next step works


# ---------------------------------------------------------------------------------- which recipe was seen


def held_in_the_first(steps: int) -> Callable[[], Step]:
    """A value that is written by its address, in every step, and dies before backward only in the later ones.

    As long as it lives what was made from it is rebuilt by one op, later by two; the first was never run again.
    """

    def program() -> Step:
        w, v = leaf(N, N), leaf(N, N, seed=1)
        content = torch.linspace(-1, 1, N * N).view(N, N)

        def step(k: int) -> list[Tensor]:
            held = []

            def forward() -> Tensor:
                b = v.detach() * 1.5
                ctypes.memmove(b.data_ptr(), content.data_ptr(), b.nbytes)
                if k < steps:
                    held.append(b)
                return (b.sin() * w * v).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w, v)]  # type: ignore[list-item]

        return step

    return program


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_an_op_that_was_never_run_again_is_no_proven_part_of_a_recipe(steps: int) -> None:
    found = outcome(held_in_the_first(steps), "drop_all", steps=steps + 3)
    assert isinstance(found, Loud), found
    assert found.steps == (steps,)  # at once, and the next steps work

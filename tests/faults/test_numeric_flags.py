"""Global settings that change what an op computes: an op is rebuilt under those it ran with, and they are put back."""

from __future__ import annotations

import ctypes
import platform
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import delta_runtime as delta
from tests.faults.harness import (
    N,
    Step,
    check,
    constant,
    in_thread,
    leaf,
    taken,
    threads_running,
)
from tests.support.bitwise import freeze
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore")]

Context = Callable[[], AbstractContextManager[object]]


@contextmanager
def no_onednn() -> Iterator[None]:
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        yield


@contextmanager
def medium_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    own = torch.backends.mkldnn.matmul.fp32_precision
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.mkldnn.matmul.fp32_precision = own


allowing_assignments = torch.backends.__allow_nonbracketed_mutation


def in_bfloat16(what: object) -> Context:
    @contextmanager
    def context() -> Iterator[None]:
        before = what.fp32_precision  # type: ignore[attr-defined]
        # PyTorch's own test helpers, which another test may import, forbid plain assignments.
        with allowing_assignments():
            what.fp32_precision = "bf16"  # type: ignore[attr-defined]
        try:
            yield
        finally:
            with allowing_assignments():
                what.fp32_precision = before  # type: ignore[attr-defined]

    return context


@contextmanager
def no_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def rounding_up() -> Iterator[None]:
    libm = ctypes.CDLL("libm.so.6")
    before = libm.fegetround()
    libm.fesetround(_UP)
    try:
        yield
    finally:
        libm.fesetround(before)


@contextmanager
def deterministic(warn_only: bool = False) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


_IMAGE = 16
_UP = 0x800 if platform.machine() == "x86_64" else 0x400000  # FE_UPWARD of <fenv.h>


def convolved(x: Tensor) -> Tensor:
    kernel = constant(8, 4, 3, 3, seed=5)
    return F.conv2d(x.view(-1, 4, _IMAGE, _IMAGE), kernel, padding=1).flatten(0, 2)[:N, :_IMAGE]


def convolved_back(x: Tensor) -> Tensor:
    kernel = constant(4, 8, 3, 3, seed=5)
    return F.conv_transpose2d(x.view(-1, 4, _IMAGE, _IMAGE), kernel).flatten(0, 2)[:N]


def product(x: Tensor) -> Tensor:
    return x @ constant(N, N, seed=5)


def batched_product(x: Tensor) -> Tensor:
    return torch.einsum("bij,jk->bik", x.view(2, -1, N), constant(N, N, seed=5))


def linear(x: Tensor) -> Tensor:
    return F.linear(x, constant(N, N, seed=5), constant(N, seed=6))


def product_in_bfloat16(x: Tensor) -> Tensor:
    return (x.bfloat16().repeat(1, 8) @ constant(8 * N, N, seed=5).bfloat16()).float()


def smooth(x: Tensor) -> Tensor:
    return F.gelu(x)


def tiny(x: Tensor) -> Tensor:
    """Numbers too small for the usual exponents, and something of usual size made of them."""
    return (x * 1e-38) * 0.01 * 1e38


@dataclass(frozen=True, slots=True)
class Case:
    """A setting, and an op that it changes."""

    context: Context
    op: Callable[[Tensor], Tensor]

    def matters(self) -> bool:
        x = leaf(N, N).detach() * 1.5
        with self.context():
            changed = freeze(self.op(x))
        return changed != freeze(self.op(x))


CASES = {
    "onednn-convolution": Case(no_onednn, convolved),
    "onednn-transposed_convolution": Case(no_onednn, convolved_back),
    "onednn-bfloat16_product": Case(no_onednn, product_in_bfloat16),
    "onednn-gelu": Case(no_onednn, smooth),
    "matmul_precision-product": Case(medium_precision, product),
    "matmul_precision-batched_product": Case(medium_precision, batched_product),
    "matmul_precision-linear": Case(medium_precision, linear),
    "onednn_precision-product": Case(in_bfloat16(torch.backends.mkldnn.matmul), product),
    "onednn_precision-convolution": Case(in_bfloat16(torch.backends.mkldnn.conv), convolved),
    "all_precision-linear": Case(in_bfloat16(torch.backends.mkldnn), linear),
    "denormals": Case(no_denormals, tiny),
    "rounding": Case(rounding_up, lambda x: x * 1.3 / 0.7),
}


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch does not tell while one backend alone is set to something else
        return "mixed"


def _settings() -> list[object]:
    return [
        torch._C._get_mkldnn_enabled(),
        _matmul_precision(),
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.backends.mkldnn.conv.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch._C._get_mkldnn_deterministic(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_cudnn_benchmark(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.get_default_dtype(),
        torch.get_num_threads(),
        bool((torch.tensor([1e-39]) * 1.0 == 0).item()),
    ]


@contextmanager
def _here() -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("mode", "where"),
    [
        *(("drop_all", each) for each in ("forward", "backward", "one_op", "every_second_step")),
        ("random", "forward"),
        ("mix", "one_op"),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_a_setting_that_is_another_one_in_backward(mode: str, name: str, where: str) -> None:
    case = CASES[name]
    if not case.matters():
        pytest.skip("this machine computes the same either way")

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def context(place: str) -> AbstractContextManager[object]:
                return case.context() if place == where else _here()

            def forward() -> Tensor:
                h = w * 1.5
                with context("one_op"):
                    h = case.op(h)
                y = h * h
                h = h.exp()
                return (y * h).mean()

            with context("forward"), context("every_second_step" if k % 2 else ""):
                loss = forward()
            with context("backward"):
                before = _settings()
                loss.backward()
                assert _settings() == before, "backward changed a setting"
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=4 if where == "every_second_step" else 3)


# ------------------------------------------------------------------------------- deterministic algorithms


@pytest.mark.parametrize("mode", ["drop_all", "random"])
def test_rows_that_are_written_twice_in_a_deterministic_forward(mode: str) -> None:
    """With several threads, which of two writes wins is luck, unless deterministic algorithms are asked for."""

    def program() -> Step:
        w = leaf(N, 64)
        index = torch.randint(0, 16, (8_000,), generator=torch.Generator().manual_seed(1))
        values = constant(8_000, 64)

        def step(k: int) -> list[Tensor]:
            torch.set_num_threads(2)

            def forward() -> Tensor:
                with torch.no_grad():
                    table = torch.zeros(N, 64)
                    table[index] = values * (1.0 + k)
                    summed = torch.zeros(N, 64).index_put((index,), values, accumulate=True)
                return (w * table.sin() + (w * 2.0).exp() * summed.cos()).mean()

            with deterministic():
                loss = forward()
            loss.backward()
            torch.set_num_threads(1)
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=4)


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("mode", ["drop_all", "random"])
def test_an_op_that_deterministic_mode_forbids(mode: str, warn_only: bool) -> None:
    """Forward ran it while that was allowed; that backward is deterministic forbids nothing there."""

    def program() -> Step:
        w = leaf(N, N)
        index = torch.randperm(N * N, generator=torch.Generator().manual_seed(1))

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                with torch.no_grad():
                    m = torch.zeros(N, N)
                    m.put_(index, (w * 1.5).flatten())
                return (w * m).exp().mean()

            loss = forward()
            with deterministic(warn_only), warnings.catch_warnings():
                warnings.simplefilter("error")
                loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


@pytest.mark.parametrize("mode", ["drop_all", "random"])
def test_fresh_memory_that_deterministic_mode_fills(mode: str) -> None:
    """empty() is full of NaN then, in forward or in backward: nothing that is used may be."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                with torch.no_grad():
                    m = torch.empty(N, N)
                    m.copy_(w)
                    out = torch.empty(0)
                    torch.mul(m, 1.5, out=out)
                return (w * out).exp().mean()

            with deterministic() if k % 2 else _here():
                loss = forward()
            with deterministic() if k < 2 else _here():
                loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=4)


# ------------------------------------------------------------------------------------------ whole layers


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["drop_all", "random"])
def test_a_convnet_and_an_lstm_without_onednn(mode: str, where: str) -> None:
    def program() -> Step:
        torch.manual_seed(3)
        convolutions = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Conv2d(8, 8, 3), nn.GELU()
        )
        recurrent = nn.LSTM(8, 16, 2)
        both = nn.ModuleList([convolutions, recurrent])

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = convolutions(constant(4, 3, 8, 8, seed=k))
                h, _ = recurrent(h.flatten(2).permute(2, 0, 1))
                return (h * h.sin()).mean()

            with no_onednn() if where == "forward" else _here():
                loss = forward()
            with no_onednn() if where == "backward" else _here():
                loss.backward()
            return [loss.detach(), *taken(*both.parameters()), *both.buffers()]

        return step

    check(program, mode)


@pytest.mark.parametrize("mode", ["drop_all", "random"])
def test_settings_of_a_thread_that_backward_does_not_run_on(mode: str) -> None:
    """Whether denormals are flushed is a thread's own matter: forward's here, another one's in backward."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = tiny(w)
                return (h * h + h.exp()).mean()

            with no_denormals():
                loss = forward()
                if k % 2:
                    in_thread(loss.backward)
            if k % 2 == 0:
                loss.backward()
            return [loss.detach(), torch.tensor([1e-39]) * 1.0, *taken(w)]

        return step

    check(program, mode, steps=4)


# ------------------------------------------------------------------------------------- the default dtype


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


WITHOUT_A_DTYPE: dict[str, Callable[[], Tensor]] = {
    "rand": lambda: torch.rand(N, N),
    "randn": lambda: torch.randn(N, N),
    "linspace": lambda: torch.linspace(0, 1, N * N).view(N, N),
    "arange": lambda: torch.arange(0, N * N / 4, 0.25).view(N, N),
    "whole numbers": lambda: torch.arange(N * N).view(N, N) % 7,
    "eye": lambda: torch.eye(N),
    "full": lambda: torch.full((N, N), 1 / 3),
    "normal": lambda: torch.normal(0.0, 1.0, (N, N)),
    "of whole numbers": lambda: torch.ones(N, N, dtype=torch.int32) / 3,
    "sum of whole numbers": lambda: torch.ones(N, N, 2, dtype=torch.int32).sum(2) / 3,
}


@pytest.mark.parametrize("name", WITHOUT_A_DTYPE)
def test_results_whose_dtype_nobody_says(name: str) -> None:
    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            torch.manual_seed(k)

            def forward() -> Tensor:
                with default_dtype(torch.float64):
                    h = WITHOUT_A_DTYPE[name]() * 1.5
                return (h.sin() * w).tanh().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all")


@pytest.mark.parametrize("verify", ["first", "off"])
def test_a_list_of_which_one_element_says_its_dtype(verify: str) -> None:
    """Ops on lists treat each element by itself: the floating one says nothing of the whole number."""
    ints, floats = torch.arange(N * N, dtype=torch.int32).view(N, N), torch.ones(N, N)

    def gradient() -> Tensor:
        w = leaf(N, N)
        with default_dtype(torch.bfloat16):
            h = torch._foreach_div([ints, floats], 3.0)[0]
        loss = (h.float().sin() * w).sum()
        with default_dtype(torch.float16):  # as many bytes
            loss.backward()
        assert w.grad is not None
        return w.grad

    expected = gradient()
    with delta.Runtime("100%", device="cpu", policy="stress_drop_all", verify=verify) as runtime:
        assert torch.equal(gradient(), expected)
        assert runtime.session.counters().drops > 0
    runtime.close()


def test_a_dtype_to_compute_in_is_not_that_of_the_result() -> None:
    def program() -> Step:
        w = leaf(N, N)
        z = torch.tensor(1.0 + 2.0j)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = (w.detach() * torch.linalg.vector_norm(z * 1.5)).sin()
                return (h * w).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all")


@pytest.mark.parametrize("name", ["rand", "linspace", "eye", "full"])
def test_another_thread_makes_tensors_of_the_default_dtype_meanwhile(name: str) -> None:
    """The default is that of all threads: it is not set for a rebuild where the op can be told."""

    def program() -> Step:
        w = leaf(N, N)
        wrong: list[torch.dtype] = []

        def make(stop: threading.Event) -> None:
            while not stop.is_set():
                dtype = torch.zeros(2).dtype
                if dtype is not torch.float32:
                    wrong.append(dtype)

        def step(k: int) -> list[Tensor]:
            torch.manual_seed(k)

            def forward() -> Tensor:
                total = w.sum() * 0.0
                for _ in range(20):
                    with default_dtype(torch.float64):
                        h = WITHOUT_A_DTYPE[name]() * 1.5
                    total = total + (h.sin() * w).tanh().mean()
                return total

            loss = forward()
            with threads_running(make):
                loss.backward()
            assert not wrong
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all")

"""Writes that the observer does not see but version counters do: by other threads, in compiled code, while disabled.

Also through tensors that share a storage and have counters of their own: what a 3-d product returns, what split returns
without the name of a view, and `.data`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import delta_runtime as delta
from tests.faults.harness import (
    N,
    Step,
    boundary,
    by_dropping,
    check,
    constant,
    in_every_way,
    in_thread,
    leaf,
    sources,
    taken,
)
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.managed import managed
from tests.support.processor import lstm_runs_in_bfloat16

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

Make = Callable[[Tensor, Tensor], Tensor]
Writer = Callable[[Tensor], Any]


@pytest.mark.parametrize(
    "autocast",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                not lstm_runs_in_bfloat16(),
                reason="the processor has no LSTM in bfloat16: oneDNN wants AVX-512",
            ),
        ),
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_a_backward_that_writes_what_forward_left_for_it(seed: int, autocast: bool) -> None:
    """oneDNN's recurrent layers use their workspace as scratch memory, which no schema says.

    So the copy that a first backward read is out of date for a second one.
    """
    torch.manual_seed(0)
    layer = torch.nn.LSTM(64, 128, num_layers=2)
    x = torch.randn(16, 8, 64)
    weights = tuple(layer.parameters())

    def gradients() -> list[Tensor]:
        with torch.autocast("cpu", enabled=autocast):
            loss = layer(x)[0].square().sum()
        first = torch.autograd.grad(loss, weights, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, weights)]

    ordinary = gradients()
    with managed("mix", seed=seed) as probe:
        for _ in range(2):
            inside = gradients()
            assert all(map(torch.equal, inside, ordinary))
    assert probe.mismatches == 0


def product_3d(x: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(x.view(2, N // 2, N), v)


def product_4d(x: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(x.view(2, 2, N // 4, N), v)


def product_batched(x: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bij,jk->bik", x.view(2, N // 2, N), v)


def linear_3d(x: Tensor, v: Tensor) -> Tensor:
    return F.linear(x.view(2, N // 2, N), v, v[0])


def unsafe_part(x: Tensor, v: Tensor) -> Tensor:
    return torch.unsafe_split(torch.cat([x, x @ v]), N)[1]


def unsafe_chunk(x: Tensor, v: Tensor) -> Tensor:
    return torch.unsafe_chunk(torch.cat([x @ v, x]), 2)[0]


def product_2d(x: Tensor, v: Tensor) -> Tensor:
    return x @ v


def fresh(x: Tensor, v: Tensor) -> Tensor:
    return torch.ones(N, N)


MAKERS = [
    product_3d,
    product_4d,
    product_batched,
    linear_3d,
    unsafe_part,
    unsafe_chunk,
    product_2d,
    fresh,
]
of_every_maker = pytest.mark.parametrize("make", MAKERS, ids=lambda f: f.__name__)


def on_a_thread(t: Tensor) -> None:
    in_thread(lambda: t.mul_(3.0))


def on_a_thread_through_a_view(t: Tensor) -> None:
    in_thread(lambda: t.flatten()[N : 2 * N].fill_(0.5))


def on_a_thread_through_data(t: Tensor) -> None:
    in_thread(lambda: t.data.mul_(3.0))


def while_disabled(t: Tensor) -> None:
    with delta.disable():
        t.mul_(3.0)


def while_disabled_through_data(t: Tensor) -> None:
    with delta.disable():
        t.data.mul_(3.0)


def through_data(t: Tensor) -> None:
    t.data.mul_(3.0)


def through_detach(t: Tensor) -> None:
    t.detach().mul_(3.0)


WRITERS = [
    on_a_thread,
    on_a_thread_through_a_view,
    on_a_thread_through_data,
    while_disabled,
    while_disabled_through_data,
    through_data,
    through_detach,
]
by_every_writer = pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)

THROUGH_DATA = {on_a_thread_through_data, while_disabled_through_data}
"""Unseen by the observer and by every counter but their own: where the value has gone, an error is all that is left."""


def _written_in_forward(make: Make, write: Writer) -> Callable[[], Step]:
    """A value of forward is read, written by somebody, read again and let go of."""

    def program() -> Step:
        w, x, v = leaf(N, N), constant(N, N), constant(N, N, seed=1)

        def step(k: int) -> list[Tensor]:
            w.grad = None

            def forward() -> Tensor:
                with torch.no_grad():
                    m = make(x * (1.0 + k), v)
                y = w * (m.reshape(N, N) * 1.5).exp()
                boundary()
                write(m)
                y = y + w * (m * 0.5).cos().reshape(N, N)
                y = y * m.reshape(N, N)
                del m
                return y.sin().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    return program


@of_every_maker
@by_every_writer
@by_dropping
def test_a_value_written_between_two_uses(mode: str, write: Writer, make: Make) -> None:
    check(_written_in_forward(make, write), mode, steps=4, may_be_loud=write in THROUGH_DATA)


@by_every_writer
@by_dropping
def test_a_buffer_filled_as_its_only_use(mode: str, write: Writer) -> None:
    """Made by ordinary ops, changed by somebody, and only then read: no earlier use to compare a version with."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            w.grad = None

            def forward() -> Tensor:
                buffer = torch.full((N, N), 1.0 + k)
                write(buffer)
                h = (buffer + w).sin()
                del buffer
                return (h * h.exp()).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=4, may_be_loud=write in THROUGH_DATA)


@by_every_writer
@by_dropping
def test_a_buffer_changed_after_its_only_use(mode: str, write: Writer) -> None:
    """It lives on, so that what was made of it is rebuilt from it, and then it is another one."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            w.grad = None
            buffers: list[Tensor] = []

            def forward() -> Tensor:
                buffer = torch.ones(N, N)
                y = buffer + w
                h = y.sin()
                buffers.append(buffer)
                del y
                boundary()
                return (h * h.exp()).mean()

            loss = forward()
            write(buffers[0])
            loss.backward()
            return [loss.detach(), buffers[0], *taken(w)]

        return step

    check(program, mode, steps=4, may_be_loud=write in THROUGH_DATA)


@by_every_writer
@by_dropping
def test_a_source_changed_after_its_use(mode: str, write: Writer) -> None:
    """A table of the user's: its old content is nowhere, unless somebody saw the write come."""

    def program() -> Step:
        w, tables = leaf(N, N), sources(5, N, N)

        def step(k: int) -> list[Tensor]:
            w.grad = None
            table = tables[k]

            def forward() -> Tensor:
                y = (w * (table * 1.5).exp()).tanh()
                boundary()
                return (y * y).mean()

            loss = forward()
            write(table)
            loss.backward()
            return [loss.detach(), table, *taken(w)]

        return step

    unseen = write not in (through_data, through_detach)
    check(program, mode, steps=5, may_be_loud=unseen)


@pytest.mark.parametrize(
    "make", [product_3d, linear_3d, unsafe_part, product_2d], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    "write", [on_a_thread, while_disabled, through_detach], ids=lambda f: f.__name__
)
@by_dropping
def test_a_saved_value_written_after_it_was_saved(mode: str, write: Writer, make: Make) -> None:
    """Autograd raises ordinarily, and so it must here."""

    def program() -> Step:
        w, v = leaf(N, N), leaf(N, N, seed=1)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                m = make(w, v)
                y = m.reshape(N, N).sin() * (v * 1.5).exp()
                write(m.detach())
                return y.mean()

            forward().backward()
            return taken(w, v)

        return step

    check(program, mode, raises=True)


@pytest.mark.parametrize("make", [product_3d, linear_3d], ids=lambda f: f.__name__)
@in_every_way
def test_products_that_nobody_writes_are_still_rebuilt(mode: str, make: Make) -> None:
    def program() -> Step:
        w, v = leaf(N, N), leaf(N, N, seed=1)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = make(w, v)
                h = h + h.tanh()
                h.mul_(1.1)
                return (h * h.sin()).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w, v)]

        return step

    check(program, mode)


# ---------------------------------------------------------------------------------------------- compiled writes


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [product_3d, product_2d, fresh], ids=lambda f: f.__name__)
def test_a_value_written_by_compiled_code(make: Make, backend: str) -> None:
    @torch.compile(backend=backend)
    def scale(t: Tensor) -> None:
        t.mul_(3.0)

    check(_written_in_forward(make, scale), "drop_all")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["source", "buffer"])
def test_a_source_written_by_compiled_code_after_its_use(what: str, backend: str) -> None:
    @torch.compile(backend=backend)
    def advance(t: Tensor, by: Tensor) -> Tensor:
        t.mul_(0.5)
        t.add_(by)
        return t.sum()

    def program() -> Step:
        w = leaf(N, N)
        state = constant(N, N, seed=4)

        def step(k: int) -> list[Tensor]:
            w.grad = None

            def forward() -> Tensor:
                table = state if what == "source" else torch.zeros(N, N) + k
                y = (w * (table * 1.5).exp()).tanh()
                boundary()
                advance(table, constant(N, N, seed=k))
                y = y + w * table.cos()
                return (y * y).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), state, *taken(w)]

        state.copy_(constant(N, N, seed=4))
        return step

    check(program, "drop_all", steps=5)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("part", ["whole", "view", "detached", "wrapped"])
def test_a_source_written_by_compiled_code_after_the_step(
    part: str, needs_gradient: bool, backend: str
) -> None:
    """Its graph is kept, and gone through in the next step."""

    @torch.compile(backend=backend)
    def triple(t: Tensor) -> None:
        t.mul_(3.0)

    @torch.compile(backend=backend)
    def triple_beside(t: Tensor, other: Tensor) -> Tensor:
        t.mul_(3.0)
        return t * other

    def program() -> Step:
        w = leaf(N, N)
        tables = sources(4, N, N)
        kept: list[Tensor] = []

        def step(k: int) -> list[Tensor]:
            w.grad = None
            if kept:
                kept.pop().backward()
                return taken(w)
            source = tables[k]

            def forward() -> Tensor:
                return (w * (source * 1.5).exp()).tanh().square().mean()

            kept.append(forward())
            boundary()
            written = {
                "whole": source,
                "view": source[: N // 2],
                "detached": source.detach(),
                "wrapped": TwoTensor(source, constant(N, N)),
            }[part]
            if needs_gradient:
                loss = triple_beside(written, w[: len(written)]).mean()
                if part != "wrapped":
                    loss.backward()
            else:
                triple(written)
            boundary()
            return [source, *(taken(w) if w.grad is not None else [])]

        return step

    check(program, "drop_all", steps=4)

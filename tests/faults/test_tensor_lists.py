"""Ops over lists of tensors: longer than 16 bits count, and ones that give up half-way and are caught."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.faults.harness import N, Step, boundary, by_dropping, check, constant, leaf, taken
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(30)

MANY = 33_000
"""More than 32,767. What is done for each must not be done again for all of them, or the time limit ends it."""

Use = Callable[[Tensor, Tensor], Tensor]


def stacked(w: Tensor, x: Tensor) -> Tensor:
    return torch.stack((w * 1.5).unbind())


def joined(w: Tensor, x: Tensor) -> Tensor:
    return torch.cat((w * 1.5).split(1))


def stacked_without_gradient(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        parts = list((w * 1.5).unbind())
        parts[-1] = parts[-1] * 2.0
        gate = torch.stack(parts)
    return w * gate


def copied_apart(w: Tensor, x: Tensor) -> Tensor:
    """An op with as many results."""
    with torch.no_grad():
        parts = torch.unbind_copy(x * 1.5)
        gate = torch.stack(parts[::-1])
    return w * gate


def in_a_list(w: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        parts = [part.clone() for part in (x * 1.5).unbind()]
        torch._foreach_mul_(parts, 2.0)
        gate = torch.cat([part.view(1) for part in torch._foreach_exp(parts)])
    return w * gate


def last_of_a_list(w: Tensor, x: Tensor) -> Tensor:
    """Only an element past the limit is saved, and it is large."""
    with torch.no_grad():
        parts = [x[:1]] * MANY + [x * 0.5]
        gate = torch._foreach_mul(parts, 1.5)[-1]
    return w * gate


@pytest.mark.parametrize(
    "use",
    [stacked, joined, stacked_without_gradient, copied_apart, in_a_list, last_of_a_list],
    ids=lambda f: f.__name__,
)
def test_lists_of_many_tensors(use: Use) -> None:
    def program() -> Step:
        w, x = leaf(MANY + 7), constant(MANY + 7)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = use(w, x * (1.0 + k))
                return (h.exp() * h).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all", steps=2)


def test_a_norm_over_many_parameters() -> None:
    """Clipping of gradients as torch does it: one op over all of them, and one over their norms."""

    def program() -> Step:
        parameters = nn.ParameterList(nn.Parameter(torch.full((1,), 0.5)) for _ in range(MANY))
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            for parameter in parameters:
                parameter.grad = torch.full((1,), 0.01 * (k + 1))
            loss = (w * 1.5).exp().sin().mean()
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            (loss * norm).backward()
            return [loss.detach(), norm, parameters[-1].grad, *taken(w)]

        return step

    check(program, "drop_all", steps=2)


# ----------------------------------------------------------------------------------------- half of it, then an error


def foreach_add(parts: list[Tensor]) -> None:
    torch._foreach_add_(parts, [torch.ones(N), torch.ones(N), torch.ones(N + 1)])


def foreach_mul(parts: list[Tensor]) -> None:
    torch._foreach_mul_(parts, [torch.full((N,), 2.0), torch.ones(N + 1), torch.ones(N)])


def foreach_copy(parts: list[Tensor]) -> None:
    torch._foreach_copy_(parts, [torch.zeros(N), torch.zeros(N), torch.zeros(3)])


def foreach_lerp(parts: list[Tensor]) -> None:
    torch._foreach_lerp_(parts, [torch.ones(N), torch.ones(N), torch.ones(N + 1)], 0.5)


def index_add(parts: list[Tensor]) -> None:
    index = torch.tensor([0, 1, N // 2, N + 5])
    parts[0].index_add_(0, index, torch.ones(4))


def index_copy(parts: list[Tensor]) -> None:
    parts[0].index_copy_(0, torch.tensor([0, 1, N // 2, N + 5]), torch.ones(4))


def scatter(parts: list[Tensor]) -> None:
    parts[0].scatter_(0, torch.tensor([0, 1, N // 2, N + 5]), torch.ones(4))


def scatter_add(parts: list[Tensor]) -> None:
    parts[0].scatter_add_(0, torch.tensor([0, 1, N // 2, N + 5]), torch.ones(4))


def put(parts: list[Tensor]) -> None:
    parts[0].put_(torch.tensor([0, 1, N // 2, N + 5]), torch.ones(4))


@torch.library.custom_op("delta_list_tests::half", mutates_args=("a", "b"))
def half(a: Tensor, b: Tensor) -> None:
    """Writes one of its two arguments and gives up."""
    a.mul_(3.0)
    raise RuntimeError("half of it")


def custom(parts: list[Tensor]) -> None:
    half(parts[0], parts[1])


FAILING = [
    foreach_add,
    foreach_mul,
    foreach_copy,
    foreach_lerp,
    index_add,
    index_copy,
    scatter,
    scatter_add,
    put,
    custom,
]


@pytest.mark.parametrize("fail", FAILING, ids=lambda f: f.__name__)
@by_dropping
def test_an_op_that_throws_half_way_and_is_caught(
    mode: str, fail: Callable[[list[Tensor]], None]
) -> None:
    """What it had written by then stays written; backward goes on with that and does not throw again."""

    def program() -> Step:
        w, x = leaf(N), constant(N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                with torch.no_grad():
                    parts = [x * (1.0 + k + i) for i in range(3)]
                    y = w * (parts[0] * 0.5).exp()
                    boundary()
                    with contextlib.suppress(RuntimeError, IndexError):
                        fail(parts)
                y = (w * (parts[0] * 0.5).exp()) + y.detach()
                y = y * (w * parts[1].sin()) + w * (parts[2] * 0.5).cos()
                return (y * w.exp()).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


@by_dropping
def test_an_op_that_throws_over_a_source(mode: str) -> None:
    """The old content was needed, and so is the new one."""

    def program() -> Step:
        w, tables = leaf(N), [constant(N, seed=k) for k in range(3)]

        def step(k: int) -> list[Tensor]:
            table = tables[k]

            def forward() -> Tensor:
                y = w * (table * 0.5).exp()
                boundary()
                with contextlib.suppress(RuntimeError):
                    torch._foreach_add_([table, w.detach()], [torch.ones(N), torch.ones(N + 1)])
                return (y * (w * (table * 0.5).exp())).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), table, *taken(w)]

        return step

    check(program, mode)

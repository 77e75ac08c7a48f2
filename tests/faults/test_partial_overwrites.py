"""Ops that overwrite all that they are given, on views that are not all of the memory: the rest keeps its old content.

A view can have as many elements as its storage and still reach only a part of it, where its elements overlap.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.faults.harness import Step, boundary, by_dropping, check, constant, leaf, sources, taken
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(60)

LENGTH = 4096

View = Callable[[Tensor], Tensor]
Write = Callable[[Tensor], object]


def windows_of_a_half(b: Tensor) -> Tensor:
    """As many elements as there are in all, over the first half."""
    return b[: LENGTH // 2 + 1].unfold(0, 2, 1)


def windows_of_four(b: Tensor) -> Tensor:
    return b[: LENGTH // 4 + 3].unfold(0, 4, 1)


def windows_past_the_end_of_a_half(b: Tensor) -> Tensor:
    """More elements than there are in all."""
    return b[: LENGTH // 2 + 8].unfold(0, 8, 2)


def strided_over_itself(b: Tensor) -> Tensor:
    return b.as_strided((LENGTH // 2, 2), (1, 1))


def strided_with_gaps(b: Tensor) -> Tensor:
    """Reaches to the end, and leaves every fourth element out."""
    return b.as_strided((LENGTH // 4, 2, 2), (4, 1, 1))


def strided_from_inside(b: Tensor) -> Tensor:
    return b.as_strided((LENGTH // 4 - 1, 4), (3, 1), 1)


def first_part(b: Tensor) -> Tensor:
    return b[: LENGTH // 2]


def every_second(b: Tensor) -> Tensor:
    return b[::2]


def reals(b: Tensor) -> Tensor:
    return torch.view_as_complex(b.view(-1, 2)).real


def low_bytes(b: Tensor) -> Tensor:
    return b.view(torch.int16)[::2]


def all_of_it(b: Tensor) -> Tensor:
    return b.view(LENGTH // 8, 8).t()


OVERLAPPING = [
    windows_of_a_half,
    windows_of_four,
    windows_past_the_end_of_a_half,
    strided_over_itself,
    strided_with_gaps,
    strided_from_inside,
]
PLAIN = [first_part, every_second, reals, low_bytes, all_of_it]


def zeroed(v: Tensor) -> None:
    v.zero_()


def filled(v: Tensor) -> None:
    v.fill_(3)


def copied(v: Tensor) -> None:
    v.copy_(torch.full(v.shape, 2, dtype=v.dtype))


def uniform(v: Tensor) -> None:
    v.uniform_() if v.is_floating_point() else v.random_(0, 5)


def normal(v: Tensor) -> None:
    v.normal_() if v.is_floating_point() else v.random_(0, 9)


def masked(v: Tensor) -> None:
    v.bernoulli_(0.5)


def written_out(v: Tensor) -> None:
    torch.full(v.shape, 2, dtype=v.dtype, out=v)


def computed_out(v: Tensor) -> None:
    torch.mul(torch.full(v.shape, 2, dtype=v.dtype), 2, out=v)


def zeroed_in_a_list(v: Tensor) -> None:
    torch._foreach_zero_([v])


def copied_in_a_list(v: Tensor) -> None:
    torch._foreach_copy_([v], [torch.full(v.shape, 2, dtype=v.dtype)])


WRITES = [
    zeroed,
    filled,
    copied,
    uniform,
    normal,
    masked,
    written_out,
    computed_out,
    zeroed_in_a_list,
    copied_in_a_list,
]


def _program(view: View, write: Write, of: str) -> Callable[[], Step]:
    def program() -> Step:
        w, x, tables = leaf(LENGTH), constant(LENGTH), sources(3, LENGTH)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                with torch.no_grad():
                    b = tables.pop() if of == "source" else x * (1.0 + k)
                    y = w * (b * 0.5).exp()
                    boundary()
                    write(view(b))
                y = y + w * b.sin()
                z = w * (b * 0.5).cos()
                return (y * z).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    return program


@pytest.mark.parametrize("view", OVERLAPPING + PLAIN, ids=lambda f: f.__name__)
@pytest.mark.parametrize("of", ["value", "source"])
@by_dropping
def test_views_that_reach_a_part(mode: str, of: str, view: View) -> None:
    check(_program(view, zeroed, of), mode)


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "view", [windows_of_a_half, strided_with_gaps, first_part], ids=lambda f: f.__name__
)
def test_ops_that_overwrite(write: Write, view: View) -> None:
    check(_program(view, write, "value"), "drop_all")


@by_dropping
def test_many_partial_writes_make_one_value(mode: str) -> None:
    """Windows of windows, in place upon in place, differentiable ones among them."""

    def program() -> Step:
        w = leaf(LENGTH)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                grid = (w * (1.5 + k)).clone()
                grid[: LENGTH // 4] = w[: LENGTH // 4].exp()
                with torch.no_grad():
                    gate = torch.ones(LENGTH)
                    windows_of_a_half(gate).mul_(0.5)
                    windows_of_four(gate).fill_(0.25)
                    windows_of_four(gate)[:, 0].normal_()
                    strided_from_inside(gate).zero_()
                    gate[-7:].uniform_()
                return (grid * gate).exp().mul(gate.sin()).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


@by_dropping
def test_a_storage_that_is_larger_than_all_that_is_seen_of_it(mode: str) -> None:
    """Two tensors over the halves of one storage; whoever overwrites one of them leaves the other."""

    def program() -> Step:
        w = leaf(LENGTH)

        def step(k: int) -> list[Tensor]:
            def halves() -> tuple[Tensor, Tensor]:
                storage = torch.zeros(2 * LENGTH).add_(0.5 + k)
                return storage[:LENGTH], storage[LENGTH:]

            def forward() -> Tensor:
                with torch.no_grad():
                    lower, upper = halves()
                    lower.copy_(w)
                    torch.mul(lower, 2.0, out=upper)
                    lower.set_(lower.untyped_storage(), 0, (LENGTH,)).fill_(0.125)
                return (w * lower).exp().mul(w * upper.sin()).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)

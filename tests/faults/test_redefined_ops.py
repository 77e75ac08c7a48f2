"""Ops that are defined anew under their old name, as by a cell of a notebook that is run again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.faults.harness import N, Step, boundary, check, in_every_way, leaf, sources, taken
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(120)


class Cell:
    """Defines `redefined::op`, each time instead of what was there."""

    library: torch.library.Library | None = None

    @classmethod
    def clear(cls) -> None:
        if cls.library is not None:
            cls.library._destroy()
            cls.library = None

    @classmethod
    def define(cls, schema: str, kernel: object) -> None:
        cls.clear()
        cls.library = torch.library.Library("redefined", "FRAGMENT")
        cls.library.define(schema)
        cls.library.impl("op", kernel, "CPU")


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    yield
    Cell.clear()


def look(x: Tensor) -> None:
    pass


def triple(x: Tensor) -> None:
    x.mul_(3.0)


@in_every_way
def test_an_op_that_writes_now(mode: str) -> None:
    """It was pure before: what needs the old content of its argument has to be told of the write."""

    def program() -> Step:
        w = leaf(N, N)
        tables = sources(6, N, N)

        def step(k: int) -> list[Tensor]:
            if k % 2 == 0:
                Cell.define("op(Tensor x) -> ()", look)
            else:
                Cell.define("op(Tensor(a!) x) -> ()", triple)
            w.grad = None
            table = tables[k]

            def forward() -> Tensor:
                y = (table * 1.5) * w
                with torch.no_grad():
                    torch.ops.redefined.op(table)
                boundary()
                return (y.sin() * table * w).mean()

            loss = forward()
            boundary()
            loss.backward()
            return [loss.detach(), table, *taken(w)]

        return step

    check(program, mode, steps=6)


@in_every_way
def test_an_op_that_computes_something_else_now(mode: str) -> None:
    kernels = [
        lambda x: x.mul(0.5).sin(),
        lambda x: x.exp().neg(),
        lambda x: x.mul(0.5).sin() + torch.rand_like(x),
    ]

    def program() -> Step:
        w = leaf(N, N)
        tables = sources(6, N, N)

        def step(k: int) -> list[Tensor]:
            Cell.define("op(Tensor x) -> Tensor", kernels[k // 2])
            torch.manual_seed(k)
            w.grad = None
            # As often as it takes to trust it, and to drop what it made.
            made = [torch.ops.redefined.op(tables[k] + i) for i in range(4)]
            loss = sum(((y * w).tanh().square().mean() for y in made), torch.zeros(()))
            made.clear()
            boundary()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=6, may_be_kept=True, may_be_loud=True)


@pytest.mark.parametrize("ends", ["anew", "gone"])
def test_an_op_that_is_not_there_in_backward(ends: str) -> None:
    def program() -> Step:
        w = leaf(N, N)
        tables = sources(7, N, N)

        def step(k: int) -> list[Tensor]:
            if Cell.library is None or k == 0:
                Cell.define("op(Tensor x) -> Tensor", torch.sin)
            w.grad = None
            y = torch.ops.redefined.op(tables[k])
            loss = (y * w).square().mean()
            del y
            boundary()
            if k == 4:
                if ends == "anew":
                    Cell.define("op(Tensor x) -> Tensor", torch.cos)
                else:
                    Cell.clear()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all", steps=7, may_be_loud=True)


@pytest.mark.parametrize("place", ["what it made", "what was made of that"])
def test_an_op_whose_library_ends_behind_forward_is_kept(place: str) -> None:
    """Nothing of it has gone since: what cannot be recomputed any more is not dropped."""

    def program() -> Step:
        w = leaf(N, N)
        tables = sources(7, N, N)

        def step(k: int) -> list[Tensor]:
            if Cell.library is None:
                Cell.define("op(Tensor x) -> Tensor", torch.sin)
            w.grad = None
            y = torch.ops.redefined.op(tables[k])
            if place == "what was made of that":
                # Of two values with one recipe the first goes while the op is there.
                middle = y + 1.0
                first, y = middle * 2.0, middle * 3.0
                del middle
                product = first * w
                del first
                boundary()
            product = y * w
            if k == 4:
                Cell.clear()  # y is still held
            loss = product.square().mean()
            del y
            boundary()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all", steps=7)


def test_the_overload_that_takes_a_generator_is_gone() -> None:
    """A replay calls it instead of the op that ran."""
    tags = (torch.Tag.nondeterministic_seeded,)
    main = torch.library.Library("redefined_random", "DEF")
    main.define("op(Tensor x) -> Tensor", tags=tags)
    main.impl("op", lambda x: x + torch.rand(x.shape), "CPU")
    overloads: list[torch.library.Library] = []

    def program() -> Step:
        while overloads:
            overloads.pop()._destroy()
        overloads.append(torch.library.Library("redefined_random", "FRAGMENT"))
        overloads[0].define("op.generator(Tensor x, *, Generator? generator) -> Tensor", tags=tags)
        overloads[0].impl(
            "op.generator",
            lambda x, *, generator=None: x + torch.rand(x.shape, generator=generator),
            "CPU",
        )
        w = leaf(N, N)
        tables = sources(7, N, N)

        def step(k: int) -> list[Tensor]:
            w.grad = None
            made = [torch.ops.redefined_random.op(tables[k] + i) for i in range(4)]
            loss = sum(((y * w).tanh().square().mean() for y in made), torch.zeros(()))
            made.clear()
            boundary()
            if k == 4:
                overloads.pop()._destroy()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all", steps=7, may_be_loud=True, may_be_kept=True)
    main._destroy()

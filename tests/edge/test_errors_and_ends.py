"""Errors in forward and backward, graphs that die unused, runtimes that end early."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.edge.harness import (
    MANAGED_MODES,
    boundary,
    check,
    constant,
    leaf,
    run,
)
from tests.support.bitwise import assert_same_bits, freeze
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.managed import managed


class Interrupted(BaseException):
    """As KeyboardInterrupt: not an Exception."""


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, Interrupted])
def test_an_exception_in_forward(error: type[BaseException]) -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))

        def fail(*_: Any) -> None:
            raise error

        for step in range(3):
            x = constant(8, 16, seed=step)
            handle = model[2].register_forward_hook(fail) if step == 1 else None
            with contextlib.suppress(error):
                model(x).square().mean().backward()
            if handle is not None:
                handle.remove()
        return [p.grad for p in model.parameters()]

    check(body)


def test_an_exception_in_backward() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))

        def fail(*_: Any) -> None:
            raise ValueError

        for step in range(3):
            h = model(constant(8, 16, seed=step))
            if step == 1:
                h.register_hook(fail)
            loss = h.square().mean()
            del h
            with contextlib.suppress(ValueError):
                loss.backward()
            del loss
        return [p.grad for p in model.parameters()]

    check(body)


def test_an_exception_that_leaves_the_region() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))

    def leave(mode: str) -> None:
        with managed(mode):
            model(constant(8, 16)).square().mean()
            raise ValueError("mine")

    for mode in MANAGED_MODES:
        with pytest.raises(ValueError, match="mine"):
            leave(mode)
    check(lambda: torch.autograd.grad(model(constant(8, 16)).square().mean(), model[0].weight)[0])


def test_backward_outside_of_the_region() -> None:
    w = leaf(64)

    def forward() -> Tensor:
        loss = F.dropout((w * 2.0).exp(), 0.5).sin().sum()
        boundary()
        return loss

    torch.manual_seed(42)
    (expected,) = torch.autograd.grad(forward(), w)
    for mode in MANAGED_MODES:
        torch.manual_seed(42)
        with managed(mode, seed=1):
            loss = forward()
        gc.collect()
        (actual,) = torch.autograd.grad(loss, w)
        assert_same_bits({"w": freeze(actual)}, {"w": freeze(expected)}, mode)


def test_a_graph_that_outlives_many_regions() -> None:
    w = leaf(64)

    def forward() -> Tensor:
        loss = (w * 2.0).exp().sin().sum()
        boundary()
        return loss

    (expected,) = torch.autograd.grad(forward(), w)
    losses = []
    for seed in range(5):
        with managed("random", seed=seed):
            losses.append(forward())
            torch.autograd.grad(forward(), w)
    for loss in losses:
        (actual,) = torch.autograd.grad(loss, w)
        assert_same_bits({"w": freeze(actual)}, {"w": freeze(expected)})


@contextlib.contextmanager
def _no_op_records_left() -> Iterator[None]:
    from delta_runtime import _C

    gc.collect()
    before = _C.live_records()
    yield
    gc.collect()
    assert _C.live_records() <= before


def test_a_deep_chain_that_is_let_go() -> None:
    """Records point at each other as deep as the program; a recursive destructor would overflow the stack."""
    with _no_op_records_left(), managed("drop_all"):
        y = leaf(4)
        for _ in range(200_000):
            y = y * 1.0001
        del y


def test_a_deep_chain_that_is_rebuilt() -> None:
    w = leaf(4)

    def body() -> Tensor:
        def forward() -> Tensor:
            y = w
            for _ in range(200_000):
                y = y * 1.0001
            return (w * y).sum()

        loss = forward()
        boundary()
        return torch.autograd.grad(loss, w)[0]

    expected, _ = run(body, "ordinary")
    with _no_op_records_left():
        actual, rebuilt = run(body, "drop_all")
    assert_same_bits(actual, expected)
    assert rebuilt > 0


def test_a_deep_differentiable_chain() -> None:
    w = leaf(4)

    def body() -> Tensor:
        def forward() -> Tensor:
            y = w
            for _ in range(300):
                y = (y * 1.0001).sin()
            return y.sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)

"""What was changed between forward and backward: an error, as in an ordinary run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.edge.harness import (
    Body,
    check_raises,
    leaf,
    run,
)
from tests.support.fixtures import one_thread  # noqa: F401


def _saved_result() -> Tensor:
    w = leaf(64)
    z = torch.exp(w * 1.0)
    loss = z.sum()
    z.mul_(2.0)
    return torch.autograd.grad(loss, w)[0]


def _saved_operand() -> Tensor:
    w = leaf(64)
    z = w * 2.0
    loss = (z * z).sum()
    z.add_(1.0)
    return torch.autograd.grad(loss, w)[0]


def _saved_view_through_its_base() -> Tensor:
    w = leaf(4, 16)
    z = w * 2.0
    loss = z[1].sin().sum()
    z.add_(1.0)
    return torch.autograd.grad(loss, w)[0]


def _saved_base_through_a_detached_alias() -> Tensor:
    w = leaf(64)
    z = torch.exp(w * 1.0)
    loss = z.sum()
    z.detach().zero_()
    return torch.autograd.grad(loss, w)[0]


def _saved_parameter() -> Tensor:
    w, x = leaf(8, 8), leaf(8, 8, seed=1)
    loss = (x @ w).sum()
    with torch.no_grad():
        w.add_(1.0)
    return torch.autograd.grad(loss, x)[0]


def _saved_parameter_by_an_optimizer() -> Tensor:
    linear = nn.Linear(8, 8)
    x = leaf(4, 8)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    linear(x).sum().backward()
    loss = linear(x).sum()
    optimizer.step()
    loss.backward()
    return x.grad


@pytest.mark.parametrize(
    "body",
    [
        _saved_result,
        _saved_operand,
        _saved_view_through_its_base,
        _saved_base_through_a_detached_alias,
        _saved_parameter,
        _saved_parameter_by_an_optimizer,
    ],
    ids=lambda body: body.__name__.strip("_"),
)
def test_changed_in_place_after_saving_raises_as_autograd_does(body: Body) -> None:
    check_raises(body, "modified by an inplace operation")


def test_the_error_of_a_change_in_place_is_ours_too() -> None:
    import delta_runtime as delta

    with pytest.raises(delta.InplaceModification):
        run(_saved_result, "drop_all")


def test_backward_twice_raises() -> None:
    def body() -> Tensor:
        w = leaf(64)
        loss = (w * 2.0).exp().sum()
        loss.backward()
        loss.backward()
        return w.grad

    check_raises(body, "second time")

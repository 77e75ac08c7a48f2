"""Writes to what recipes need, between forward and backward: the bits stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.edge.harness import (
    MANAGED_MODES,
    boundary,
    check,
    check_same_or_error,
    constant,
    leaf,
)
from tests.support.bitwise import assert_same_bits, freeze
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.managed import managed


def test_source_overwritten_inside_the_region() -> None:
    def body() -> Tensor:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            y = (w * (table * 2.0)).sum()
            boundary()
            table.zero_()
            return y

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_source_overwritten_through_a_view_and_through_its_base() -> None:
    def body() -> list[Tensor]:
        w, table = leaf(32), constant(64)
        view = table[32:]

        def forward() -> Tensor:
            y = (w * view.exp()).sum()
            boundary()
            table.mul_(3.0)
            z = (w * view.exp()).sum()
            boundary()
            view.add_(1.0)
            return y + z

        return [*torch.autograd.grad(forward(), w), table]

    check(body)


def test_copy_on_write_storages() -> None:
    def body() -> list[Tensor]:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            lazy = torch._lazy_clone(table)
            y = (w * (lazy * 2.0)).sum()
            boundary()
            table.mul_(2.0)  # takes the two apart
            z = (w * (lazy + table)).sum()
            boundary()
            lazy.zero_()
            return y + z

        return [*torch.autograd.grad(forward(), w), table]

    check(body)


def test_copy_on_write_of_a_recorded_value() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            with torch.no_grad():
                value = w.exp()
                lazy = torch._lazy_clone(value)
                lazy.mul_(2.0)
            return (w * value).sum() + (w * lazy).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_values_between_writes() -> None:
    """Several versions of one storage are needed, each by another saved tensor."""

    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            total = torch.zeros(())
            state = torch.zeros(64)
            for k in range(5):
                state.add_(w.detach() * k)
                total = total + (w * state.sin()).sum()
            return total

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_partial_writes() -> None:
    def body() -> Tensor:
        w = leaf(4, 16)

        def forward() -> Tensor:
            grid = torch.zeros(6, 16)
            grid[1:5].copy_(w.detach())
            grid[0] = grid[1] * 2
            grid[5].fill_(0.5)
            grid[::2].mul_(1.5)
            return (w * grid.exp()[1:5]).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_differentiable_writes_into_views() -> None:
    def body() -> Tensor:
        w = leaf(4, 16)

        def forward() -> Tensor:
            grid = torch.zeros(4, 16)
            grid[:2] = w[:2].exp()
            grid[2:] = w[2:].tanh()
            grid = grid.clone()
            grid[1].mul_(w[0])
            return (grid * grid).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_source_overwritten_after_the_region_is_an_error_or_right() -> None:
    """Without the runtime the saved result is still there; a recipe must not be run on the new weights."""
    w = leaf(64)

    def forward() -> Tensor:
        loss = ((w * 2.0).exp().sin()).sum()
        boundary()
        return loss

    (expected,) = torch.autograd.grad(forward(), w)
    for mode in MANAGED_MODES:
        with managed(mode, seed=1):
            loss = forward()
        before = w.detach().clone()
        with torch.no_grad():
            w.add_(1.0)
        complaint = ""
        try:
            (actual,) = torch.autograd.grad(loss, w)
        except RuntimeError as error:
            complaint = str(error)
        if complaint:
            assert "delta_runtime" in complaint and "in place" in complaint
        else:
            assert_same_bits({"w": freeze(actual)}, {"w": freeze(expected)}, mode)
        with torch.no_grad():
            w.copy_(before)


def test_source_overwritten_after_forward_inside_the_region() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            return ((w * 2.0).exp().sin()).sum()

        loss = forward()
        boundary()
        with torch.no_grad():
            w.add_(1.0)
        return torch.autograd.grad(loss, w)[0]

    check_same_or_error(body)


def test_optimizer_step_before_a_second_backward() -> None:
    def body() -> list[Tensor]:
        w = leaf(64)
        optimizer = torch.optim.SGD([w], lr=0.1)

        def forward() -> Tensor:
            return ((w * 2.0).exp().sin()).sum()

        loss = forward()
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward()
        return [w, w.grad]

    check_same_or_error(body)


def test_data_of_a_source_swapped() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            return (w * 2.0).exp().sum()

        loss = forward()
        boundary()
        w.data = torch.zeros(64)
        return torch.autograd.grad(loss, w)[0]

    check_same_or_error(body)


@pytest.mark.parametrize("what", ["source", "value"])
def test_writes_through_data(what: str) -> None:
    """`.data` has a version counter of its own: autograd does not notice, so the bits must be the ordinary ones."""

    def body() -> Tensor:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            value = table * 2.0
            loss = (w * value).sum() + (w * table).sum()
            boundary()
            (table if what == "source" else value).data.mul_(3.0)
            return loss

        return torch.autograd.grad(forward(), w)[0]

    check_same_or_error(body)


def test_storage_of_a_source_resized_to_nothing() -> None:
    def body() -> Tensor:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            return (w * table.exp()).sum()

        loss = forward()
        boundary()
        table.untyped_storage().resize_(0)
        return torch.autograd.grad(loss, w)[0]

    check_same_or_error(body)


def test_foreign_write_that_was_announced() -> None:
    import delta_runtime as delta

    def body() -> Tensor:
        w = leaf(64, 64)

        def forward() -> Tensor:
            buffer = torch.zeros(64)
            buffer.add_(1.0)
            buffer.numpy()[:] = 5.0
            delta.mark_written(buffer)
            return (w * buffer).sum() + (w * buffer.exp()).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_foreign_write_into_a_source_after_use_that_was_announced() -> None:
    import delta_runtime as delta

    def body() -> Tensor:
        w, table = leaf(64), constant(64)

        def forward() -> Tensor:
            y = (w * table.exp()).sum()
            boundary()
            table.numpy()[:] = 5.0
            delta.mark_written(table)
            return y

        return torch.autograd.grad(forward(), w)[0]

    check_same_or_error(body)

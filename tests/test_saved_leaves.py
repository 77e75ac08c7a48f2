"""Custom Functions find the leaves that they saved, with all that the program has attached to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import delta_runtime as delta
from tests.support.fixtures import one_thread  # noqa: F401


class FusedLinear(torch.autograd.Function):
    """Accumulates the weight's gradient itself, as fused kernels do."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        weight.main_grad.addmm_(grad.t(), x)
        return grad @ weight, None


def weight_of(n: int = 64) -> nn.Parameter:
    weight = nn.Parameter(torch.linspace(-1, 1, n * n).view(n, n))
    weight.main_grad = torch.zeros(n, n)
    return weight


@pytest.mark.parametrize("policy", ["off", "recompute", "stress_drop_all"])
def test_a_fused_accumulation_finds_its_buffer(policy: str) -> None:
    def run(weight: nn.Parameter) -> tuple[Tensor, Tensor]:
        x = torch.linspace(0, 1, 64 * 64).view(64, 64).requires_grad_()
        FusedLinear.apply((x * 2).sin(), weight).square().sum().backward()
        assert x.grad is not None
        return x.grad, weight.main_grad

    expected = run(weight_of())
    with delta.Runtime("100%", device="cpu", policy=policy, min_bytes=0):
        actual = run(weight_of())
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


class _Seen(torch.autograd.Function):
    seen: list[Tensor] = []

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        _Seen.seen[:] = ctx.saved_tensors
        a, b = ctx.saved_tensors
        return grad * b, grad * a


def test_each_saved_leaf_is_itself_and_other_tensors_are_not_taken_for_one() -> None:
    a, b = weight_of(), weight_of()
    with delta.Runtime("100%", device="cpu"):
        _Seen.apply(b, a).sum().backward()
        assert _Seen.seen[0] is b
        assert _Seen.seen[1] is a
        _Seen.apply(a.t(), a).sum().backward()
        assert _Seen.seen[0] is not a
        assert _Seen.seen[1] is a
    _Seen.seen.clear()

"""A network of custom autograd Functions: saved inputs, outputs and intermediates, an in-place one with mark_dirty."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import ZooModel, classes, images, zoo_model


class InplaceLeakyClamp(torch.autograd.Function):
    """Clamps its argument in place, and saves the mask and the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = x.abs() < 1.5
        x.clamp_(-1.5, 1.5)
        ctx.mark_dirty(x)
        ctx.save_for_backward(mask, x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        mask, x = ctx.saved_tensors
        return grad * torch.where(mask, 1.0, 0.1 * x.cos())


class Swish(torch.autograd.Function):
    """Saves an input and an intermediate that is not an output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        return grad * (gate + x * gate * (1 - gate))


class NoisyScale(torch.autograd.Function):
    """Draws random numbers in forward and keeps one tensor as an attribute, past every hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = 1.0 + 0.1 * torch.randn_like(x)
        ctx.save_for_backward(noise)
        ctx.row_means = x.mean(-1, keepdim=True)
        return x * noise

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (noise,) = ctx.saved_tensors
        return grad * noise + 0.0 * ctx.row_means


class CustomNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(inputs, 16, 3, padding=1) for inputs in (3, 16, 16, 16, 16, 16)
        )
        self.norms = nn.ModuleList(
            nn.BatchNorm2d(16) if k % 2 else nn.InstanceNorm2d(16, affine=True) for k in range(6)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = InplaceLeakyClamp.apply(norm(conv(x)))
            x = NoisyScale.apply(Swish.apply(x))
        return self.head(F.dropout(x, 0.1, self.training).mean((2, 3)))


@zoo_model("custom_functions")
def custom_functions() -> ZooModel:
    model = CustomNet()
    return ZooModel(
        model,
        lambda i: {"x": images(i, 8, 24), "y": classes(i, 8)},
        lambda b: F.cross_entropy(model(b["x"]), b["y"]),
    )

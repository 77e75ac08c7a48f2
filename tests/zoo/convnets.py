"""Convolutional networks: running statistics, layer norm with stochastic depth, in-place activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import ZooModel, classes, from_output, images, zoo_model


@zoo_model("resnet")
def resnet() -> ZooModel:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[32, 48],
        depths=[3, 3],
        layer_type="bottleneck",
        num_labels=10,
    )
    model = ResNetForImageClassification(config)
    return from_output(
        model, lambda i: {"pixel_values": images(i, 12, 64), "labels": classes(i, 12)}
    )


@zoo_model("convnext")
def convnext() -> ZooModel:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, drop_path_rate=0.2, num_labels=10
    )
    model = ConvNextForImageClassification(config)
    return from_output(
        model, lambda i: {"pixel_values": images(i, 12, 80), "labels": classes(i, 12)}
    )


class InplaceBlock(nn.Module):
    """A residual block as torchvision writes it: ReLU in place on batch norm's output, `out += identity`."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class InplaceResNet(nn.Module):
    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.stem = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(
            *(InplaceBlock(16, 16, 1) for _ in range(3)),
            InplaceBlock(16, 32, 2),
            InplaceBlock(32, 32, 1),
        )
        self.dropout = nn.Dropout(0.1, inplace=True)
        self.head = nn.Linear(32, 10)
        self.to(memory_format=self.memory_format)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x.contiguous(memory_format=self.memory_format)))
        return self.head(self.dropout(x.mean((2, 3))))


def _inplace_resnet(channels_last: bool) -> ZooModel:
    model = InplaceResNet(channels_last)
    return ZooModel(
        model,
        lambda i: {"x": images(i, 8, 32), "y": classes(i, 8)},
        lambda b: F.cross_entropy(model(b["x"]), b["y"]),
    )


@zoo_model("inplace_resnet")
def inplace_resnet() -> ZooModel:
    return _inplace_resnet(channels_last=False)


@zoo_model("inplace_resnet_channels_last")
def inplace_resnet_channels_last() -> ZooModel:
    return _inplace_resnet(channels_last=True)

"""A denoising U-Net of the kind that diffusion trains, for scripts/workloads.py, which imports it.

Covers: group norm, a time embedding, three resolutions, attention at the lowest, skip connections. Does not cover:
text.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_EMBEDDING = 128


class ResidualBlock(nn.Module):
    """Two convolutions with the time between them: (N, inputs, H, W) -> (N, outputs, H, W)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(_EMBEDDING, outputs)
        self.norm2 = nn.GroupNorm(8, outputs)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return h + self.skip(x)


class Attention(nn.Module):
    """Of each pixel to all: (N, channels, H, W) -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(count, 3, channels, height * width)
        q, k, v = qkv.transpose(2, 3).unbind(1)
        h = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(h.transpose(1, 2).reshape(x.shape))


class DenoisingUNet(nn.Module):
    """Predicts the noise that was added to images.

    Args:
        width: channels at the full resolution; twice and four times that below.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(
            nn.Linear(_EMBEDDING, _EMBEDDING), nn.SiLU(), nn.Linear(_EMBEDDING, _EMBEDDING)
        )
        self.first = nn.Conv2d(3, width, 3, padding=1)
        widths = (width, 2 * width, 4 * width)
        inner = (widths[0], *widths[:-1])
        self.down = nn.ModuleList(map(ResidualBlock, inner, widths))
        self.middle = nn.ModuleList([ResidualBlock(widths[-1], widths[-1]), Attention(widths[-1])])
        self.up = nn.ModuleList(
            ResidualBlock(after + here, here)
            for after, here in zip(reversed((*widths[1:], widths[-1])), reversed(widths))
        )
        self.last = nn.Sequential(
            nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, pixel_values: Tensor, labels: Tensor) -> SimpleNamespace:
        """Return the loss, as `.loss`; (N, 3, H, W) and (N,), whose numbers say how noisy each image is to be."""
        level = (labels + 1) / 11
        noise = torch.randn_like(
            pixel_values
        )  # from the global generator, as diffusion trainers do
        mixed = (1 - level)[:, None, None, None] * pixel_values
        mixed = mixed + level[:, None, None, None] * noise
        angles = 100 * level[:, None] * torch.exp(-torch.arange(_EMBEDDING // 2) / 8.0)
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.first(mixed)
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        residual, attention = self.middle
        x = attention(residual(x, time))
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), time)
        return SimpleNamespace(loss=F.mse_loss(self.last(x), noise))

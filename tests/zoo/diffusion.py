"""A small denoising U-Net: group norm, time embedding, attention at the lowest resolution, skip connections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.registry import ZooModel, generator, images, zoo_model


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.dropout = nn.Dropout(0.1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(embedding))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return h + self.skip(x)


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        count, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(count, 3, channels, height * width)
        q, k, v = qkv.transpose(2, 3).unbind(1)
        h = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(h.transpose(1, 2).reshape(x.shape))


class UNet(nn.Module):
    def __init__(self, width: int = 16, embedding: int = 32) -> None:
        super().__init__()
        self.embedding = embedding
        self.time = nn.Sequential(
            nn.Linear(embedding, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down0 = ResidualBlock(width, width, embedding)
        self.down1 = ResidualBlock(width, width, embedding)
        self.down2 = ResidualBlock(width, 2 * width, embedding)
        self.middle = Attention(2 * width)
        self.up2 = ResidualBlock(4 * width, width, embedding)
        self.up1 = ResidualBlock(2 * width, width, embedding)
        self.up0 = ResidualBlock(width, width, embedding)
        self.last = nn.Sequential(
            nn.GroupNorm(4, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1)
        )

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(self.embedding // 2, device=x.device) / 4.0)
        angles = time[:, None] * frequencies
        embedding = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x1 = self.down1(self.down0(self.first(x), embedding), embedding)
        x2 = self.down2(F.avg_pool2d(x1, 2), embedding)
        h = self.middle(x2)
        h = self.up2(torch.cat([h, x2], dim=1), embedding)
        h = F.interpolate(h, scale_factor=2.0, mode="nearest")
        h = self.up1(torch.cat([h, x1], dim=1), embedding)
        return self.last(self.up0(h, embedding))


@zoo_model("unet")
def unet() -> ZooModel:
    model = UNet()

    def batch(i: int) -> dict[str, Tensor]:
        return {"x": images(i, 6, 32), "time": torch.rand(6, generator=generator(i + 20)) * 100}

    def loss(b: dict[str, Tensor]) -> Tensor:
        noise = torch.randn_like(b["x"])  # from the global generator, as diffusion trainers do
        level = (b["time"] / 100)[:, None, None, None]
        return F.mse_loss(model((1 - level) * b["x"] + level * noise, b["time"]), noise)

    return ZooModel(model, batch, loss)

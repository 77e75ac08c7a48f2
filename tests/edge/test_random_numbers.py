"""Random numbers that are drawn again, and the generators of the program."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.edge.harness import (
    check,
    constant,
    leaf,
)
from tests.support.fixtures import one_thread  # noqa: F401


def test_random_ops_of_every_kind() -> None:
    def body() -> list[Tensor]:
        w = leaf(64)
        own = torch.Generator().manual_seed(9)

        def forward() -> Tensor:
            x = F.dropout(w * 2.0, 0.3) * torch.rand(64)
            y = torch.empty(64).normal_(generator=own)
            y.bernoulli_(0.5, generator=own)
            z = F.rrelu(w * 1.5, training=True) + torch.randn_like(w) * w
            order = torch.randperm(64)
            picked = torch.multinomial(torch.ones(64), 8)
            noisy = torch.zeros(64).uniform_(-1, 1).exponential_()
            return (x * y + z[order] * noisy).sin().sum() + w[picked].exp().sum()

        return [*torch.autograd.grad(forward(), w), own.get_state()]

    check(body)


def test_seeds_set_inside() -> None:
    def body() -> Tensor:
        w = leaf(64)

        def forward() -> Tensor:
            torch.manual_seed(7)
            a = F.dropout(w * 2.0, 0.5).exp()
            with torch.random.fork_rng():
                torch.manual_seed(8)
                b = F.dropout(w * 3.0, 0.5).exp()
            return (a * b).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_running_statistics_are_updated_once() -> None:
    def body() -> list[Tensor]:
        norms = nn.Sequential(
            nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8, momentum=None), nn.Sigmoid()
        )
        x = constant(16, 8)
        for _ in range(3):
            (norms(x * 2.0).exp() * x).sum().backward()
        return [*norms.buffers(), *(p.grad for p in norms.parameters())]

    check(body)


def test_default_dtype_and_threads_changed_before_backward() -> None:
    def body() -> Tensor:
        w = leaf(256, 64)
        x = constant(64, 256)

        def forward() -> Tensor:
            y = (x @ w).mul(0.1).softmax(-1).pow(2)
            return (y.sum(0).sqrt() * torch.linspace(0, 1, 64) * torch.full((64,), 0.3)).exp().sum()

        loss = forward()
        torch.set_default_dtype(torch.float64)
        try:
            return torch.autograd.grad(loss, w)[0]
        finally:
            torch.set_default_dtype(torch.float32)

    check(body)


def test_full_reductions_are_replayed_with_the_threads_they_had() -> None:
    """The bits of a full reduction depend on the number of threads."""

    def body() -> Tensor:
        w = leaf(512, 512)

        def forward() -> Tensor:
            return (w * (w.detach() * 1.01).norm().exp().log()).sum()

        torch.set_num_threads(2)
        loss = forward()
        torch.set_num_threads(1)
        return torch.autograd.grad(loss, w)[0]

    check(body)

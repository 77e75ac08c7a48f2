"""Backward under `torch.func.vmap` or with batched gradients: what is made again was made outside of that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.faults.harness import N, Step, check, constant, in_every_way, leaf
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(120)

Loss = Callable[[Tensor], Tensor]
BATCH = 4


def _losses(w: Tensor) -> Tensor:
    """One for each quarter of the rows, with everything behind it that a replay may meet."""
    h = F.dropout(w * 1.5, 0.3).tanh()
    h = F.rrelu(h @ w, training=True) * 0.5
    h = h.clone().mul_(0.5).exp()
    return (h * torch.rand_like(h)).sin().view(BATCH, -1).mean(1)


def by_batched_gradients(w: Tensor) -> list[Tensor]:
    losses = _losses(w)
    return list(torch.autograd.grad(losses, (w,), torch.eye(BATCH), is_grads_batched=True))


def by_vmap(w: Tensor) -> list[Tensor]:
    losses = _losses(w)
    gradient = torch.func.vmap(lambda c: torch.autograd.grad(losses, (w,), c, retain_graph=True))
    return list(gradient(torch.eye(BATCH)))


def by_vmap_with_randomness(w: Tensor) -> list[Tensor]:
    losses = _losses(w)
    gradient = torch.func.vmap(
        lambda c: torch.autograd.grad(losses, (w,), c, retain_graph=True), randomness="different"
    )
    return list(gradient(torch.eye(BATCH)))


def by_a_jacobian(w: Tensor) -> list[Tensor]:
    return [torch.autograd.functional.jacobian(_losses, w, vectorize=True)]


def by_a_hessian_of_a_layer(w: Tensor) -> list[Tensor]:
    def loss(x: Tensor) -> Tensor:
        return (F.dropout(x * 1.5, 0.3).tanh() @ x.exp()).square().mean()

    return [torch.autograd.functional.hessian(loss, w.detach()[:16, :16], vectorize=True)]


@pytest.mark.parametrize(
    "gradients",
    [
        by_batched_gradients,
        by_vmap,
        by_vmap_with_randomness,
        by_a_jacobian,
        by_a_hessian_of_a_layer,
    ],
    ids=lambda f: f.__name__,
)
@in_every_way
def test_what_is_made_again_is_made_outside_of_the_transform(mode: str, gradients) -> None:
    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            return [each.detach().clone() for each in gradients(w)]

        return step

    check(program, mode)


def test_a_jacobian_of_a_transformer_layer() -> None:
    def program() -> Step:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        x = constant(2, 8, 32)

        def step(k: int) -> list[Tensor]:
            function = lambda a: layer(a).mean((1, 2))  # noqa: E731
            return [torch.autograd.functional.jacobian(function, x, vectorize=True)]

        return step

    check(program, "drop_all")

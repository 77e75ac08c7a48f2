"""The many ways to run backward: twice, in parts, on other threads, of gradients."""

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


def test_retain_graph() -> None:
    def body() -> list[Tensor]:
        w = leaf(64)

        def forward() -> Tensor:
            return F.dropout((w * 2.0).exp(), 0.5).sin().sum()

        loss = forward()
        return [torch.autograd.grad(loss, w, retain_graph=keep)[0] for keep in (True, True, False)]

    check(body)


def test_double_backward() -> None:
    def body() -> list[Tensor]:
        w = leaf(16, 8)
        x = leaf(4, 16, seed=1)

        def forward() -> Tensor:
            return torch.tanh((x * 1.5) @ w).pow(2).sum()

        (first,) = torch.autograd.grad(forward(), x, create_graph=True)
        penalty = (first.norm(dim=1) - 1).pow(2).sum()
        first = first.detach()
        second = torch.autograd.grad(penalty, [w, x], create_graph=True)
        third = torch.autograd.grad(sum(s.sin().sum() for s in second), w)
        return [first, *second, *third]

    check(body)


def test_parts_of_a_graph() -> None:
    def body() -> list[Tensor]:
        w = leaf(64)

        def forward() -> list[Tensor]:
            trunk = (w * 2.0).exp()
            return [trunk.sin().sum(), trunk.cos().sum(), (trunk * trunk).sum()]

        a, b, c = forward()
        first = torch.autograd.grad(a, w, retain_graph=True)[0]
        del a
        second = torch.autograd.grad(b + c, w)[0]
        return [first, second]

    check(body)


def test_gradient_accumulation() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            optimizer.zero_grad(set_to_none=step == 0)
            for micro in range(3):
                model(constant(8, 16, seed=micro)).square().mean().backward()
            optimizer.step()
        return [*model.parameters(), *(p.grad for p in model.parameters())]

    check(body)


def test_several_forwards_before_their_backwards() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))
        losses = [model(constant(8, 16, seed=k)).square().mean() for k in range(3)]
        for loss in reversed(losses):
            loss.backward()
        return [p.grad for p in model.parameters()]

    check(body)


def test_forwards_without_backward() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))
        for k in range(3):
            model(constant(8, 16, seed=k)).square().mean()
        with torch.no_grad():
            model(constant(8, 16))
        with torch.inference_mode():
            model(constant(8, 16))
        model(constant(8, 16)).square().mean().backward()
        return [p.grad for p in model.parameters()]

    check(body)


def test_tensors_from_inference_mode() -> None:
    def body() -> Tensor:
        w = leaf(64)
        with torch.inference_mode():
            table = constant(64).exp()

        def forward() -> Tensor:
            return (w * 2.0).exp().add(table).tanh().sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_scaled_and_clipped_gradients() -> None:
    def body() -> list[Tensor]:
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(constant(8, 16, seed=step)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        return [*losses, *model.parameters()]

    check(body)


def test_nested_autocast() -> None:
    def body() -> list[Tensor]:
        a, b = leaf(16, 16), leaf(16, 16, seed=1)

        def forward() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = (a * 2.0) @ b
                with torch.autocast("cpu", enabled=False):
                    y = (x.float() @ a).softmax(-1)
                z = F.layer_norm(x @ b, [16])
            return (y * z.float()).exp().sum()

        return list(torch.autograd.grad(forward(), [a, b]))

    check(body)

"""The geometry of what is saved: views, strides, zero sizes, dtypes, layouts."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.edge.harness import (
    check,
    constant,
    leaf,
)
from tests.support.fixtures import one_thread  # noqa: F401


def test_expanded_strided_and_reinterpreted_views() -> None:
    def body() -> Tensor:
        w = leaf(6)

        def forward() -> Tensor:
            a = (w * 1.0).exp()
            expanded = a.expand(5, 6)
            overlapping = a.as_strided((3, 4), (1, 1))
            bits = a.detach().view(torch.int32).bitwise_and(1).float()
            return (
                (expanded * expanded).sum() + (overlapping * overlapping).sum() + (a * bits).sum()
            )

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_offsets_transposes_and_negative_bits() -> None:
    def body() -> list[Tensor]:
        w = torch.randn(6, 8, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
        w.requires_grad_()

        def forward() -> Tensor:
            a = w * 2.0
            b = a.conj().t()[1:, ::2] @ a[::2]
            c = a.conj().imag * a.real
            return b.abs().sum() + c.sum()

        return list(torch.autograd.grad(forward(), w))

    check(body)


def test_memory_formats() -> None:
    def body() -> list[Tensor]:
        conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        x = constant(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)

        def forward() -> Tensor:
            return conv(F.gelu(x * 1.5)).sigmoid().sum()

        gradients = torch.autograd.grad(forward(), list(conv.parameters()))
        assert gradients[0].is_contiguous(memory_format=torch.channels_last)
        return list(gradients)

    check(body)


def test_one_storage_saved_many_times() -> None:
    def body() -> Tensor:
        w = leaf(8, 8)

        def forward() -> Tensor:
            a = w * 2.0
            return (a * a + a.t() * a + a[:4].repeat(2, 1) * a.view(64).view(8, 8)).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_set_and_resize() -> None:
    def body() -> Tensor:
        w = leaf(4)

        def forward() -> Tensor:
            a, b = torch.ones(4), torch.full((4,), 7.0)
            a.set_(b)
            c = a * 2
            r = torch.ones(2)
            r.resize_(4).fill_(3.0)
            d = torch.empty(0)
            torch.add(b, c, out=d)
            return (w * c * r * d).sin().sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_results_written_to_out_arguments() -> None:
    def body() -> Tensor:
        w = leaf(8, 8)

        def forward() -> Tensor:
            buffer = torch.zeros(4, 8, 8)
            with torch.no_grad():
                torch.mul(w, 2.0, out=buffer[1])
                torch.matmul(w, buffer[1], out=buffer[2])
                values, indices = torch.empty(8), torch.empty(8, dtype=torch.int64)
                torch.max(buffer[2], 1, out=(values, indices))
            return (w * buffer[2]).sum() + (w.gather(1, indices[:, None]) * values[:, None]).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_an_op_that_throws_in_place() -> None:
    def body() -> Tensor:
        w = leaf(6)

        def forward() -> Tensor:
            a = torch.ones(3)
            with contextlib.suppress(RuntimeError):
                a.add_(torch.ones(4))
            return (w * a.repeat(2)).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_lists_of_tensors() -> None:
    def body() -> list[Tensor]:
        parameters = [leaf(16, seed=k) for k in range(3)]

        def forward() -> Tensor:
            with torch.no_grad():
                copies = [p * 1 for p in parameters]
                r = list(torch._foreach_exp(copies))
                torch._foreach_mul_(r, 2.0)
                s = torch._foreach_mul(r, copies)
                torch._foreach_add_(r, s, alpha=0.5)
            joined = torch.stack(r).unbind()
            return sum((p * a * b).sum() for p, a, b in zip(parameters, joined, s, strict=True))

        return list(torch.autograd.grad(forward(), parameters))

    check(body)


def test_split_chunk_and_other_outputs_that_share() -> None:
    def body() -> Tensor:
        w = leaf(12, 4)

        def forward() -> Tensor:
            q, k, v = (w * 3.0).chunk(3)
            s = torch.unsafe_split(q.exp(), 2)
            values, indices = (k * 2).topk(2)
            return (q @ k.t() @ v).sum() + (s[0] * s[1]).sum() + (values * indices).sum()

        return torch.autograd.grad(forward(), w)[0]

    check(body)


def test_wrapped_numbers() -> None:
    def body() -> list[Tensor]:
        w = leaf(16)
        half = torch.randn(16, dtype=torch.bfloat16).requires_grad_()

        def forward() -> Tensor:
            counts = torch.arange(16)
            a = w * (counts * 0.5)
            b = (1 - w).pow(2) * (counts / 3 + True)
            c = w.mean() * 0.3
            d = (half * 0.1).exp() * half
            e = torch.where(counts > 7, w, 0.25) * torch.clamp(w, min=-0.5)
            return a.sum() + b.sum() + (w * c).sum() + d.float().sum() + e.sum()

        return list(torch.autograd.grad(forward(), [w, half]))

    check(body)


def test_sparse_gradients_and_operands() -> None:
    def body() -> list[Tensor]:
        embedding = nn.Embedding(10, 4, sparse=True)
        matrix = torch.eye(4).to_sparse()

        def forward() -> Tensor:
            x = embedding(torch.tensor([1, 3, 3, 7])) * 2.0
            return torch.sparse.mm(matrix, x).exp().sum()

        forward().backward()
        assert embedding.weight.grad.is_sparse
        return [embedding.weight.grad.coalesce().to_dense()]

    check(body)

"""Ops with an operand of a tensor subclass: the subclass decides what comes out; the op alone is no recipe for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tests.faults.harness import (
    N,
    Step,
    by_dropping,
    check,
    constant,
    in_every_way,
    leaf,
    taken,
)
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(60)

SCALE = 0.5


class ScaledWeight(Tensor):
    """Over the memory of a plain tensor, and stands for half of it."""

    @staticmethod
    def __new__(cls, data: Tensor) -> ScaledWeight:
        return Tensor._make_subclass(cls, data, data.requires_grad)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(t: ScaledWeight) -> Tensor:
            with torch._C._DisableTorchDispatch():
                return t.as_subclass(Tensor) * SCALE if func in cls.computing else t.detach()

        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            with torch._C._DisableTorchDispatch():
                return Tensor._make_subclass(cls, func(args[0].as_subclass(Tensor)), False)
        args, kwargs = tree_map_only(cls, plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    aten = torch.ops.aten
    computing = {
        aten.mm.default,
        aten.addmm.default,
        aten.mul.Tensor,
        aten.mul_.Tensor,
        aten.add.Tensor,
        aten.cat.default,
        aten.where.self,
        aten.copy_.default,
        aten.exp.default,
        aten.embedding.default,
        aten.convolution.default,
        aten.mul.out,
    }


class HalfWeight(Tensor):
    """Without memory of its own: wraps a tensor in half precision, as quantized weights do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> HalfWeight:
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=torch.float32,
            device=inner.device,
            requires_grad=False,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default):
            return cls(func(args[0].inner))
        args, kwargs = tree_map_only(cls, lambda t: t.inner.float(), (args, kwargs or {}))
        return func(*args, **kwargs)


def scaled(*sizes: int) -> Tensor:
    return ScaledWeight(constant(*sizes, seed=5))


def wrapped(*sizes: int) -> Tensor:
    return HalfWeight(constant(*sizes, seed=5).half())


Make = Callable[..., Tensor]
Use = Callable[[Tensor, Tensor], Tensor]


def _matmul(h: Tensor, w: Tensor) -> Tensor:
    return h @ w


def _matmul_from_the_left(h: Tensor, w: Tensor) -> Tensor:
    return w @ h


def _linear(h: Tensor, w: Tensor) -> Tensor:
    return F.linear(h, w, constant(N, seed=6))


def _times(h: Tensor, w: Tensor) -> Tensor:
    return h * w


def _joined(h: Tensor, w: Tensor) -> Tensor:
    return torch.cat([h.detach(), w, h.detach()])[N // 2 : N // 2 + N] * h


def _chosen(h: Tensor, w: Tensor) -> Tensor:
    return torch.where(h.detach() > 1, w * h.detach(), h) * torch.where(h.detach() > 1, h, w)


def _batched(h: Tensor, w: Tensor) -> Tensor:
    return torch.stack([h, h.tanh()]).matmul(w).sum(0)


@pytest.mark.parametrize("make", [scaled, wrapped], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "use",
    [_matmul, _matmul_from_the_left, _linear, _times, _joined, _chosen, _batched],
    ids=lambda f: f.__name__,
)
@by_dropping
def test_an_operand_of_a_subclass(mode: str, use: Use, make: Make) -> None:
    """The result is plain, saved, let go of, and read again by backward."""

    def program() -> Step:
        x = leaf(N, N)
        w = make(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = use((x * 1.5).exp(), w)
                y = h * h
                del h
                return y.sin().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(x)]

        return step

    check(program, mode)


@pytest.mark.parametrize("make", [scaled, wrapped], ids=lambda f: f.__name__)
@in_every_way
def test_a_result_of_which_only_what_follows_is_saved(mode: str, make: Make) -> None:
    """The recipe of what is saved goes through an op with such an operand, two ops back."""

    def program() -> Step:
        x = leaf(N, N)
        w = make(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                with torch.no_grad():
                    gate = ((x @ w) * 1.5).sigmoid()
                return (x * gate).exp().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(x)]

        return step

    check(program, mode)


@pytest.mark.parametrize("make", [scaled, wrapped], ids=lambda f: f.__name__)
@by_dropping
def test_a_plain_tensor_written_with_such_an_operand(mode: str, make: Make) -> None:
    """In place, by copy_, into a part, and by an out argument."""

    def program() -> Step:
        x = leaf(N, N)
        w = make(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                with torch.no_grad():
                    gate = x * 0.5
                    gate.mul_(w)
                    copied = torch.zeros(N, N)
                    copied.copy_(w)
                    part = torch.ones(2 * N, N)
                    part[:N].mul_(w)
                    out = torch.empty(N, N)
                    torch.mul(x, w, out=out)
                y = (x * gate).exp() + x * copied.sin() + x * part[N // 2 : N // 2 + N].tanh()
                return (y * (x * out.exp())).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(x)]

        return step

    check(program, mode)


@by_dropping
def test_a_parameter_of_a_subclass_that_trains(mode: str) -> None:
    """Steps of an optimizer write it; each forward must see the weights of its step."""

    class Doubled(Tensor):
        """A parameter whose products count twice; the gradient and all other ops are plain."""

        @staticmethod
        def __new__(cls, data: Tensor) -> Doubled:
            return Tensor._make_subclass(cls, data, data.requires_grad)

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with torch._C._DisableTorchDispatch():
                result = func(
                    *tree_map_only(cls, lambda t: t.as_subclass(Tensor), args), **(kwargs or {})
                )
                if func is torch.ops.aten.detach.default:
                    return Tensor._make_subclass(cls, result, False)
                if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                    return result * 2.0
                return result

    def program() -> Step:
        weight = nn.Parameter(Doubled(constant(N, N, seed=2)), requires_grad=True)
        other = leaf(N, N, seed=3)
        optimizer = torch.optim.SGD([weight, other], lr=0.5, momentum=0.9)
        x = constant(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = (x @ other).tanh() @ weight
                return (h * h).exp().sin().mean()

            optimizer.zero_grad()
            loss = forward()
            loss.backward()
            optimizer.step()
            with torch._C._DisableTorchDispatch():
                plain = weight.as_subclass(Tensor).detach().clone()
            return [loss.detach(), other.detach(), plain]

        return step

    check(program, mode, steps=4)


@by_dropping
def test_an_operand_that_changes_between_uses(mode: str) -> None:
    """The subclass has a state of its own, which is no tensor: the same call gives another result later."""

    class Counting(Tensor):
        calls = 0

        @staticmethod
        def __new__(cls, data: Tensor) -> Counting:
            return Tensor._make_subclass(cls, data, False)

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with torch._C._DisableTorchDispatch():
                result = func(
                    *tree_map_only(cls, lambda t: t.as_subclass(Tensor), args), **(kwargs or {})
                )
                if func is torch.ops.aten.mm.default:
                    cls.calls += 1
                    return result * float(cls.calls)
                return result

    def program() -> Step:
        x = leaf(N, N)
        w = Counting(constant(N, N, seed=5))

        def step(k: int) -> list[Tensor]:
            Counting.calls = k

            def forward() -> Tensor:
                h = x
                for _ in range(3):
                    h = ((h * 1.5) @ w).tanh() * (h @ w)
                return h.exp().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(x)]

        return step

    check(program, mode)


@by_dropping
def test_a_subclass_without_dispatch_is_an_ordinary_operand(mode: str) -> None:
    """A subclass of Python alone, and one with __torch_function__: what they run are plain ops, and is rebuilt."""

    class Named(Tensor):
        pass

    class Softened(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            args = tree_map_only(cls, lambda t: t.as_subclass(Tensor), args)
            result = func(*args, **(kwargs or {}))
            if func in (Tensor.matmul, torch.matmul):
                result = result * 0.5
            return result

    def program() -> Step:
        x = leaf(N, N)
        a = constant(N, N, seed=5).as_subclass(Named)
        b = constant(N, N, seed=6).as_subclass(Softened)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = (x.exp() @ a).as_subclass(Tensor) * 1.5
                h = h * h
                h = torch.matmul(h, b).tanh()
                return (h * h.sin()).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(x)]

        return step

    check(program, mode)


@by_dropping
def test_a_subclass_made_and_left_within_forward(mode: str) -> None:
    """Plain tensor in, subclass for one op, plain tensor out again, over memory that forward made itself."""

    def program() -> Step:
        x = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                with torch.no_grad():
                    gate = ScaledWeight((x * 0.5).exp())
                    product = x @ gate
                    del gate
                    product = product * 1.5
                return (x * product).sin().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(x)]

        return step

    check(program, mode)


@by_dropping
def test_sequences_of_different_lengths(mode: str) -> None:
    """Jagged nested tensors of torch itself: their inner values are plain and go on into plain ops."""

    def program() -> Step:
        x = leaf(2 * N, N)
        offsets = torch.tensor([0, N // 2, N, 2 * N])
        w = leaf(N, N, seed=1)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                jagged = torch.nested.nested_tensor_from_jagged((x * 1.5).exp(), offsets)
                h = (jagged @ w).sin().values()
                y = h * h
                del h, jagged
                return y.exp().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(x, w)]

        return step

    check(program, mode)


@by_dropping
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("written", [False, True])
def test_strided_nested_tensors(mode: str, written: bool) -> None:
    """They have a storage and no sizes. What is written through one is the memory of plain tensors too."""

    def program() -> Step:
        x, w = leaf(2 * N, N), leaf(N, N, seed=1)
        sizes = torch.tensor([[N // 2, N], [3 * N // 2, N]])
        strides, offsets = torch.tensor([[N, 1], [N, 1]]), torch.tensor([0, N * N // 2])

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = x * 1.5
                nested = torch._nested_view_from_buffer(h.view(-1), sizes, strides, offsets)
                if written:
                    of_same_memory = h.detach().view(-1)
                    torch._nested_view_from_buffer(of_same_memory, sizes, strides, offsets).mul_(3)
                rows = torch.nested.as_nested_tensor([*nested.unbind()])
                padded = (rows @ torch.nested.as_nested_tensor([w, w])).to_padded_tensor(0.0)
                y = padded * padded + rows.sin().to_padded_tensor(0.0)
                z = h.sin().exp()
                del h, nested, rows, padded
                return y.exp().mean() + z.mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(x, w)]

        return step

    check(program, mode)

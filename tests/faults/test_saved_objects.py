"""What ctx.saved_tensors gives back is the object that was saved, with all that Python has hung on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.faults.harness import N, Step, check, constant, leaf, taken
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(60)

modes = pytest.mark.parametrize("mode", ["drop_all", "random", "swap_all", "off", "budget"])


def _layer(backward: Any) -> type[torch.autograd.Function]:
    """x @ w, of which `backward` makes the gradients from (gradient, x, w)."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            ctx.save_for_backward(x, w)
            return x @ w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return backward(grad, *ctx.saved_tensors)

    return Layer


def _training(layer: type[torch.autograd.Function], make: Any) -> Any:
    """Three such layers among ordinary ones; `make` makes their weights."""

    def program() -> Step:
        weights = [make(i) for i in range(3)]
        first = leaf(N, N, seed=9)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = constant(N, N, seed=k) @ first
                for w in weights:
                    h = layer.apply(h.tanh(), w)
                return h.square().mean()

            loss = forward()
            loss.backward()
            sums = [getattr(w, "main_grad", None) for w in weights]
            for w in weights:
                w.grad = None
            return [loss.detach(), *sums, *taken(first)]

        return step

    return program


def _with_main_grad(i: int) -> Tensor:
    weight = nn.Parameter(constant(N, N, seed=i))
    weight.main_grad = torch.zeros(N, N, dtype=torch.float64)
    return weight


@modes
def test_gradients_accumulated_into_an_attribute_of_the_weight(mode: str) -> None:
    """Fused accumulation as in Megatron: backward finds `main_grad` on the weight that it saved."""

    def backward(grad: Tensor, x: Tensor, w: Tensor) -> Any:
        w.main_grad.add_(x.t() @ grad)
        return grad @ w.t(), None

    check(_training(_layer(backward), _with_main_grad), mode, may_be_kept=mode == "off")


@modes
def test_a_hook_and_a_flag_on_the_weight(mode: str) -> None:
    """Attributes of several kinds, one of which backward itself sets for the next step."""

    def backward(grad: Tensor, x: Tensor, w: Tensor) -> Any:
        factor = w.scale(w.seen) if w.wanted else 1.0
        w.seen = w.seen + 1
        w.main_grad = w.main_grad + x.t() @ grad * factor
        return grad @ w.t(), None

    def make(i: int) -> Tensor:
        weight = _with_main_grad(i)
        weight.seen, weight.wanted = 0, i != 1
        weight.scale = lambda seen: 1.0 + 0.5 * seen
        return weight

    check(_training(_layer(backward), make), mode, may_be_kept=mode == "off")


@modes
def test_the_weight_itself(mode: str) -> None:
    """A table by identity, and a test of what it is: a Parameter, a leaf, one that wants a gradient."""
    table: dict[int, Tensor] = {}

    def backward(grad: Tensor, x: Tensor, w: Tensor) -> Any:
        assert isinstance(w, nn.Parameter), f"a {type(w).__name__}"
        assert w.is_leaf and w.requires_grad
        table[id(w)].add_(x.t() @ grad)
        return grad @ w.t(), None

    def make(i: int) -> Tensor:
        weight = _with_main_grad(i)
        table[id(weight)] = weight.main_grad
        return weight

    check(_training(_layer(backward), make), mode, may_be_kept=mode == "off")


@modes
def test_a_parameter_of_a_class_of_its_own(mode: str) -> None:
    class Counted(nn.Parameter):
        def add_main_grad(self, grad: Tensor) -> None:
            self.main_grad = self.main_grad + grad

    def backward(grad: Tensor, x: Tensor, w: Tensor) -> Any:
        w.add_main_grad(x.t() @ grad)
        return grad @ w.t(), None

    def make(i: int) -> Tensor:
        weight = Counted(constant(N, N, seed=i))
        weight.main_grad = torch.zeros(N, N)
        return weight

    check(_training(_layer(backward), make), mode, may_be_kept=mode == "off")


@pytest.mark.xfail(reason="only leaves that want a gradient are given back themselves")
@modes
def test_a_buffer_with_an_attribute(mode: str) -> None:
    """A leaf that wants no gradient, such as the scale of quantized weights."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, table: Tensor) -> Tensor:
            ctx.save_for_backward(x, table)
            return (x * table).tanh()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, table = ctx.saved_tensors
            y = (x * table).tanh()
            table.uses.append(1)
            return grad * (1 - y * y) * table * table.factor, None

    def program() -> Step:
        w, table = leaf(N, N), constant(N, N)
        table.factor, table.uses = 0.5, []

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = Scaled.apply(w * 1.5, table)
                return (h * h).exp().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), torch.tensor(len(table.uses)), *taken(w)]

        return step

    check(program, mode, may_be_kept=mode == "off")


@pytest.mark.xfail(reason="only leaves that want a gradient are given back themselves")
@modes
def test_an_intermediate_with_an_attribute(mode: str) -> None:
    """What forward made and put a number on, as recipes of low precision do; ordinarily backward finds it there."""

    class Descaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin() * x.factor

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return grad * x.cos() * x.factor

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = w * 1.5
                h.factor = 0.5 + k
                return Descaled.apply(h).exp().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, may_be_kept=mode == "off")


@modes
def test_the_node_of_what_was_saved(mode: str) -> None:
    """A saved result knows its node, and a saved operand of another node knows that one: double backward needs it."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = x * x
            ctx.save_for_backward(x, out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, out = ctx.saved_tensors
            assert x.grad_fn is not None and out.grad_fn is not None
            return grad * 2 * x + 0 * out

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def first() -> Tensor:
                loss = Squared.apply((w * 1.5).exp()).sin().mean()
                (g,) = torch.autograd.grad(loss, w, create_graph=True)
                return g

            penalty = first().square().sum()
            penalty.backward()
            return [penalty.detach(), *taken(w)]

        return step

    check(program, mode, may_be_kept=mode == "off")

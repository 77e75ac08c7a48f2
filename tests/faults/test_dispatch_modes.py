"""Modes that see every op and may change its result: what they made is not what the op alone would make again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

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

aten = torch.ops.aten


class Mode(TorchDispatchMode):
    """Runs each op, then `change` on what it returned."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.change(func, func(*args, **(kwargs or {})))

    def change(self, func: Any, result: Any) -> Any:
        return result


class Round(Mode):
    """Matrix products in the precision of bfloat16, as an emulation of other hardware does."""

    def change(self, func: Any, result: Any) -> Any:
        if func in (aten.mm.default, aten.addmm.default):
            return result.bfloat16().float()
        return result


class Noise(Mode):
    """Adds noise to products, as an emulation of analog hardware does."""

    def change(self, func: Any, result: Any) -> Any:
        if func in (aten.mm.default, aten.addmm.default):
            return result + 0.01 * torch.randn_like(result)
        return result


class ScaleInPlace(Mode):
    """Changes the result where it lies."""

    def change(self, func: Any, result: Any) -> Any:
        if func in (aten.mm.default, aten.addmm.default, aten.sin.default):
            return result.mul_(1.25)
        return result


class CopyViews(Mode):
    """Makes copies where the op would give a view, and rounds them."""

    def change(self, func: Any, result: Any) -> Any:
        if func in (aten.view.default, aten.t.default, aten.transpose.int):
            return result.bfloat16().float()
        return result


class EverySecond(Mode):
    """Changes every second product: the same op on the same operands has two results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def change(self, func: Any, result: Any) -> Any:
        if func in (aten.mm.default, aten.addmm.default):
            self.calls += 1
            if self.calls % 2:
                return result * 0.5
        return result


class Instead(TorchDispatchMode):
    """Runs another op than the one that was called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.tanh.default:
            return torch.sigmoid(*args)
        if func is aten.sin.default:
            return torch.cos(args[0]) * 0.5
        return func(*args, **(kwargs or {}))


class ChangedOperands(TorchDispatchMode):
    """Runs the op on other operands: a smaller batch of weights, as fake quantization does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default):
            args = tree_map_only(Tensor, lambda t: (t * 64).round() / 64, args)
        return func(*args, **(kwargs or {}))


class Remembered(TorchDispatchMode):
    """Returns a product that was made long ago, whatever the operands are now."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.mm.default, aten.addmm.default):
            rows, columns = args[-2].shape[0], args[-1].shape[1]
            return constant(rows, columns, seed=7)
        return func(*args, **(kwargs or {}))


CHANGING = [
    Round,
    Noise,
    ScaleInPlace,
    CopyViews,
    EverySecond,
    Instead,
    ChangedOperands,
    Remembered,
]


def _square_step(context: Callable[[], Any]) -> Callable[[], Step]:
    """x @ w under the mode, squared, with ordinary ops before and after it."""

    def program() -> Step:
        w = leaf(N, N)
        x = constant(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                before = (w * 1.5).exp()
                with context():
                    h = x @ before
                    y = h * h
                    del h
                    z = torch.tanh(y.t()) * y.sin()
                return (z.exp() * z).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    return program


@pytest.mark.parametrize("changing", CHANGING, ids=lambda c: c.__name__)
@in_every_way
def test_a_mode_that_changes_results_in_a_part_of_forward(mode: str, changing: Any) -> None:
    check(_square_step(changing), mode)


@pytest.mark.parametrize("changing", CHANGING, ids=lambda c: c.__name__)
def test_a_mode_that_changes_results_in_all_of_forward(changing: Any) -> None:
    def program() -> Step:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(N, N), nn.Tanh(), nn.Dropout(0.2), nn.Linear(N, N), nn.GELU(), nn.Linear(N, 8)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(k: int) -> list[Tensor]:
            with changing():
                loss = model(constant(N, N, seed=k)).sin().square().mean()
            loss.backward()
            optimizer.step()
            return [loss.detach(), *taken(*model.parameters()), *model.parameters()]

        return step

    check(program, "drop_all", may_be_kept=True)


@pytest.mark.parametrize("changing", [Round, Noise, ScaleInPlace], ids=lambda c: c.__name__)
@by_dropping
def test_a_mode_around_the_runtime(mode: str, changing: Any) -> None:
    """The runtime begins and ends under it, backward included."""
    check(_square_step(contextlib.nullcontext), mode, may_be_kept=True, around=changing)


@by_dropping
def test_two_modes_inside_each_other(mode: str) -> None:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with FlopCounterMode(display=False), Round(), ScaleInPlace():
            yield

    check(_square_step(both), mode)


@by_dropping
def test_a_mode_of_which_only_the_value_survives(mode: str) -> None:
    """What was made under it is the operand of ordinary ops, and is itself let go of."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def made() -> Tensor:
                with Round(), torch.no_grad():
                    return w @ w

            def forward() -> Tensor:
                h = made() * 1.5
                y = h.sin() * w
                del h
                return (y * y.exp()).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


@by_dropping
def test_a_mode_that_comes_and_goes_with_the_steps(mode: str) -> None:
    """The same ops in each step, under the mode in every second one: what held before does not hold now."""

    def program() -> Step:
        w = leaf(N, N)
        x = constant(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                with Round() if k % 2 else contextlib.nullcontext():
                    h = (x @ w).mul(1.5)
                    y = h * h
                return y.exp().sin().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=6)


@by_dropping
def test_a_mode_in_backward_only(mode: str) -> None:
    """What forward made was made without it, and comes back so."""

    def program() -> Step:
        w = leaf(N, N)
        x = constant(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = (x @ w).mul(1.5)
                return (h * h).exp().sin().mean()

            loss = forward()
            with Round(), ScaleInPlace():
                loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


@by_dropping
def test_a_mode_in_a_backward_that_is_recorded(mode: str) -> None:
    """Double backward: the first backward runs under the mode and saves what it made."""

    def program() -> Step:
        w, x = leaf(N, N), leaf(N, N, seed=1)

        def step(k: int) -> list[Tensor]:
            def first() -> Tensor:
                out = torch.tanh((x * 1.5).tanh() @ w).pow(2).sum()
                with Round(), Noise():
                    (g,) = torch.autograd.grad(out, x, create_graph=True)
                return (g.sin() * w).exp()

            loss = first().square().sum()
            loss.backward()
            return [loss.detach(), *taken(w, x)]

        return step

    check(program, mode)


class SinIsCos(TorchFunctionMode):
    """One level higher: it sees the Python functions, and what it runs instead are ordinary ops."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.sin, Tensor.sin):
            return torch.cos(*args) * 0.5
        result = func(*args, **(kwargs or {}))
        return result.bfloat16().float() if func in (torch.matmul, Tensor.matmul) else result


@pytest.mark.parametrize("where", ["part", "around"])
@in_every_way
def test_a_function_mode_that_changes_results(mode: str, where: str) -> None:
    if where == "part":
        check(_square_step(SinIsCos), mode)
    else:
        check(_square_step(contextlib.nullcontext), mode, around=SinIsCos, may_be_kept=True)


@pytest.mark.parametrize(
    "looking",
    [lambda: FlopCounterMode(display=False), Mode, lambda: torch.device("cpu")],
    ids=["flop_counter", "plain_mode", "default_device"],
)
@by_dropping
def test_a_mode_that_only_looks(mode: str, looking: Callable[[], Any]) -> None:
    check(_square_step(looking), mode)


@by_dropping
def test_shapes_found_out_under_a_fake_mode(mode: str) -> None:
    """A dry run on tensors without memory in the middle of forward, as tools that estimate memory do."""

    def program() -> Step:
        w = leaf(N, N)
        x = constant(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = (x @ w).mul(1.5)
                with FakeTensorMode() as fake:
                    dry = fake.from_tensor(x) @ fake.from_tensor(x).exp()
                    dry = (dry * dry).sum(1)
                    rows = dry.shape[0]
                return (h * h).exp().sin().sum() / rows

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


@by_dropping
def test_a_mode_that_writes_elsewhere(mode: str) -> None:
    """It counts in a buffer that forward reads: in place, under the op that it looks at."""

    class Counting(Mode):
        def __init__(self, seen: Tensor) -> None:
            super().__init__()
            self.seen = seen

        def change(self, func: Any, result: Any) -> Any:
            if func is aten.sin.default:
                self.seen.add_(1.0)
            return result

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            seen = torch.zeros(N, N)

            def forward() -> Tensor:
                total = torch.zeros(())
                with Counting(seen):
                    for _ in range(3):
                        total = total + (w.sin() * (seen * 2.0)).mean()
                return total

            loss = forward()
            loss.backward()
            return [loss.detach(), seen, *taken(w)]

        return step

    check(program, mode)


@by_dropping
def test_a_mode_inside_a_custom_function(mode: str) -> None:
    class RoundedProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            with Round():
                out = a @ b
            ctx.save_for_backward(a, b, out)
            return out.sigmoid()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            a, b, out = ctx.saved_tensors
            s = out.sigmoid()
            grad = grad * s * (1 - s)
            return grad @ b.t(), a.t() @ grad

    def program() -> Step:
        w, v = leaf(N, N), leaf(N, N, seed=1)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = RoundedProduct.apply(w * 1.5, v.exp())
                return F.gelu(h * h).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w, v)]

        return step

    check(program, mode)

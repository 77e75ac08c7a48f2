"""What backward is given is checked as autograd checks it: who changes it is found out by the next one who needs it.

Under every policy, "off" included: the hooks alone take autograd's own check away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.faults.harness import N, Step, check, constant, in_thread, leaf, taken
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(60)

modes = pytest.mark.parametrize("mode", ["drop_all", "random", "swap_all", "mix", "off"])

some_modes = pytest.mark.parametrize("mode", ["drop_all", "mix", "off"])

Change = Callable[[Tensor], object]


def scaled(x: Tensor) -> None:
    x.mul_(2)


def a_view_of_it(x: Tensor) -> None:
    x[1:].zero_()


def a_detached_alias(x: Tensor) -> None:
    x.detach().add_(1)


def transposed_in_place_and_written(x: Tensor) -> None:
    x.t().fill_(0.5)


def as_an_out_argument(x: Tensor) -> None:
    torch.exp(torch.zeros_like(x), out=x)


def in_a_list(x: Tensor) -> None:
    torch._foreach_mul_([x], 2.0)


def on_another_thread(x: Tensor) -> None:
    in_thread(lambda: x.mul_(2))


CHANGES = [
    scaled,
    a_view_of_it,
    a_detached_alias,
    transposed_in_place_and_written,
    as_an_out_argument,
    in_a_list,
    on_another_thread,
]
by_every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)


def changing(change: Change) -> type[torch.autograd.Function]:
    """sin, whose backward changes what it has saved after it has used it."""

    class Changing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            result = grad * x.cos()
            with torch.no_grad():
                change(x)
            return result

    return Changing


def _two_readers(change: Change, of: str = "value", first: str = "other") -> Callable[[], Step]:
    """A tensor is saved twice; the backward that comes first changes it."""

    def program() -> Step:
        w, v = leaf(N, N), leaf(N, N, seed=1)
        function = changing(change)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = w * 1.5 if of == "value" else w
                if first == "other":
                    y = h * v
                    return (y + function.apply(h)).exp().mean()
                y = function.apply(h)
                return (y + (h * v).tanh()).exp().mean()

            w.grad = v.grad = None
            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w, v)]

        return step

    return program


@by_every_change
@some_modes
def test_a_saved_value_changed_before_another_node_reads_it(mode: str, change: Change) -> None:
    check(_two_readers(change), mode, raises=True)


@modes
def test_a_saved_parameter_changed_before_another_node_reads_it(mode: str) -> None:
    check(_two_readers(scaled, of="leaf"), mode, raises=True, may_be_kept=True)


@modes
def test_a_saved_value_changed_by_its_last_reader(mode: str) -> None:
    """Nobody needs it any more: ordinarily no error, and here none either."""

    def program() -> Step:
        w, v = leaf(N, N), leaf(N, N, seed=1)
        function = changing(scaled)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = function.apply(w * 1.5)
                return (h * v).exp().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w, v)]

        return step

    check(program, mode, may_be_kept=mode == "off")


@by_every_change
@some_modes
def test_a_second_backward_over_the_same_graph(mode: str, change: Change) -> None:
    def program() -> Step:
        w = leaf(N, N)
        function = changing(change)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                return function.apply((w * 1.5).exp()).tanh().mean()

            w.grad = None
            loss = forward()
            loss.backward(retain_graph=True)
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, raises=True)


@modes
def test_saved_tensors_asked_for_twice_in_one_backward(mode: str) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            out = x.exp()
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ctx.saved_tensors[0].mul_(2)
            return grad * ctx.saved_tensors[0]

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                return Twice.apply(w * 1.5).tanh().mean()

            w.grad = None
            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, raises=True)


@modes
def test_a_saved_value_reached_through_its_node(mode: str) -> None:
    """`grad_fn._saved_self`, as tools read it, and changed there."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            w.grad = None
            y = (w * 1.5).sin()
            with torch.no_grad():
                y.grad_fn._saved_self.mul_(2)
            loss = y.mean()
            del y
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, raises=True, may_be_kept=True)  # it raises before anything is rebuilt


@modes
def test_a_hook_changes_what_a_later_node_needs(mode: str) -> None:
    """Forward's tensor is kept by the program, and a hook in backward writes to it."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            w.grad = None
            h = (w * 1.5).exp()
            y = h.sin()
            held = h.detach()
            y.register_hook(lambda g: held.zero_() and None)
            loss = y.tanh().mean()
            del h, y
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, raises=True)


@pytest.mark.parametrize("through", ["data", "numpy"])
@modes
def test_a_change_that_autograd_does_not_see_either(mode: str, through: str) -> None:
    """The next reader gets the changed content ordinarily; here that, or an error."""

    def unseen(x: Tensor) -> None:
        if through == "data":
            x.data.mul_(2)
        else:
            x.detach().numpy()[:] *= 2

    # By another way than the dispatcher nobody sees it; what has to be made again then is not what was changed.
    check(
        _two_readers(unseen),
        mode,
        steps=6,
        may_be_loud=through == "numpy",
        may_be_kept=mode == "off",
    )


@modes
def test_a_copy_that_backward_changes(mode: str) -> None:
    """No harm in that, and no error."""

    def copied(x: Tensor) -> None:
        x.clone().mul_(2)
        (x + 0).zero_()

    check(_two_readers(copied), mode, may_be_kept=mode == "off")


@modes
def test_accumulation_into_what_was_saved(mode: str) -> None:
    """A Function that accumulates into a saved buffer which is a leaf's gradient: no error, each time once."""

    class Accumulating(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            ctx.total = total
            return x.sin()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            (x,) = ctx.saved_tensors
            result = grad * x.cos()
            ctx.total.add_(result)
            return result, None

    def program() -> Step:
        w, total = leaf(N, N), constant(N, N) * 0

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = w * (1.5 + k)
                for _ in range(3):
                    h = Accumulating.apply(h, total)
                return (h * h).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), total, *taken(w)]

        return step

    check(program, mode, may_be_kept=mode == "off")

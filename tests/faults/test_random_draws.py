"""Random ops are rebuilt from a stream of their own: no other thread sees it, disturbs it, or gets a number twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.faults.harness import (
    N,
    Step,
    boundary,
    by_dropping,
    check,
    constant,
    in_every_way,
    leaf,
    taken,
    threads_running,
)
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(120)

TRIES = 6
"""Steps of a program in which a fault takes luck: a draw has to fall between two moments of a rebuild."""
BLOCK = 256

Draw = Callable[[Generator], Tensor]


def _uniform(generator: Generator) -> Tensor:
    return torch.rand(BLOCK, generator=generator)


def _order(generator: Generator) -> Tensor:
    return torch.randperm(BLOCK, generator=generator)


def _whole_numbers(generator: Generator) -> Tensor:
    return torch.empty(BLOCK, dtype=torch.int64).random_(0, 1 << 40, generator=generator)


def _mask(generator: Generator) -> Tensor:
    return torch.empty(BLOCK).bernoulli_(0.5, generator=generator)


class Draws:
    """Draws of other threads from one generator, and whether they are what that generator has to give.

    Each draw holds the generator's lock, so whichever thread drew, all blocks together must be the generator's stream.
    """

    def __init__(self, draw: Draw, generator: Generator, at_most: int = 3000) -> None:
        self.draw = draw
        self.generator = generator
        self.at_most = at_most
        self.blocks: list[bytes] = []

    def body(self, stop: threading.Event) -> None:
        while not stop.is_set() and len(self.blocks) < self.at_most:
            self.blocks.append(self.draw(self.generator).numpy().tobytes())

    @contextmanager
    def running(self, threads: int = 2) -> Iterator[None]:
        self.blocks.clear()
        self.before = self.generator.get_state()
        with threads_running(*[self.body] * threads):
            yield

    def faults(self) -> str:
        """What is wrong with the draws and the state after them, or ""."""
        reference = Generator()
        reference.set_state(self.before)
        wanted = [self.draw(reference).numpy().tobytes() for _ in self.blocks]
        wrong = len(set(wanted) - set(self.blocks))
        told = f"{wrong} of {len(wanted)} draws are not the generator's" if wrong else ""
        if not torch.equal(reference.get_state(), self.generator.get_state()):
            told += " and its state is not that after them"
        return told


def _deep_dropout() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        *(m for _ in range(6) for m in (nn.Linear(N, N), nn.Tanh(), nn.Dropout(0.3)))
    )


def _checked(draws: Draws, *results: Tensor) -> tuple[Tensor, ...]:
    """The results of a step whose draws are judged by themselves, since how many there were is luck."""
    told = draws.faults()
    torch.manual_seed(99)
    assert not told, told
    return results


@pytest.mark.parametrize(
    "draw", [_uniform, _order, _whole_numbers, _mask], ids=lambda d: d.__name__
)
def test_two_threads_draw_while_masks_are_rebuilt(draw: Draw) -> None:
    """In every step gradients are the ordinary ones, and the threads get each number of the stream once."""

    def program() -> Step:
        model = _deep_dropout()
        draws = Draws(draw, torch.default_generator)

        def step(k: int) -> Sequence[Tensor]:
            torch.manual_seed(k)
            loss = model(constant(N, N, seed=k)).square().mean()
            with draws.running():
                loss.backward()
            return _checked(draws, loss.detach(), *taken(*model.parameters()))

        return step

    check(program, "drop_all", steps=TRIES)


def test_a_thread_draws_from_a_generator_that_forward_used_too() -> None:
    def program() -> Step:
        model = nn.Linear(N, N)
        own = Generator()
        draws = Draws(_uniform, own)

        def step(k: int) -> Sequence[Tensor]:
            own.manual_seed(k)

            def forward() -> Tensor:
                h = constant(N, N)
                for _ in range(5):
                    h = model(h)
                    h = h * torch.empty_like(h).bernoulli_(0.7, generator=own)
                    h = h + torch.empty_like(h).normal_(generator=own) * h.tanh()
                return h.square().mean()

            loss = forward()
            with draws.running():
                loss.backward()
            return _checked(draws, loss.detach(), *taken(*model.parameters()))

        torch.manual_seed(3)
        model.reset_parameters()
        return step

    check(program, "drop_all", steps=TRIES)


def _rand_like(h: Tensor) -> Tensor:
    return h * torch.rand_like(h)


def _randn_like(h: Tensor) -> Tensor:
    return h + torch.randn_like(h).mul(h)


def _native_dropout(h: Tensor) -> Tensor:
    return torch.native_dropout(h, 0.3, True)[0]


def _rrelu(h: Tensor) -> Tensor:
    return F.rrelu(h, training=True)


def _randint_like(h: Tensor) -> Tensor:
    return h * torch.randint_like(h, 5)


@pytest.mark.parametrize(
    "op",
    [_rand_like, _randn_like, _native_dropout, _rrelu, _randint_like],
    ids=lambda f: f.__name__,
)
def test_a_thread_draws_while_ops_are_rebuilt_that_take_no_generator(
    op: Callable[[Tensor], Tensor],
) -> None:
    """Where a draw came in between, that is an error; the threads' own numbers are right in any case."""

    def program() -> Step:
        torch.manual_seed(3)
        model = nn.Linear(N, N)
        draws = Draws(_uniform, torch.default_generator)

        def step(k: int) -> Sequence[Tensor]:
            torch.manual_seed(k)

            def forward() -> Tensor:
                h = constant(N, N)
                for _ in range(5):
                    h = op(model(h)).tanh()
                return h.square().mean()

            model.zero_grad()  # a backward that raised may have left some
            loss = forward()
            with draws.running():
                loss.backward()
            return _checked(draws, loss.detach(), *taken(*model.parameters()))

        return step

    check(program, "drop_all", steps=TRIES, may_be_loud=True, may_be_kept=True)


def _dropout(h: Tensor) -> Tensor:
    return F.dropout(h, 0.3)


def _bernoulli(h: Tensor) -> Tensor:
    return h * torch.bernoulli(h.detach().sigmoid())


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda h: h.t(),
    "every other column": lambda h: h[:, ::2],
    "channels last": lambda h: h.view(4, 4, 32, 32).to(memory_format=torch.channels_last),
    "solved": lambda h: torch.linalg.solve(torch.eye(N) * 4, h),  # column by column
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "op",
    [_rand_like, _randn_like, _native_dropout, _dropout, _rrelu, _bernoulli, _randint_like],
    ids=lambda f: f.__name__,
)
def test_numbers_are_drawn_in_the_order_of_the_memory(
    op: Callable[[Tensor], Tensor], layout: str
) -> None:
    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> Sequence[Tensor]:
            torch.manual_seed(k)

            def forward() -> Tensor:
                return op(LAYOUTS[layout](w * 1.5)).tanh().square().mean()

            loss = forward()
            boundary()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all")


@pytest.mark.parametrize("op", [F.dropout, F.feature_alpha_dropout], ids=lambda f: f.__name__)
def test_a_thread_draws_while_forward_draws(op: Callable[..., Tensor]) -> None:
    """Which mask forward got is luck then; backward must use that one, or raise."""

    def program() -> Step:
        leaves = [leaf(32, 32, seed=i) for i in range(60)]
        draws = Draws(_uniform, torch.default_generator)

        def step(k: int) -> Sequence[Tensor]:
            torch.manual_seed(k)
            for w in leaves:
                w.grad = None
            seen: list[bytes] = []

            def forward() -> Tensor:
                total = torch.zeros(())
                for w in leaves:
                    ones = op((w * 0.0).exp(), 0.5, True)
                    seen.append((ones.detach() > 0.9).numpy().tobytes())
                    total = total + (ones * w.exp()).sum()
                return total

            with draws.running(2):
                loss = forward()
            loss.backward()
            del loss
            torch.manual_seed(99)
            used = []
            for w in leaves:
                # The slope of w.exp() is the mask, stretched, moved, and times something positive.
                slope = w.grad / w.detach().exp()
                used.append((slope > slope.mean()).numpy().tobytes())
            wrong = [i for i, (a, b) in enumerate(zip(seen, used, strict=True)) if a != b]
            assert not wrong, f"masks {wrong} of backward are not those of forward"
            return []

        return step

    check(program, "drop_all", steps=5 * TRIES, may_be_loud=True, may_be_kept=True)


def test_three_backwards_in_three_threads() -> None:
    """None of them draws anything, so the generator is where forward left it."""

    def program() -> Step:
        models = [_deep_dropout() for _ in range(3)]

        def step(k: int) -> list[Tensor]:
            torch.manual_seed(k)
            losses = [m(constant(N, N, seed=k + i)).square().mean() for i, m in enumerate(models)]
            bodies = [lambda _, loss=loss: loss.backward() for loss in losses]
            with threads_running(*bodies):
                pass
            return [
                *(loss.detach() for loss in losses),
                *(g for m in models for g in taken(*m.parameters())),
            ]

        return step

    check(program, "drop_all", steps=6)


def test_a_thread_reads_the_state_while_masks_are_rebuilt() -> None:
    """As one that writes checkpoints does: whenever it looks, it finds what forward left."""

    def program() -> Step:
        model = _deep_dropout()

        def step(k: int) -> Sequence[Tensor]:
            torch.manual_seed(k)
            loss = model(constant(N, N, seed=k)).square().mean()
            wanted = torch.get_rng_state()
            wrong: list[int] = []

            def look(stop: threading.Event) -> None:
                while not stop.is_set():
                    if not torch.equal(torch.get_rng_state(), wanted):
                        wrong.append(1)

            with threads_running(look):
                loss.backward()
            assert not wrong, f"another state was read {len(wrong)} times"
            return taken(*model.parameters())

        return step

    check(program, "drop_all", steps=TRIES)


def test_a_thread_seeds_the_generator_while_masks_are_rebuilt() -> None:
    """What it draws next is the seed's, and its last seed holds after backward."""

    def program() -> Step:
        model = _deep_dropout()
        reference = Generator()

        def step(k: int) -> Sequence[Tensor]:
            torch.manual_seed(k)
            loss = model(constant(N, N, seed=k)).square().mean()
            wrong: list[int] = []

            def reseed(stop: threading.Event) -> None:
                seed = 0
                while not stop.is_set() and seed < 1000:
                    seed += 1
                    torch.default_generator.manual_seed(seed)
                    drawn = torch.rand(BLOCK)
                    if not torch.equal(
                        drawn, torch.rand(BLOCK, generator=reference.manual_seed(seed))
                    ):
                        wrong.append(seed)
                if not torch.equal(torch.get_rng_state(), reference.get_state()):
                    wrong.append(-1)

            with threads_running(reseed):
                loss.backward()
            if not wrong and not torch.equal(torch.get_rng_state(), reference.get_state()):
                wrong.append(-2)
            torch.manual_seed(99)
            assert not wrong, f"wrong after {wrong[:5]}, {len(wrong)} times"
            return taken(*model.parameters())

        return step

    check(program, "drop_all", steps=TRIES)


@in_every_way
def test_draws_of_backward_itself(mode: str) -> None:
    """A hook that adds noise to gradients, and a Function that draws in backward: one thread, one order."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * x.cos() + torch.randn_like(grad) * F.dropout(x, 0.5)

    def program() -> Step:
        model = _deep_dropout()
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.weight.register_hook(lambda g: g + torch.randn_like(g) * 1e-3)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                h = constant(N, N, seed=k)
                for layer in model:
                    h = layer(h)
                    if isinstance(layer, nn.Tanh):
                        h = Noisy.apply(h)
                return h.square().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(*model.parameters())]

        return step

    check(program, mode)


def test_another_thread_trains_with_dropout_of_its_own() -> None:
    """It is not managed; its masks must be the generator's numbers, none of them drawn twice."""

    def program() -> Step:
        model = _deep_dropout()
        other = nn.Linear(64, 64)

        def step(k: int) -> Sequence[Tensor]:
            torch.manual_seed(k)
            loss = model(constant(N, N, seed=k)).square().mean()
            state = torch.get_rng_state()
            masks: list[bytes] = []

            def train(stop: threading.Event) -> None:
                while not stop.is_set() and len(masks) < 300:
                    x = other(torch.ones(64, 64))
                    dropped = F.dropout(torch.ones_like(x), 0.5)
                    (x * dropped).sum().backward()
                    other.zero_grad()
                    masks.append(dropped.numpy().tobytes())

            with threads_running(train):
                loss.backward()
            reference = Generator()
            reference.set_state(state)
            wanted = [
                (torch.empty(64, 64).bernoulli_(0.5, generator=reference) * 2).numpy().tobytes()
                for _ in masks
            ]
            wrong = sum(a != b for a, b in zip(masks, wanted, strict=True))
            torch.manual_seed(99)
            assert not wrong, f"{wrong} of {len(masks)} masks of the other thread are not its own"
            return taken(*model.parameters())

        return step

    check(program, "drop_all", steps=TRIES)


@by_dropping
def test_draws_between_forward_and_backward(mode: str) -> None:
    """On this thread, on another one that ends before backward, and seeds and states set on the way."""

    def program() -> Step:
        model = _deep_dropout()

        def step(k: int) -> list[Tensor]:
            loss = model(constant(N, N, seed=k)).square().mean()
            kept = torch.get_rng_state()
            drawn = [torch.rand(5)]
            with threads_running(lambda _: drawn.append(torch.rand(7))):
                pass
            torch.manual_seed(1000 + k)
            drawn.append(torch.randperm(9))
            if k == 1:
                torch.set_rng_state(kept)
            loss.backward()
            return [*drawn, torch.rand(3), *taken(*model.parameters())]

        return step

    check(program, mode)


@by_dropping
def test_draws_of_numpy_and_python_are_left_alone(mode: str) -> None:
    """Programs that take their masks from numpy get the same ones, before and after a backward."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                mask = torch.from_numpy((np.random.rand(N, N) > 0.5).astype(np.float32))
                return ((w * 2.0).exp() * mask).tanh().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), torch.tensor(np.random.rand(3)), *taken(w)]

        return step

    check(program, mode)

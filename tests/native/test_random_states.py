"""What the record of a step takes up itself: states of random generators, of which each random op remembers one.

A data set whose samples are drawn one by one makes hundreds of them for a batch. They must not come to more than a
percent, or half a MiB, whichever is more; and what is worth it is remembered all the same.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from tests.support.bitwise import assert_same_bits, gradients
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.nets import net

WIDTH, SAMPLES, AHEAD = 128, 512, 4


def fetched_ahead(model: nn.Module) -> None:
    """Micro-batches of samples that are drawn one by one, all fetched before the first is used."""
    torch.manual_seed(1)
    batches = [
        torch.stack([torch.randint(-9, 9, (WIDTH,)) for _ in range(SAMPLES)]) for _ in range(AHEAD)
    ]
    for x in batches:
        (model(x.float() / 9) - x.roll(1)).square().mean().backward()


def peak_bytes(work: Callable[[], None]) -> int:
    gc.collect()
    cpu_pool.reset_peak()
    work()
    return cpu_pool.peak_bytes()


def test_samples_drawn_one_by_one_cost_next_to_nothing():
    cpu_pool.install()
    model, expected = net(WIDTH, activation=nn.Tanh), net(WIDTH, activation=nn.Tanh)
    fetched_ahead(expected)
    expected.zero_grad(set_to_none=True)
    gc.collect()
    before_bytes = cpu_pool.allocated_bytes()  # of other tests too: no budget can free them
    ordinary_bytes = peak_bytes(lambda: fetched_ahead(expected))
    for share in (1.0, 0.85):
        budget_bytes = before_bytes + int(share * (ordinary_bytes - before_bytes))
        runtime = delta.Runtime(budget_bytes, device="cpu")
        with runtime:
            for _ in range(4):
                model.zero_grad(set_to_none=True)
                assert peak_bytes(lambda: fetched_ahead(model)) <= budget_bytes
        assert_same_bits(gradients(model), gradients(expected))
        assert runtime.report().totals.rescues == 0
        assert (runtime.report().totals.drops > 0) or share == 1.0
        runtime.close()
    # And where nothing has to be evicted, so that nothing makes up for it.
    model.zero_grad(set_to_none=True)
    with delta.Runtime("100%", device="cpu") as runtime:
        assert peak_bytes(lambda: fetched_ahead(model)) <= ordinary_bytes + (1 << 20)
    runtime.close()


def test_large_random_tensors_are_remembered_behind_many_small_ones():
    """Half a MiB of states is reached; what a dropout of 2 MiB drew is still worth five KB."""

    def train(model: nn.Module) -> None:
        torch.manual_seed(2)
        shift = torch.stack([torch.rand(8) for _ in range(200)]).mean()
        h = torch.ones(4096, WIDTH) * shift
        for layer in model:
            h = nn.functional.dropout(layer(h), 0.1)
        h.square().mean().backward()

    model, expected = net(WIDTH, activation=nn.Tanh), net(WIDTH, activation=nn.Tanh)
    train(expected)
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    with runtime.step():
        train(model)
    assert_same_bits(gradients(model), gradients(expected))
    names = runtime.graph().op_name
    of_dropout = [name for name in names if "dropout" in name or "bernoulli" in name]
    assert len(of_dropout) >= 8
    assert runtime.report().last.drops >= 16  # of tanh, and of each dropout
    runtime.close()


def test_a_few_small_ones_are_remembered_as_well():
    """Below half a MiB in all, size does not matter: what is dropped is drawn again."""

    def draw() -> torch.Tensor:
        torch.manual_seed(3)
        w = torch.ones(64, requires_grad=True)
        kept = w
        for _ in range(50):
            kept = (nn.functional.dropout(kept, 0.5) + w).sin()
        kept.sum().backward()
        return w.grad

    expected = draw()
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all", min_bytes=0)
    with runtime.step():
        assert torch.equal(draw(), expected)
    last = runtime.report().last
    assert last.drops >= 100 and last.kept_bytes["opaque"] == 0
    runtime.close()

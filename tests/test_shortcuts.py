"""Cheaper ways to make a value again: the same bits, tried before they are taken, refused where they differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import _C, cpu_pool
from tests.support.bitwise import Snapshot, assert_same_bits, freeze, freeze_all, random_state

pytestmark = pytest.mark.timeout(120)

WRONG_SHORTCUT = 7  # as in csrc/op_info.h
Forward = Callable[[int], Tensor]


def _train(
    forward: Forward, tensors: list[Tensor], *, managed: bool, steps: int = 3
) -> tuple[Snapshot, dict]:
    """What some steps leave behind, and the runtime's counters. Step i begins with seed i."""
    cpu_pool.install()
    runtime = delta.Runtime(policy="stress_drop_all", device="cpu") if managed else None
    found: Snapshot = {}
    for step in range(steps):
        for t in tensors:
            t.grad = None
        torch.manual_seed(step)
        with runtime.step() if runtime else contextlib.nullcontext():
            forward(step).backward()
        found |= freeze_all(f"gradient {step}", [t.grad for t in tensors])
        found |= {f"{name} {step}": bits for name, bits in random_state().items()}
    counters = dict(runtime._session.counters()) if runtime else {}
    if runtime:
        runtime.close()
    return found, counters


# ---------------------------------------------------------------- bernoulli_


def _masked(x: Tensor, p: float, words: int, dtype: torch.dtype) -> Tensor:
    """A mask that is dropped, drawn after some words of the stream were used up."""
    torch.empty(words, dtype=torch.int32).random_()
    mask = torch.empty(x.shape, dtype=dtype).bernoulli_(p)
    return (x * mask).sum()


@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(1024, 4000),
    p=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5, 0.9, 2**-53, 1 - 2**-53, 5e-324])),
    words=st.integers(0, 1300),
)
def test_a_mask_is_drawn_again_bit_for_bit(numel, p, words):
    x = torch.rand(numel, requires_grad=True)

    def forward(_: int) -> Tensor:
        return _masked(x, p, words, torch.float32)

    expected, _ = _train(forward, [x], managed=False)
    found, counters = _train(forward, [x], managed=True)
    assert_same_bits(found, expected)
    assert counters["shortcut_failures"] == 0
    assert counters["shortcuts"] == 2  # the first step tries


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.float16, torch.bfloat16])
def test_a_mask_of_another_dtype(dtype):
    x = torch.rand(8192, requires_grad=True)
    expected, _ = _train(lambda _: _masked(x, 0.3, 7, dtype), [x], managed=False)
    found, counters = _train(lambda _: _masked(x, 0.3, 7, dtype), [x], managed=True)
    assert_same_bits(found, expected)
    assert counters["shortcut_failures"] == 0 and counters["shortcuts"] == 2


def test_a_generator_of_ones_own():
    x = torch.rand(8192, requires_grad=True)
    generator = torch.Generator()

    def forward(step: int) -> Tensor:
        generator.manual_seed(100 + step)
        return (x * torch.empty_like(x).bernoulli_(0.3, generator=generator)).sum()

    expected, _ = _train(forward, [x], managed=False)
    found, counters = _train(forward, [x], managed=True)
    assert_same_bits(found, expected)
    assert counters["shortcut_failures"] == 0 and counters["shortcuts"] == 2


def test_another_probability_is_tried_anew():
    x = torch.rand(8192, requires_grad=True)

    def forward(step: int) -> Tensor:
        return _masked(x, 0.1 * (1 + step // 2), 0, torch.float32)

    expected, _ = _train(forward, [x], managed=False, steps=6)
    found, counters = _train(forward, [x], managed=True, steps=6)
    assert_same_bits(found, expected)
    assert counters["shortcuts"] == 3  # the second step with each of three probabilities


def test_a_mask_that_is_not_contiguous_is_drawn_by_the_op():
    x = torch.rand(96, 96, requires_grad=True)

    def forward(_: int) -> Tensor:
        return (x * torch.empty(96, 96).t().bernoulli_(0.3)).sum()

    expected, _ = _train(forward, [x], managed=False)
    found, counters = _train(forward, [x], managed=True)
    assert_same_bits(found, expected)
    assert counters["shortcuts"] == 0 and counters["rebuilds"] > 0


def test_a_wrong_shortcut_is_never_taken():
    """The result of the op itself counts while a shortcut is tried, and a failed one is not tried again."""
    x = torch.rand(8192, requires_grad=True)
    expected, _ = _train(lambda _: F.dropout(x, 0.4).sum(), [x], managed=False)
    _C.set_sabotage(WRONG_SHORTCUT)
    try:
        found, counters = _train(lambda _: F.dropout(x, 0.4).sum(), [x], managed=True)
    finally:
        _C.set_sabotage(0)
    assert_same_bits(found, expected)
    assert counters["shortcuts"] == 0 and counters["shortcut_failures"] == 1


# ---------------------------------------------------------------- batch norm


def _norm_of(module: nn.Module, x: Tensor) -> Forward:
    def forward(step: int) -> Tensor:
        weight = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
        return (torch.relu(module(x * 1.5)) * weight).sum()

    return forward


NORMS = {
    "2d": (lambda: nn.BatchNorm2d(12), (5, 12, 9, 11), {}),
    "1d": (lambda: nn.BatchNorm1d(33), (64, 33), {}),
    "1d of sequences": (lambda: nn.BatchNorm1d(16), (8, 16, 50), {}),
    "3d": (lambda: nn.BatchNorm3d(6), (3, 6, 4, 7, 5), {}),
    "without weights": (lambda: nn.BatchNorm2d(12, affine=False), (5, 12, 9, 11), {}),
    "without running statistics": (
        lambda: nn.BatchNorm2d(12, track_running_stats=False),
        (5, 12, 9, 11),
        {},
    ),
    "double": (lambda: nn.BatchNorm2d(12).double(), (5, 12, 9, 11), {"dtype": torch.float64}),
    "bfloat16 input": (lambda: nn.BatchNorm2d(12), (5, 12, 19, 11), {"dtype": torch.bfloat16}),
    "bfloat16": (
        lambda: nn.BatchNorm2d(12).bfloat16(),
        (5, 12, 19, 11),
        {"dtype": torch.bfloat16},
    ),
    "channels last": (lambda: nn.BatchNorm2d(12), (5, 12, 9, 11), {"channels_last": True}),
    "huge and tiny": (lambda: nn.BatchNorm2d(12), (5, 12, 9, 11), {"scale": True}),
    "not finite": (lambda: nn.BatchNorm2d(12), (5, 12, 9, 11), {"infinite": True}),
}


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_without_its_statistics(name):
    """What the first run found out about the batch is kept: only the scaling runs again."""
    make, shape, how = NORMS[name]

    def run(managed: bool) -> tuple[Snapshot, dict]:
        torch.manual_seed(5)
        module = make()
        for parameter in module.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        x = torch.randn(shape, dtype=how.get("dtype"))
        if how.get("scale"):
            x = x * torch.logspace(-30, 15, shape[1]).view(1, -1, 1, 1)
        if how.get("infinite"):
            x[0, 3, 2, 2], x[1, 5, 0, 0] = float("inf"), float("nan")
        if how.get("channels_last"):
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        found, counters = _train(_norm_of(module, x), [x, *module.parameters()], managed=managed)
        for label, buffer in module.named_buffers():
            found[label] = freeze(buffer)
        return found, counters

    expected, _ = run(managed=False)
    found, counters = run(managed=True)
    assert_same_bits(found, expected)
    assert counters["shortcut_failures"] == 0
    assert counters["shortcuts"] >= 2


def test_batch_norm_in_evaluation_takes_no_shortcut():
    module = nn.BatchNorm2d(12).eval()
    x = torch.randn(5, 12, 9, 11, requires_grad=True)
    expected, _ = _train(_norm_of(module, x), [x], managed=False)
    found, counters = _train(_norm_of(module, x), [x], managed=True)
    assert_same_bits(found, expected)
    assert counters["shortcuts"] == 0 and counters["shortcut_failures"] == 0


def test_batch_norm_runs_whole_where_its_statistics_are_away():
    """2048 channels: the statistics are large enough to be dropped themselves."""
    module = nn.BatchNorm1d(2048)
    x = torch.randn(16, 2048, requires_grad=True)
    tensors = [x, *module.parameters()]
    expected, _ = _train(_norm_of(module, x), tensors, managed=False)
    found, counters = _train(_norm_of(module, x), tensors, managed=True)
    assert_same_bits(found, expected)
    assert counters["rebuilds"] > 0 and counters["shortcuts"] == 0

"""Cheaper ways to make a value again: the same bits, tried before they are taken, refused where they differ."""

from __future__ import annotations

import contextlib
import subprocess
import sys
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

WRONG_SHORTCUT = 7  # as in csrc/observe/op_info.h
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
        with torch.no_grad():  # what held for the first weights has to hold for others too
            for t in tensors:
                if isinstance(t, nn.Parameter):
                    t.sub_(t.grad.clamp(-0.3, 0.3))
    counters = runtime.session.counters() if runtime else None
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
    assert counters.shortcut_failures == 0
    assert counters.shortcuts == 2  # the first step tries


@pytest.mark.parametrize("dtype", [torch.float64, torch.bool, torch.float16, torch.bfloat16])
def test_a_mask_of_another_dtype(dtype):
    x = torch.rand(8192, requires_grad=True)
    expected, _ = _train(lambda _: _masked(x, 0.3, 7, dtype), [x], managed=False)
    found, counters = _train(lambda _: _masked(x, 0.3, 7, dtype), [x], managed=True)
    assert_same_bits(found, expected)
    assert counters.shortcut_failures == 0 and counters.shortcuts == 2


def test_a_generator_of_ones_own():
    x = torch.rand(8192, requires_grad=True)
    generator = torch.Generator()

    def forward(step: int) -> Tensor:
        generator.manual_seed(100 + step)
        return (x * torch.empty_like(x).bernoulli_(0.3, generator=generator)).sum()

    expected, _ = _train(forward, [x], managed=False)
    found, counters = _train(forward, [x], managed=True)
    assert_same_bits(found, expected)
    assert counters.shortcut_failures == 0 and counters.shortcuts == 2


def test_another_probability_is_tried_anew():
    x = torch.rand(8192, requires_grad=True)

    def forward(step: int) -> Tensor:
        return _masked(x, 0.1 * (1 + step // 2), 0, torch.float32)

    expected, _ = _train(forward, [x], managed=False, steps=6)
    found, counters = _train(forward, [x], managed=True, steps=6)
    assert_same_bits(found, expected)
    assert counters.shortcuts == 3  # the second step with each of three probabilities


def test_a_mask_that_is_not_contiguous_is_drawn_by_the_op():
    x = torch.rand(96, 96, requires_grad=True)

    def forward(_: int) -> Tensor:
        return (x * torch.empty(96, 96).t().bernoulli_(0.3)).sum()

    expected, _ = _train(forward, [x], managed=False)
    found, counters = _train(forward, [x], managed=True)
    assert_same_bits(found, expected)
    assert counters.shortcuts == 0 and counters.rebuilds > 0


def test_a_wrong_shortcut_is_never_taken():
    """The result of the op itself counts while a shortcut is tried, and a failed one is not tried again."""
    x = torch.rand(8192, requires_grad=True)
    # The process asks once whether the shortcut is right on this machine: here, before it is made wrong.
    expected, counters = _train(lambda _: F.dropout(x, 0.4).sum(), [x], managed=True)
    assert counters.shortcuts > 0
    _C.set_sabotage(WRONG_SHORTCUT)
    try:
        found, counters = _train(lambda _: F.dropout(x, 0.4).sum(), [x], managed=True)
    finally:
        _C.set_sabotage(0)
    assert_same_bits(found, expected)
    assert counters.shortcuts == 0 and counters.shortcut_failures == 1


# ---------------------------------------------------------------- batch norm


def _norm_of(module: Callable[[Tensor], Tensor], x: Tensor) -> Forward:
    def forward(step: int) -> Tensor:
        return F.silu(module(x * 1.5)).sin().sum()  # needs every bit of the normalized values

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
    "default weights, a layout that rounds otherwise": (
        lambda: nn.BatchNorm1d(16),
        (8, 50, 16),
        {"transposed": True, "shortcuts": 0, "default": True},
    ),
    "default weights": (lambda: nn.BatchNorm2d(12), (5, 12, 9, 11), {"default": True}),
    "float16": (
        lambda: nn.BatchNorm2d(12).half(),
        (5, 12, 19, 11),
        {"dtype": torch.float16, "shortcuts": 0},
    ),
    "float16 input": (lambda: nn.BatchNorm2d(12), (5, 12, 19, 11), {"dtype": torch.float16}),
    "double": (lambda: nn.BatchNorm2d(12).double(), (5, 12, 9, 11), {"dtype": torch.float64}),
    "bfloat16 input": (lambda: nn.BatchNorm2d(12), (5, 12, 19, 11), {"dtype": torch.bfloat16}),
    "bfloat16": (
        lambda: nn.BatchNorm2d(12).bfloat16(),
        (5, 12, 19, 11),
        {"dtype": torch.bfloat16, "shortcuts": 0},
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
        for parameter in () if how.get("default") else module.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        x = torch.randn(shape, dtype=how.get("dtype"))
        if how.get("scale"):
            x = x * torch.logspace(-30, 15, shape[1]).view(1, -1, 1, 1)
        if how.get("infinite"):
            x[0, 3, 2, 2], x[1, 5, 0, 0] = float("inf"), float("nan")
        if how.get("channels_last"):
            x = x.to(memory_format=torch.channels_last)
        x.requires_grad_()
        layer = (lambda x: module(x.transpose(1, 2))) if how.get("transposed") else module
        found, counters = _train(_norm_of(layer, x), [x, *module.parameters()], managed=managed)
        for label, buffer in module.named_buffers():
            found[label] = freeze(buffer)
        return found, counters

    expected, _ = run(managed=False)
    found, counters = run(managed=True)
    assert_same_bits(found, expected)
    assert counters.shortcut_failures == 0
    assert counters.rebuilds > 0
    assert (counters.shortcuts >= 2) == (how.get("shortcuts") != 0)


def test_batch_norm_in_evaluation_takes_no_shortcut():
    module = nn.BatchNorm2d(12).eval()
    x = torch.randn(5, 12, 9, 11, requires_grad=True)
    expected, _ = _train(_norm_of(module, x), [x], managed=False)
    found, counters = _train(_norm_of(module, x), [x], managed=True)
    assert_same_bits(found, expected)
    assert counters.shortcuts == 0 and counters.shortcut_failures == 0


def _twice(
    layer_of: Callable[[nn.Module], Callable[[Tensor], Tensor]],
) -> tuple[Snapshot, Snapshot, dict]:
    """Without and with the runtime, 2048 channels: the statistics are large enough to be dropped themselves."""
    x = torch.randn(16, 2048, requires_grad=True)
    runs = []
    for managed in (False, True):
        module = nn.BatchNorm1d(2048)
        forward = _norm_of(layer_of(module), x)
        runs.append(_train(forward, [x, *module.parameters()], managed=managed))
    return runs[0][0], *runs[1]


def test_batch_norm_runs_whole_where_its_statistics_are_away():
    expected, found, counters = _twice(lambda module: module)
    assert_same_bits(found, expected)
    assert counters.rebuilds > 0 and counters.shortcuts == 0


@torch.library.custom_op("delta_shortcut_tests::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    """Not certain: it is compared with itself, and so is what is made from it."""
    return x * 2


double.register_autograd(lambda ctx, grad: grad * 2)


def test_an_audit_of_the_statistics_makes_them():
    """Both are there, as an audit wants them: a shortcut that is given them would make none."""
    expected, found, counters = _twice(lambda module: lambda x: module(double(x)))
    assert_same_bits(found, expected)
    assert counters.audits > 0 and counters.audit_failures == 0


_RARE = """
import torch, delta_runtime as delta
from delta_runtime import _C, cpu_pool
cpu_pool.install()
_C.set_sabotage(7)
x = torch.rand(2048, requires_grad=True)
runtime = delta.Runtime(policy="stress_drop_all", device="cpu")
for step in range(4):
    torch.manual_seed(step)
    with runtime.step():
        (x * torch.empty_like(x).bernoulli_(0.0)).sum().backward()
print(runtime.session.counters().shortcuts, runtime.session.counters().rebuilds)
"""


def test_a_trial_that_cannot_tell_is_not_enough():
    """A mask of nothing but zeros looks the same from any stream; the proof on other data comes first."""
    done = subprocess.run([sys.executable, "-c", _RARE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "4"]

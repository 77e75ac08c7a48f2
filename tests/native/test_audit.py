"""Ops outside of aten: run twice and compared before anything depends on them, without a trace."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import delta_runtime as delta
from delta_runtime import cpu_pool
from tests.support.bitwise import assert_same_bits, freeze, random_state

pytestmark = pytest.mark.timeout(60)

ROWS = 4096
_calls = 0


@torch.library.custom_op("delta_audit_tests::drift", mutates_args=())
def drift(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its second result repeats; its first one says how often it ran in this step."""
    global _calls
    _calls += 1
    return x * _calls, x.exp()


@drift.register_fake
def _(x):
    return torch.empty_like(x), torch.empty_like(x)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*(output[i] for i in ctx_order))


def _backward(ctx, grad_first, grad_second):
    saved = dict(zip(ctx_order, ctx.saved_tensors))
    return grad_first * saved[0] + grad_second * saved[1]


ctx_order = (0, 1)
drift.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("delta_audit_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draws random numbers without saying so."""
    return x * torch.rand_like(x)


noisy.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


def _train(op, managed: bool, steps: int = 3) -> dict[str, Any]:
    """Gradients of some steps and the random state after them."""
    global _calls
    cpu_pool.install()
    torch.manual_seed(0)
    x = torch.rand(ROWS, requires_grad=True)
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all") if managed else None
    found: dict[str, Any] = {}
    for step in range(steps):
        _calls = 0
        x.grad = None
        torch.manual_seed(step)

        def forward() -> torch.Tensor:
            h = op(x.sin())
            parts = h if isinstance(h, tuple) else (h,)
            return torch.stack([(part.cos() * torch.rand(ROWS)).sum() for part in parts]).sum()

        with runtime.step() if runtime else contextlib.nullcontext():
            forward().backward()  # nobody holds what it made
        assert x.grad is not None
        found[f"gradient {step}"] = freeze(x.grad)
        found |= {f"{name} {step}": bits for name, bits in random_state().items()}
    if runtime:
        found["audits"] = runtime.session.counters().audits
        found["rebuilds"] = runtime.session.counters().rebuilds
        runtime.close()
    return found


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_output_that_does_not_repeat_is_kept(monkeypatch, order):
    """Although its twin repeats, whichever is compared first, and in later steps too."""
    monkeypatch.setattr(f"{__name__}.ctx_order", order)
    expected = _train(drift, managed=False)
    found = _train(drift, managed=True)
    assert found.pop("audits") > 0
    assert found.pop("rebuilds") > 0
    assert_same_bits(found, expected)


def test_an_op_that_draws_in_secret_does_not_move_the_generator():
    expected = _train(noisy, managed=False)
    found = _train(noisy, managed=True)
    assert found.pop("audits") > 0
    found.pop("rebuilds")
    assert_same_bits(found, expected)

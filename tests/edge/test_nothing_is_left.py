"""After all that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import delta_runtime as delta
from tests.edge.harness import (
    MANAGED_MODES,
    DirtyClamp,
    boundary,
    leaf,
)
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.managed import live_bytes, managed


def _chain_of_custom_functions(w: Tensor) -> None:
    h = w * 1.1
    for _ in range(2):
        h = DirtyClamp.apply(h)[0] * 1.01
    h.mean().backward()


def _values_between_writes(w: Tensor) -> None:
    with torch.no_grad():
        h = w * 1.1
        mask = (h.abs() < 1.5).float()
        other = h.clone()
        h.clamp_(-1, 1)
        other.mul_(h)
    ((w * mask).sum() + (w * h).exp().sum() + (w * other).sum()).backward()


def _forward_only(w: Tensor) -> None:
    (w * 2.0).exp().sin().sum()


def _graph_kept_and_let_go(w: Tensor) -> None:
    loss = F.dropout((w * 2.0).exp(), 0.5).sin().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def _exception(w: Tensor) -> None:
    with contextlib.suppress(ValueError):
        h = (w * 2.0).exp().sin()
        boundary()
        raise ValueError(h.shape)


def _double_backward(w: Tensor) -> None:
    (g,) = torch.autograd.grad((w * 2.0).tanh().pow(2).sum(), w, create_graph=True)
    g.sin().sum().backward()


def _checkpoint(w: Tensor) -> None:
    h = checkpoint(lambda x: F.dropout((x * 2.0).exp(), 0.5).sin(), w * 1.0, use_reentrant=False)
    h.square().sum().backward()


@pytest.mark.parametrize(
    "step",
    [
        _chain_of_custom_functions,
        _values_between_writes,
        _forward_only,
        _graph_kept_and_let_go,
        _exception,
        _double_backward,
        _checkpoint,
    ],
    ids=lambda step: step.__name__.strip("_"),
)
@pytest.mark.parametrize("mode", MANAGED_MODES)
def test_nothing_is_left_behind(step: Callable[[Tensor], None], mode: str) -> None:
    w = leaf(1 << 14)
    block_bytes = w.numel() * w.element_size()
    live = []
    with managed(mode, seed=1):
        for _ in range(8):
            step(w)
            w.grad = None
            gc.collect()
            live.append(live_bytes())
    # A value or two may wait for the next op boundary; one more with each step is a leak.
    assert max(live[4:]) - max(live[:4]) < block_bytes, live


@pytest.mark.parametrize("marked", [True, False], ids=["step", "context"])
@pytest.mark.parametrize("leaves", [True, False], ids=["left", "closed again"])
def test_closed_by_a_hook_of_a_backward_it_leaves_no_hooks(marked: bool, leaves: bool) -> None:
    """Behind each node autograd puts the hooks back that were there when the backward began."""
    w = leaf(1 << 12)

    def loss(hook: Callable[[Tensor], None] | None) -> Tensor:
        h = (w * 2.0).exp()
        if hook is not None:
            h.register_hook(hook)
        return h.sin().sum()

    loss(None).backward()
    wanted, w.grad = w.grad, None
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0)
    entry = runtime.step() if marked else runtime
    entry.__enter__()
    loss(lambda _: runtime.close()).backward()
    if leaves:
        entry.__exit__(None, None, None)
    else:
        runtime.close()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.equal(w.grad, wanted)


class _RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # noqa: ANN001
        return x * 1.5

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # noqa: ANN001
        raise ValueError("no backward")


def _fail_with_ready_nodes(step: contextlib.AbstractContextManager[object]) -> weakref.ref[Tensor]:
    """Run a backward that raises while a branch of it is ready to run; return what that branch holds on to."""
    w = leaf(1 << 14)
    with contextlib.suppress(ValueError), step:
        branch = (w * 2.0).exp()
        (branch.sin() + _RaisingBackward.apply(w * 3.0)).sum().backward()
    return weakref.ref(w)


@pytest.mark.parametrize("entry", ["step", "context", "step inside a context"])
def test_a_backward_that_raised_leaves_no_nodes(entry: str) -> None:
    """PyTorch keeps those that had not run until the thread's next backward."""
    assert _fail_with_ready_nodes(contextlib.nullcontext())() is not None  # so this tests something
    with delta.Runtime("100%", device="cpu", min_bytes=0) as runtime:
        if entry == "step inside a context":
            assert _fail_with_ready_nodes(runtime.step())() is None
            return
    with contextlib.closing(delta.Runtime("100%", device="cpu", min_bytes=0)) as runtime:
        assert _fail_with_ready_nodes(runtime.step() if entry == "step" else runtime)() is None

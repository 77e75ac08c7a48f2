"""Steps and loops cost nothing that outlives them: as many live bytes and records after many of them as after few."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import _C
from tests.faults.harness import constant, leaf
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.managed import live_bytes, measured

pytestmark = pytest.mark.timeout(60)

SIDE = 64
BLOCK_BYTES = SIDE * SIDE * 4


@torch.library.custom_op("delta_flat_tests::smooth", mutates_args=())
def smooth(x: Tensor) -> Tensor:
    return x.sigmoid() * x


smooth.register_autograd(
    lambda ctx, grad: grad * ctx.saved_tensors[0].sigmoid(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@torch.library.custom_op("delta_flat_tests::shift_", mutates_args=("x",))
def shift_(x: Tensor) -> None:
    x.add_(0.125)


@torch.library.custom_op("delta_flat_tests::fickle", mutates_args=())
def fickle(x: Tensor) -> Tensor:
    """Never twice the same."""
    return x + np.random.default_rng().random()


Layer = Callable[[Tensor, int], Tensor]


def custom(h: Tensor, i: int) -> Tensor:
    return smooth(h)


def custom_in_place(h: Tensor, i: int) -> Tensor:
    gate = h.detach() * 0.5
    shift_(gate)
    return h * gate


def custom_that_does_not_repeat(h: Tensor, i: int) -> Tensor:
    with torch.no_grad():
        gate = fickle(h)
    return h * gate.sigmoid()


def from_numpy(h: Tensor, i: int) -> Tensor:
    return h + torch.from_numpy(np.full((SIDE, SIDE), 0.01 * i, dtype=np.float32))


def from_dlpack(h: Tensor, i: int) -> Tensor:
    return h * torch.from_dlpack(torch.full((SIDE, SIDE), 1.0 + 0.01 * i))


def filled_by_numpy(h: Tensor, i: int) -> Tensor:
    bias = torch.zeros(SIDE, SIDE)
    bias.numpy()[:] = 0.01 * i
    return h * bias.exp()


def plain(h: Tensor, i: int) -> Tensor:
    return F.dropout(F.gelu(h), 0.1)


LAYERS = [
    custom,
    custom_in_place,
    custom_that_does_not_repeat,
    from_numpy,
    from_dlpack,
    filled_by_numpy,
    plain,
]


def _net(layer: Layer, depth: int) -> Callable[[int], Tensor]:
    torch.manual_seed(3)
    layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(depth))

    def step(k: int) -> Tensor:
        h = constant(SIDE, SIDE, seed=k)
        for i, linear in enumerate(layers):
            h = layer(linear(h), i).tanh()
        loss = h.square().mean()
        del h
        loss.backward()
        layers.zero_grad()
        return loss.detach()

    return step


def _live_after_steps(
    step: Callable[[int], Tensor], steps: int, entered: bool, **options: Any
) -> list[int]:
    """Live bytes after each step, with the ordinary run's subtracted."""
    step(0)
    base_bytes = live_bytes()
    found = []
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0, **options)
    losses = []
    with runtime if entered else contextlib.nullcontext():
        for k in range(steps):
            with contextlib.nullcontext() if entered else runtime.step():
                losses.append(step(k))
            found.append(live_bytes() - base_bytes)
    runtime.close()
    return found


@pytest.mark.parametrize("policy", ["auto", "stress_drop_all"])
@pytest.mark.parametrize("entered", [True, False], ids=["entered", "per_step"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_training_is_flat(layer: Layer, entered: bool, policy: str) -> None:
    """A deep net, each layer of which does what is hard to trust; kept losses hold nothing but themselves."""
    depth = 16
    live = _live_after_steps(_net(layer, depth), 12, entered, policy=policy)
    print(live)
    # A boundary that is found by itself comes with the next step, so that a step's last values may still be there.
    assert max(live[6:]) - max(live[3:6]) < BLOCK_BYTES, "it grows"
    assert max(live[3:]) < (depth // 2 + 2) * BLOCK_BYTES, "a step leaves its activations behind"


@pytest.mark.parametrize(
    "layer", [custom, custom_in_place, from_numpy, from_dlpack, plain], ids=lambda f: f.__name__
)
def test_a_budget_is_held_with_what_is_hard_to_trust(layer: Layer) -> None:
    """At default settings: never more than ordinarily, nothing left behind, and less where recipes cost nothing.

    A recipe that begins at an array of each layer's own has to hold that array, which is as large as what it makes.
    """
    step = _net(layer, 16)
    step(0)
    base_bytes = live_bytes()
    with measured() as ordinary:
        step(1)
    ordinary_bytes = ordinary.peak_bytes - base_bytes
    budget_bytes = base_bytes + ordinary_bytes * 6 // 10
    runtime = delta.Runtime(budget_bytes, device="cpu")
    peaks, live = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the budget was passed is what is looked for
        for k in range(8):
            with measured() as peak, runtime.step():
                step(k)
            peaks.append(peak.peak_bytes - base_bytes)
            live.append(live_bytes() - base_bytes)
    runtime.close()
    print(ordinary_bytes, peaks, live)
    assert runtime.report().totals.rebuilds > 0, "the budget asks for nothing"
    assert max(live[2:]) < 2 * BLOCK_BYTES, "a step leaves something behind"
    assert max(peaks[2:]) <= ordinary_bytes * 1.01 + 2 * BLOCK_BYTES, "worse than without a budget"
    if layer in (plain, custom):
        assert max(peaks[4:]) <= budget_bytes - base_bytes, "the budget is not held"


# ---------------------------------------------------------------------------------- loops without a backward


def rollout_that_rebinds(state: dict[str, Tensor], k: int) -> None:
    state["x"] = state["x"] * 0.99 + torch.randn_like(state["x"])


def rollout_of_a_policy(state: dict[str, Any], k: int) -> None:
    with torch.no_grad():
        action = state["model"](state["x"]).softmax(-1)
        state["x"] = torch.from_numpy(action.numpy() * 0.5) + state["x"] * 0.5


def evaluation(state: dict[str, Any], k: int) -> None:
    with torch.no_grad():
        state["total"] += state["model"](state["x"]).sum()


def evaluation_in_inference_mode(state: dict[str, Any], k: int) -> None:
    with torch.inference_mode():
        state["total"] = state["total"] + state["model"](state["x"]).sum().item()


def loss_without_backward(state: dict[str, Any], k: int) -> None:
    state["last"] = state["model"](state["x"]).square().mean().detach()


def moving_average(state: dict[str, Any], k: int) -> None:
    with torch.no_grad():
        for own, other in zip(state["average"], state["model"].parameters(), strict=True):
            own.lerp_(other, 0.01)


def random_numbers(state: dict[str, Any], k: int) -> None:
    state["x"] = F.dropout(torch.randn(8, 8), 0.5) + state["x"] * 0.5


def cache_that_slides(state: dict[str, Any], k: int) -> None:
    with torch.no_grad():
        state["cache"] = torch.cat([state["cache"][1:], state["x"][:1] * 0.5])


def custom_op(state: dict[str, Any], k: int) -> None:
    with torch.no_grad():
        state["x"] = smooth(state["x"]) + 0.1


LOOPS = [
    rollout_that_rebinds,
    rollout_of_a_policy,
    evaluation,
    evaluation_in_inference_mode,
    loss_without_backward,
    moving_average,
    random_numbers,
    cache_that_slides,
    custom_op,
]


def _state() -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 8))
    return {
        "model": model,
        "x": torch.randn(8, 8),
        "total": torch.zeros(()),
        "average": [p.detach().clone() for p in model.parameters()],
        "cache": torch.zeros(16, 8),
    }


@pytest.mark.parametrize("entered", [True, False], ids=["entered", "in_one_step"])
@pytest.mark.parametrize("trains", [False, True], ids=["alone", "after_training"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda f: f.__name__)
def test_a_loop_without_backward_is_flat(
    loop: Callable[[dict[str, Any], int], None], entered: bool, trains: bool
) -> None:
    """Tiny tensors, many iterations: neither bytes nor records pile up, whether or not anything was ever saved."""
    state = _state()
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0, policy="recompute")
    bytes_, records = [], []
    with runtime if entered else runtime.step():
        if trains:
            state["model"](state["x"]).square().mean().backward()
        for k in range(1, 2001):
            loop(state, k)
            if k % 500 == 0:
                bytes_.append(live_bytes())
                records.append(_C.live_records())
    runtime.close()
    print(bytes_, records)
    assert bytes_[-1] - bytes_[0] < 16 * 1024
    assert records[-1] - records[0] < 200


@pytest.mark.parametrize("entered", [True, False], ids=["entered", "in_one_step"])
def test_a_loop_whose_graphs_die_unused_is_not_remembered(entered: bool) -> None:
    """An evaluation with gradients on saves tensors and has no step: nothing is logged of it for ever."""
    state = _state()
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0, policy="recompute")
    with runtime if entered else runtime.step():
        for k in range(4000):
            loss_without_backward(state, k)
        assert not runtime.session.logging()
        assert not runtime.session.logged_ops()
        state["model"](state["x"]).square().mean().backward()
    with runtime.step():  # the next one is
        state["model"](state["x"]).square().mean().backward()
    assert runtime.graph().n_ops < 100
    runtime.close()


@pytest.mark.parametrize("kept", ["graph", "value"])
def test_evaluation_between_steps_of_training(kept: str) -> None:
    """What training keeps over it, a graph or a recorded value, does not make it keep every iteration."""
    state = _state()
    w = leaf(SIDE, SIDE)
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0, policy="stress_drop_all")
    with runtime:
        h = (w * 1.5).exp()
        held = h.sin().mean() if kept == "graph" else h.detach() * 2
        del h
        records, bytes_ = [], []
        for k in range(1, 2001):
            evaluation(state, k)
            rollout_that_rebinds(state, k)
            if k % 500 == 0:
                bytes_.append(live_bytes())
                records.append(_C.live_records())
        if kept == "graph":
            held.backward()
    runtime.close()
    print(bytes_, records)
    assert bytes_[-1] - bytes_[0] < 16 * 1024
    assert records[-1] - records[0] < 200

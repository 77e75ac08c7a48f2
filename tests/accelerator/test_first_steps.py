"""Models that nobody has seen train on a device that is too small for them, from the first step on, at `auto`.

The capacity is a share of what the ordinary run reserves. What does not train must need more: its least budget, of a
record that was made with room, and 2 % are above the capacity.
"""

from __future__ import annotations

import contextlib
import functools
import gc

import pytest
import torch

import delta_runtime as delta
from delta_runtime.extension import _C
from delta_runtime.planners.bounds import bounds_of
from tests.accelerator.conftest import Controls
from tests.support.bitwise import Snapshot, assert_same_bits, gradients, prefixed
from tests.support.device import TYPE, moved, seed
from tests.support.fixtures import one_thread  # noqa: F401
from tests.zoo import ZOO

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

STEPS = 11
MODELS = list(ZOO)


def slow_where_simulated(every: int, index: int) -> list[pytest.MarkDecorator]:
    """Of each `every` models one runs in `make test`, and the others are marked slow. On a card all of them run."""
    return [pytest.mark.slow] * (TYPE == "fake" and index % every > 0)


RUNS = [
    pytest.param(name, share, index // 2 % 2 == 0, marks=slow_where_simulated(every, index))
    for index, name in enumerate(MODELS)
    for share, every in ((0.6, 1), (0.4, 2))  # one after the other, by the same ordinary run
]


def train(
    name: str,
    device: torch.device,
    runtime: delta.Runtime | None = None,
    steps: int = STEPS,
    rescues: list[int] | None = None,
) -> Snapshot:
    """The gradients of all steps; to `rescues` are added those of each step."""
    built = ZOO[name].build(0)
    built.model.to(device)
    found: Snapshot = {}
    seed(1)
    for index in range(steps):
        batch = moved(built.batch(index))
        built.model.zero_grad(set_to_none=True)
        with runtime.step() if runtime else contextlib.nullcontext():
            built.loss(batch).backward()
        found |= prefixed(f"step {index}", gradients(built.model))
        if runtime is None:
            torch.accelerator.empty_cache()  # what other shapes of earlier steps have left is no need
        elif rescues is not None:
            rescues.append(runtime.report().last.rescues)
    return found


def release(controls: Controls) -> None:
    controls.capacity(0)
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


@functools.lru_cache(maxsize=1)
def reserved_bytes(
    name: str, device: torch.device, controls: Controls, steps: int = STEPS
) -> tuple[int, Snapshot]:
    """What an ordinary step reserves at the most, and the bits of all of them."""
    release(controls)
    torch.accelerator.reset_peak_memory_stats()
    wanted = train(name, device, steps=steps)
    peak_bytes = int(torch.accelerator.max_memory_reserved())
    release(controls)
    return peak_bytes, wanted


def least_bytes(name: str, device: torch.device, controls: Controls) -> int:
    runtime = delta.Runtime(1 << 34, device=str(device), policy="recompute", min_bytes=0)
    with contextlib.closing(runtime):
        train(name, device, runtime, steps=2)
        return bounds_of(runtime.graph()).least_bytes


@pytest.mark.parametrize(("name", "share", "inside"), RUNS)
def test_it_just_trains(device, controls, name, share, inside, monkeypatch):
    """With room made inside of allocations, or by running ops again."""
    monkeypatch.setenv("DELTA_LIMIT_RESERVED", str(int(inside)))
    peak_bytes, wanted = reserved_bytes(name, device, controls)
    capacity_bytes = int(share * peak_bytes)
    got: Snapshot = {}
    rescues: list[int] = []
    controls.capacity(capacity_bytes)
    runtime = delta.Runtime("auto", device=str(device), policy="auto", min_bytes=0)
    with contextlib.closing(runtime):
        try:
            got = train(name, device, runtime, rescues=rescues)
        except torch.OutOfMemoryError:
            release(controls)
            assert share < 0.6
            assert 1.02 * least_bytes(name, device, controls) > capacity_bytes
            return
    release(controls)
    assert_same_bits(got, wanted)
    assert rescues[2:] == [0] * (STEPS - 2)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=slow_where_simulated(3, i)) for i, each in enumerate(MODELS)],
)
def test_it_is_rescued_where_looking_ahead_sees_no_need(device, controls, name, monkeypatch):
    """A budget of twice what there is; and without rescue the first step dies."""
    peak_bytes, wanted = reserved_bytes(name, device, controls, steps=3)

    def train_blindly(steps: int) -> Snapshot:
        runtime = delta.Runtime(2 * peak_bytes, device=str(device), policy="auto", min_bytes=0)
        controls.capacity(int(0.6 * peak_bytes))
        with contextlib.closing(runtime):
            try:
                return train(name, device, runtime, steps)
            finally:
                release(controls)

    with monkeypatch.context() as no_limit:
        no_limit.setenv("DELTA_LIMIT_RESERVED", "0")
        _C.set_op_rescue_enabled(False)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                train_blindly(steps=1)
        finally:
            _C.set_op_rescue_enabled(True)
        got = train_blindly(steps=3)
        assert_same_bits(got, {key: bits for key, bits in wanted.items() if key in got})
    got = train_blindly(steps=3)  # from inside of allocations, where the allocator keeps to limits
    assert_same_bits(got, {key: bits for key, bits in wanted.items() if key in got})

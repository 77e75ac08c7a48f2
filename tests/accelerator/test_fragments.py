"""Reserved bytes and the budget, with an allocator that cuts segments up as CUDA's does.

On the simulated accelerator its segments are smaller by 64, so that these models, which take 10 to 25 MB, stand for
some of 600 to 1,600; where they grow by pages, by 128. Does not cover: what models reserve that need nearly all of the
budget at the least, or whose steps differ, where segments do not grow. They cannot spare what fragments take.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
from collections.abc import Iterator

import pytest
import torch

import delta_runtime as delta
from delta_runtime.allocator_margin import AllocatorMargin
from delta_runtime.growing_segments import segments_expand
from tests.accelerator.conftest import Controls
from tests.accelerator.test_first_steps import release
from tests.support.bitwise import Snapshot, assert_same_bits, gradients, prefixed
from tests.support.device import moved, seed
from tests.support.fixtures import one_thread  # noqa: F401
from tests.zoo import ZOO

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

SCALE = 64
STEPS = 50
LATE = 5  # steps by whose time all is settled
SCALE_OF_GROWING = 128
"""Models of 8 to 12 MB stand for some of 1 to 1.5 GB, next to which a page is small."""
MODELS = ("gpt2_eager", "bert", "inplace_resnet", "custom_functions")


@pytest.fixture
def segments(controls: Controls, device) -> Iterator[None]:
    """An allocator like CUDA's; a card has one anyway."""
    if not controls.simulated:
        pytest.skip("models as small as these do not fill a segment of a card's allocator")
    controls.fake.set_segments(SCALE)
    yield
    controls.capacity(0)
    controls.fake.set_segments(0)


def train(
    name: str, device: torch.device, runtime: delta.Runtime | None, steps: int
) -> tuple[Snapshot, list[int], list[int]]:
    """Bits of the last step; reserved bytes behind each step, and rescues in each."""
    built = ZOO[name].build(0)
    built.model.to(device)
    seed(1)
    found: Snapshot = {}
    reserved: list[int] = []
    rescues: list[int] = []
    for index in range(steps):
        batch = moved(built.batch(index))
        built.model.zero_grad(set_to_none=True)
        with runtime.step() if runtime else contextlib.nullcontext():
            built.loss(batch).backward()
        if runtime is not None:
            runtime.wait_for_plan()
            rescues.append(runtime.report().last.rescues)
        reserved.append(int(torch.accelerator.memory_reserved()))
        found = prefixed(f"step {index}", gradients(built.model))
    return found, reserved, rescues


def ordinary(
    name: str, device: torch.device, controls: Controls, steps: int = STEPS
) -> tuple[Snapshot, int]:
    """Bits of the last step, and the peak of live bytes."""
    release(controls)
    return measured(name, device, controls, steps)


@functools.lru_cache(maxsize=len(MODELS))
def measured(
    name: str, device: torch.device, controls: Controls, steps: int
) -> tuple[Snapshot, int]:
    torch.accelerator.reset_peak_memory_stats()
    bits, _, _ = train(name, device, None, steps)
    peak_bytes = int(torch.accelerator.max_memory_allocated())
    release(controls)
    return bits, peak_bytes


def inside(
    name: str, device: torch.device, controls: Controls, budget_bytes: int, steps: int
) -> tuple[Snapshot, list[int], list[int]]:
    """As `train`, on a device as large as the budget."""
    release(controls)
    controls.capacity(budget_bytes)
    runtime = delta.Runtime(budget_bytes, device=str(device), policy="auto", min_bytes=0)
    try:
        with contextlib.closing(runtime):
            return train(name, device, runtime, steps)
    finally:
        release(controls)


def test_reserved_bytes_come_to_fit_the_budget(segments, device, controls, without_limit):
    """Plans depend on measured seconds, and fragments on plans: one of the models may need longer."""
    came_to: dict[str, float] = {}
    for name in MODELS:
        wanted, peak_bytes = ordinary(name, device, controls)
        budget_bytes = int(0.6 * peak_bytes)
        runtime = delta.Runtime(budget_bytes, device=str(device), policy="auto", min_bytes=0)
        with contextlib.closing(runtime):
            bits, reserved, _ = train(name, device, runtime, STEPS)
            report = runtime.report()
        release(controls)
        assert_same_bits(bits, wanted, name)
        assert max(reserved) > budget_bytes, "else there was nothing to do"
        assert 0 < report.margin_bytes <= budget_bytes / 2
        assert report.reserved_bytes == reserved[-1]
        assert "left to fragments" in str(report)
        came_to[name] = sorted(reserved[-LATE:])[LATE // 2] / budget_bytes
    assert sum(each <= 1.02 for each in came_to.values()) >= len(MODELS) - 1, came_to
    assert max(came_to.values()) <= 1.15, came_to


def test_a_device_as_large_as_the_budget_soon_needs_hardly_any_rescue(
    segments, device, controls, without_limit
):
    came_to: dict[str, tuple[int, int]] = {}
    for name in MODELS:
        wanted, peak_bytes = ordinary(name, device, controls)
        bits, _, rescues = inside(name, device, controls, int(0.6 * peak_bytes), STEPS)
        assert_same_bits(bits, wanted, name)
        early, late = sum(rescues[:LATE]), sum(rescues[-LATE:])
        assert early > 0, "else there was nothing to do"
        came_to[name] = (late, early)
    late, early = (sum(each) for each in zip(*came_to.values(), strict=True))
    assert early >= LATE and late <= 0.3 * early, came_to


@pytest.mark.parametrize("name", ["lstm", "t5"])
def test_a_step_does_not_fill_the_device_again_once_it_was_refused_memory(
    name, segments, device, controls, without_limit
):
    """Else each rescue has all leave, prefetches bring it back, and the next op needs a rescue too: 80 and more."""
    wanted, peak_bytes = ordinary(name, device, controls, steps=2)
    in_first_step = []
    for _ in range(3):  # how many there are depends on how long copies take: 4 to 31, half below 13
        bits, _, rescues = inside(name, device, controls, int(0.6 * peak_bytes), steps=2)
        assert_same_bits(bits, wanted, name)
        in_first_step.append(rescues[0])
    assert min(in_first_step) >= 1
    assert statistics.median(in_first_step) <= 40


@pytest.mark.parametrize(("name", "share"), [("mamba", 0.6), ("whisper", 0.66)])
def test_segments_that_grow_leave_room_where_cut_ones_do_not(
    name, share, segments, device, controls, without_limit
):
    """From the first step on, on a device as large as the budget: cut segments let an op die, growing ones hardly ever.

    What is left between live tensors depends on the seconds that were measured: where segments grow Whisper lacks a
    few kilobytes in one of some 60 trainings at this share, and in one of three at 60 %. Where the allocator keeps to a
    limit it does not (test_reserved_limit.py).
    """
    wanted, peak_bytes = ordinary(name, device, controls, steps=2)

    def trains(*, growing: bool) -> bool:
        controls.fake.set_segments(SCALE_OF_GROWING, expandable=growing)
        try:
            bits, _, _ = inside(name, device, controls, int(share * peak_bytes), steps=2)
        except torch.OutOfMemoryError:
            return False
        assert_same_bits(bits, wanted, name)
        return True

    # One of about 50 gets through where they are cut.
    assert not all(trains(growing=False) for _ in range(3))
    assert sum(trains(growing=True) for _ in range(3)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_model_trains_from_its_first_step_on_where_segments_grow(
    name, segments, device, controls
):
    wanted, peak_bytes = ordinary(name, device, controls, steps=4)
    budget_bytes = int(0.6 * peak_bytes)
    controls.fake.set_segments(SCALE_OF_GROWING, expandable=True)
    bits, reserved, _ = inside(name, device, controls, budget_bytes, steps=4)
    assert_same_bits(bits, wanted, name)
    assert max(reserved) <= budget_bytes


def test_a_runtime_has_the_segments_of_a_card_grow(device, controls, monkeypatch):
    """On a card that cannot, the runtime says so: this test fails there. What the user has said counts for more."""
    if controls.simulated:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            monkeypatch.delenv(name, raising=False)
    elif any("expandable_segments" in value for value in os.environ.values()):
        pytest.skip("the environment says whether segments grow")
    with delta.Runtime("95%", device=str(device)).step():
        held = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    if controls.simulated:
        assert not segments_expand(), "that is a setting of CUDA's allocator"
        return
    assert segments_expand()
    grown = [each for each in torch.cuda.memory_snapshot() if each["is_expandable"]]
    assert any(each["allocated_size"] >= held.nbytes for each in grown)


@pytest.mark.parametrize("policy", ["recompute", "auto"])
def test_a_refused_request_costs_the_rest_of_the_step_nothing(policy, device, controls):
    """Such as a probe for memory that the program catches: what backward needs runs again once, not n times."""
    if not controls.simulated:
        pytest.skip("a card's segments are larger than this network")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24))).to(device)
    x = torch.randn(256, 64).to(device)

    def step(probe_bytes: int) -> None:
        layers.zero_grad(set_to_none=True)
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(probe_bytes, dtype=torch.uint8, device=device)
        h = x
        for layer in layers:
            h = torch.tanh(layer(h))
        h.sum().backward()

    release(controls)
    torch.accelerator.reset_peak_memory_stats()
    step(0)
    peak_bytes = int(torch.accelerator.max_memory_allocated())
    budget_bytes = int(0.7 * peak_bytes)
    release(controls)
    controls.capacity(budget_bytes)
    runtime = delta.Runtime(budget_bytes, device=str(device), policy=policy, min_bytes=0)
    with contextlib.closing(runtime):
        for _ in range(4):
            with runtime.step():
                step(int(0.97 * budget_bytes))
            runtime.wait_for_plan()
            last = runtime.report().last
            assert last.rescues > 0, "else nothing was refused"
            assert last.replayed_ops <= 4 * len(layers)
    release(controls)


def test_what_others_take_between_steps_costs_nothing_for_long(segments, device, controls):
    """As much as the budget, such as for a validation: a margin does not help, and is taken back."""
    name = MODELS[0]
    _, peak_bytes = ordinary(name, device, controls)
    budget_bytes = int(1.6 * peak_bytes)
    runtime = delta.Runtime(budget_bytes, device=str(device), policy="auto", min_bytes=0)
    built = ZOO[name].build(0)
    built.model.to(device)
    with contextlib.closing(runtime):
        for index in range(60):
            torch.empty(budget_bytes, dtype=torch.uint8, device=device)  # and gone again
            batch = moved(built.batch(index))
            built.model.zero_grad(set_to_none=True)
            with runtime.step():
                built.loss(batch).backward()
        report = runtime.report()
    release(controls)
    assert report.margin_bytes == 0
    assert report.last.drops == report.last.swap_outs == 0
    assert report.totals.idle_steps > 5


def test_without_the_margin_more_is_reserved(
    segments, device, controls, monkeypatch, without_limit
):
    """Shows that it is the margin that helps, and not that the cache is given back."""
    monkeypatch.setattr(AllocatorMargin, "_keep_away", lambda self, *_: None)
    _, peak_bytes = ordinary(MODELS[0], device, controls)
    budget_bytes = int(0.6 * peak_bytes)
    runtime = delta.Runtime(budget_bytes, device=str(device), policy="auto", min_bytes=0)
    with contextlib.closing(runtime):
        _, reserved, _ = train(MODELS[0], device, runtime, 12)
    release(controls)
    assert reserved[-1] > 1.05 * budget_bytes

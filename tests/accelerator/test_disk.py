"""Swapping from an accelerator to a disk: same bits whatever the streams do, and what happens when the disk fails.

The host has no room in most of these tests, so that everything goes to the spill file. Does not cover: the file itself,
its space and its speed (tests/act/test_disk.py), and the lanes to host memory (test_lanes.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import delta_runtime as delta
from delta_runtime.act import spill
from delta_runtime.config import Config
from delta_runtime.online.policies import get_policy
from tests.accelerator.test_lanes import (
    MODELS,
    chain_of_sines,
    gradient,
    needs,
    swap_out_a_graph,
    swapper,
    train,
)
from tests.accelerator.test_lanes import delayed as delayed_with
from tests.support.bitwise import assert_same_bits
from tests.support.disk_faults import MIB, cut_and_grown, descriptor, disk, replaced, shifted
from tests.support.managed import sabotage
from tests.support.swapping import lanes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def spiller(device: torch.device, folder: Path, **arguments) -> delta.Runtime:
    """A runtime that swaps to a file of 64 MiB alone."""
    settings = {"host_budget": 1, "spill_dir": str(folder), "disk_budget": "64MiB"}
    return swapper(device, **settings | arguments)


def leaf(device: torch.device) -> torch.Tensor:
    return torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()


@pytest.fixture(params=["O_DIRECT", "page cache"])
def folder(request, tmp_path, monkeypatch) -> Path:
    """Where the spill file goes, with the page cache and without."""
    if request.param == "page cache":
        monkeypatch.setattr(spill, "_use_direct", lambda descriptor: False)
    return tmp_path


# ------------------------------------------------------------------------- bits


@pytest.mark.filterwarnings("ignore:.*the budget of .* was passed:RuntimeWarning")
@pytest.mark.parametrize("policy", ["swap", "delta", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_inside_a_budget(device, controls, folder, name, policy):
    snapshot, base_bytes, peak_bytes = needs(device, name)
    budget_bytes = base_bytes + int(0.7 * (peak_bytes - base_bytes))
    runtime = delta.Runtime(
        budget_bytes,
        device=str(device),
        policy=policy,
        host_budget=1,
        disk_budget="64MiB",
        spill_dir=str(folder),
    )
    assert_same_bits(train(device, name, runtime), snapshot, f"{name} {policy}")
    totals = runtime.report().totals
    assert totals.rebuilds + totals.swap_ins > 0
    if policy == "swap":
        assert totals.drops == 0
        runtime.session.take_in_transfers()
        assert disk(runtime)["in"][1] == totals.swapped_in_bytes > 0
        kind = "O_DIRECT" if runtime.tiers.spill.direct else "page cache"
        assert f"disk ({kind})" in str(runtime.report())
    runtime.close()


@pytest.mark.parametrize("mode", ["swap_all", "mix"])
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_when_everything_leaves(device, controls, folder, name, mode):
    snapshot, _, _ = needs(device, name)
    for seed in range(2):
        policy = dataclasses.replace(get_policy(f"stress_{mode}"), seed=seed)
        runtime = spiller(device, folder, policy=policy, verify="first")
        assert_same_bits(train(device, name, runtime), snapshot, f"{name} {mode} {seed}")
        totals = runtime.report().totals
        assert totals.rebuilds + totals.swap_ins > 10  # "mix" drops some, by chance
        assert totals.swap_ins > (10 if mode == "swap_all" else 0)
        runtime.close()


def test_what_the_host_has_no_room_for_goes_to_disk(device, controls, tmp_path):
    snapshot, base_bytes, peak_bytes = needs(device, "chain")
    runtime = delta.Runtime(
        base_bytes + int(0.6 * (peak_bytes - base_bytes)),
        device=str(device),
        policy="swap",
        host_budget="3MiB",
        disk_budget="64MiB",
        spill_dir=str(tmp_path),
    )
    assert_same_bits(train(device, "chain", runtime), snapshot, "host and disk")
    runtime.session.take_in_transfers()
    host, below = runtime.session.tiers()
    assert host["in"][1] > 0 and below["in"][1] > 0
    assert host["peak_used_bytes"] <= host["cap_bytes"] <= 1 * MIB, "2 MiB stage what goes to disk"
    assert host["in"][1] + below["in"][1] == runtime.report().totals.swapped_in_bytes
    runtime.close()


def test_the_disk_is_not_asked_while_the_host_can_grow(device, controls, tmp_path, monkeypatch):
    """Below a CUDA device host memory is pinned 64 MiB at a time, so that it may have no room for a moment."""
    if controls.simulated:
        pins = (lambda address, bytes_: True, lambda address, bytes_: True)
        monkeypatch.setattr("delta_runtime.runtime.pinning", lambda device: pins)
    runtime = spiller(device, tmp_path, host_budget="130MiB")
    x = torch.linspace(0, 1, 3 << 20).to(device).requires_grad_()  # 12 MiB

    def sines(x: torch.Tensor) -> torch.Tensor:
        for _ in range(14):
            x = x.sin()
        return x.sum()

    with runtime.step():
        loss = sines(x)
        freed_bytes = runtime.session.make_room(1 << 40)
        runtime.session.take_in_transfers()
        host, below = runtime.session.tiers()
        assert freed_bytes > 150 * MIB, "all of it, at once"
        assert host["used_bytes"] > 110 * MIB
        assert 0 < below["used_bytes"] < 50 * MIB, "what the whole of the host has no room for"
        loss.backward()
    other = x.detach().requires_grad_()
    sines(other).backward()
    assert torch.equal(x.grad, other.grad)
    runtime.close()


def test_what_the_host_can_never_hold_takes_none_of_it(device, controls, tmp_path, monkeypatch):
    """One page larger than all of it."""
    pinned: list[int] = []

    def pin(address: int, bytes_: int) -> bool:
        pinned.append(bytes_)
        return True

    monkeypatch.setattr("delta_runtime.runtime.pinning", lambda device: (pin, pin))
    runtime = spiller(device, tmp_path, host_budget="80MiB", disk_budget="128MiB")
    x = torch.linspace(0, 1, 25 << 20).to(device).requires_grad_()  # 100 MiB
    with runtime.step():
        loss = x.sin().sin().sum()
        runtime.session.make_room(1 << 40)
        assert disk(runtime)["used_bytes"] == 100 * MIB
        loss.backward()
    assert sum(pinned) <= (64 + 2) * MIB
    runtime.close()


def test_without_room_on_the_host_the_disk_is_the_nearest_tier(device, controls, tmp_path):
    runtime = spiller(device, tmp_path, policy="delta")
    gradient(device, runtime)
    assert [tier["tier"] for tier in runtime.session.tiers()] == ["disk"]
    links = runtime.steps.pump.links()
    assert links.store_bytes == 64 * MIB and links.out_bytes_per_s > 0 < links.in_bytes_per_s
    runtime.close()


def test_the_environment_can_ask_for_it(device, controls, tmp_path):
    config = Config.from_environment(
        {
            "DELTA_BUDGET": str(1 << 34) if controls.simulated else "90%",
            "DELTA_DEVICE": str(device),
            "DELTA_POLICY": "swap",
            "DELTA_HOST_BUDGET": "1",
            "DELTA_DISK_BUDGET": "32MiB",
            "DELTA_SPILL_DIR": str(tmp_path),
        }
    )
    runtime = delta.Runtime.from_config(config)
    assert torch.equal(gradient(device, runtime), gradient(device, None))
    assert disk(runtime)["cap_bytes"] == 32 * MIB and disk(runtime)["out"][1] >= 5 * MIB
    runtime.close()


# ------------------------------------------------------------------------- streams


def delayed(device, controls, folder, where: str, verify: str = "off") -> torch.Tensor:
    """A gradient with one of the three streams far behind the others."""
    return delayed_with(
        device, controls, where, verify, lambda device, **more: spiller(device, folder, **more)
    )


@pytest.mark.parametrize("where", ["out", "in", "compute"])
def test_a_stream_that_is_late(device, controls, folder, where):
    expected = gradient(device, None)
    for verify in ["off"] * 3 + ["always"]:
        assert torch.equal(delayed(device, controls, folder, where, verify), expected)


def test_a_missing_order_in_shows(device, controls, tmp_path):
    """The first rule of csrc/tiers/staged_lane.h, broken on purpose: the test above can fail."""
    expected = gradient(device, None)
    with sabotage("NoOrderSide"):
        wrong = delayed(device, controls, tmp_path, "compute")
    assert not torch.equal(wrong, expected)


class KeepsACopy(torch.autograd.Function):
    """Saves a copy of its input that no op waits for."""

    @staticmethod
    def forward(ctx, x):
        copy = x.clone()
        ctx.save_for_backward(copy)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        (copy,) = ctx.saved_tensors
        return grad * copy


def settle(runtime: delta.Runtime, x: torch.Tensor) -> None:
    """Runs the steps in which the runtime times ops, for which it waits for the device."""
    for _ in range(5):
        with runtime.step():
            KeepsACopy.apply(x).sum().backward()
        x.grad = None
    torch.accelerator.synchronize()


def late_copy(device, controls, folder, *, elsewhere: bool) -> torch.Tensor:
    """A gradient that is a saved copy, swapped out before the device has made it.

    `elsewhere`: by somebody on another stream than the copy's.
    """
    runtime = spiller(device, folder)
    x = leaf(device)
    other = torch.Stream(device=device)
    settle(runtime, x)
    with runtime.step():
        controls.delay(0.3)
        y = KeepsACopy.apply(x)
        with other if elsewhere else contextlib.nullcontext():
            runtime.session.make_room(1 << 40)
        assert runtime.session.levels().swapped_now_bytes > 0
        y.sum().backward()
    runtime.close()
    return x.grad.cpu()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same stream", "another stream"])
def test_what_the_device_has_yet_to_make(device, controls, folder, elsewhere):
    expected = leaf(device).detach().cpu()
    assert torch.equal(late_copy(device, controls, folder, elsewhere=elsewhere), expected)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same stream", "another stream"])
def test_a_missing_order_out_shows(device, controls, tmp_path, elsewhere):
    with sabotage("NoOrderSide"):
        wrong = late_copy(device, controls, tmp_path, elsewhere=elsewhere)
    assert not torch.equal(wrong, leaf(device).detach().cpu())


def test_what_the_device_had_to_do_before_is_no_time_of_the_lane(device, controls, tmp_path):
    runtime = spiller(device, tmp_path)
    x = leaf(device)
    settle(runtime, x)
    with runtime.step():
        controls.delay(0.3)
        y = KeepsACopy.apply(x)
        runtime.session.make_room(1 << 40)
        runtime.session.take_in_transfers()
        assert 0 < disk(runtime)["out"][2] < 0.2
        assert runtime.session.counters().out_stall_s < 0.2
        y.sum().backward()
    runtime.close()


def test_a_missing_order_is_told_by_evidence(device, controls, tmp_path):
    with sabotage("NoOrderSide"), pytest.raises(delta.RecomputeMismatch, match="swapped out"):
        delayed(device, controls, tmp_path, "compute", verify="first")


def test_waits_for_the_disk_are_counted(device, controls, tmp_path):
    """Whoever needs the memory, or the tensor, stands still meanwhile."""
    if not controls.simulated:
        pytest.skip("a real card may be too quick to tell")
    runtime = spiller(device, tmp_path)
    controls.slow_copies(50e6)  # 20 ms for each page
    loss = swap_out_a_graph(runtime, leaf(device))
    out_stall_s = runtime.session.counters().out_stall_s
    assert out_stall_s > 0.05
    with runtime.step():
        loss.backward()
    assert runtime.session.counters().in_stall_s > 0.01
    runtime.close()


def test_backward_on_another_thread(device, controls, folder):
    controls.slow_copies(100e6)
    runtime = spiller(device, folder)
    x = leaf(device)
    loss = swap_out_a_graph(runtime, x)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad.cpu(), gradient(device, None))
    runtime.close()


def test_a_backward_after_close(device, controls, folder):
    before = lanes()
    runtime = spiller(device, folder)
    x = leaf(device)
    loss = swap_out_a_graph(runtime, x)
    runtime.close()
    assert lanes() == before, "no thread of a lane is left"
    loss.backward()
    assert torch.equal(x.grad.cpu(), gradient(device, None))


# ------------------------------------------------------------------------- faults


@pytest.mark.parametrize("damage", [cut_and_grown, shifted])
def test_what_reads_as_other_bytes_is_recomputed(device, controls, folder, damage):
    runtime = spiller(device, folder)
    x = leaf(device)
    loss = swap_out_a_graph(runtime, x)
    damage(descriptor(runtime))
    warned = pytest.warns(RuntimeWarning, match="not those that were written.* recomputed")
    with warned, runtime.step():
        loss.backward()
        leaf(device).sin().sum().backward()  # the report is of steps that save something
    assert torch.equal(x.grad.cpu(), gradient(device, None))
    counters = runtime.session.counters()
    assert counters.failed_reads > 0 and counters.lost_pages == 0
    runtime.close()


def test_what_can_neither_be_read_nor_recomputed_is_an_error(device, controls, tmp_path):
    runtime = spiller(device, tmp_path)
    x = leaf(device)
    other = torch.ones(1 << 18, device=device)
    with runtime.step():
        loss = chain_of_sines(x + other)
        runtime.session.make_room(1 << 40)
    other.zero_()  # the first sine's argument cannot be made any more
    os.truncate(descriptor(runtime), 0)
    lost = pytest.warns(RuntimeWarning, match=r"\d saved tensors could not be recomputed")
    with lost, runtime.step():
        leaf(device).sin().sum().backward()
        with pytest.raises(delta.SwapFailed, match="cannot be read .*No data available.*spill_dir"):
            loss.backward()
    assert runtime.session.counters().lost_pages > 0
    runtime.close()


def test_a_disk_that_gets_full(device, controls, folder):
    snapshot, base_bytes, peak_bytes = needs(device, "chain")
    runtime = delta.Runtime(
        base_bytes + int(0.7 * (peak_bytes - base_bytes)),
        device=str(device),
        policy="auto",
        host_budget=1,
        disk_budget="64MiB",
        spill_dir=str(folder),
    )
    with (
        replaced(descriptor(runtime), "/dev/full", os.O_RDWR),
        pytest.warns(RuntimeWarning, match="failed: No space left on device"),
    ):
        inside = train(device, "chain", runtime)
    assert_same_bits(inside, snapshot, "a full disk")
    totals = runtime.report().totals
    assert totals.failed_writes > 0 and totals.swap_outs == 0 and totals.lost_pages == 0
    runtime.close()


@pytest.mark.filterwarnings("ignore:delta_runtime. copying:RuntimeWarning")
@pytest.mark.parametrize("way", ["out", "in"])
def test_what_was_under_way_is_recomputed_when_the_device_fails(
    device, controls, tmp_path, failing, way
):
    """No chunk goes through while nothing is known of the stream; the program's own steps go on."""
    runtime = spiller(device, tmp_path)
    x = leaf(device)
    controls.slow_copies(20e6)
    if way == "out":
        with runtime.step():
            loss = chain_of_sines(x)
            torch.accelerator.synchronize()
            failing(True)
            runtime.session.make_room(1 << 40)
            failing(False)
        assert runtime.session.counters().failed_writes > 0
    else:
        loss = swap_out_a_graph(runtime, x)
        torch.accelerator.synchronize()
        node = loss.grad_fn.next_functions[0][0].next_functions[0][0]

        def fail(_: object) -> None:
            failing(True)
            healer.start()

        def heal() -> None:
            due_s = time.monotonic() + 30
            while not runtime.session.counters().failed_reads and time.monotonic() < due_s:
                time.sleep(0.01)
            failing(False)

        healer = threading.Thread(target=heal)
        node.register_prehook(fail)
    controls.slow_copies(0 if way == "out" else 20e6)
    with runtime.step():
        loss.backward()
    failing(False)
    assert torch.equal(x.grad.cpu(), gradient(device, None))
    if way == "in":
        assert runtime.session.counters().failed_reads > 0
    runtime.close()

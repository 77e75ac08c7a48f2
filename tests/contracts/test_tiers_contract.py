"""What every tier below the device must keep: its store and both of its lanes, as a graph meets them.

Host memory, a file through the page cache, and a file without it. An accelerator's lanes keep the same in
tests/accelerator/test_lanes.py; what is of one tier alone is in tests/act.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import delta_runtime as delta
from delta_runtime.act import spill
from tests.support.bitwise import assert_same_bits
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.swapping import (
    LAYER_BYTES,
    budget,
    expected_gradient,
    lanes,
    ordinary_run,
    sines,
    swap_out_a_graph,
    train,
)

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20
TIERS = ("host", "disk", "disk without the page cache")
Make = Callable[..., delta.Runtime]


@pytest.fixture(scope="module")
def ordinary():
    return ordinary_run()


@pytest.fixture(params=TIERS)
def make(request, tmp_path, monkeypatch) -> Make:
    """Makes a runtime that swaps to one tier alone: `make(budget, size)`."""

    def of_host(budget_bytes: int | str, size: str = "64MiB", **more: object) -> delta.Runtime:
        return delta.Runtime(budget_bytes, device="cpu", policy="swap", host_budget=size, **more)

    def of_disk(budget_bytes: int | str, size: str = "64MiB", **more: object) -> delta.Runtime:
        more |= {"spill_dir": str(tmp_path), "disk_budget": size}
        if "link_bytes_per_s" in more:
            more["host_budget"] = 1  # what is behind a link has host memory there, by itself
        runtime = delta.Runtime(budget_bytes, device="cpu", policy="swap", **more)
        if runtime.tiers.spill.direct != (request.param == TIERS[2]):
            runtime.close()
            pytest.skip("this file system has no O_DIRECT")
        return runtime

    if request.param == "disk":
        monkeypatch.setattr(spill, "_use_direct", lambda descriptor: False)
    return of_host if request.param == "host" else of_disk


def usage(runtime: delta.Runtime) -> dict:
    """Of the tier that is tried: the last one."""
    return runtime.session.tiers()[-1]


def test_what_comes_back_has_the_bits_that_went(make, ordinary):
    runtime = make(budget(ordinary, 0.6))
    assert_same_bits(train(runtime), ordinary[0], "swapped")
    totals = runtime.report().totals
    assert totals.swap_ins > 10 and totals.drops == 0
    runtime.close()


def test_each_byte_over_the_lanes_is_counted(make, ordinary):
    runtime = make(budget(ordinary, 0.6))
    train(runtime)
    runtime.session.take_in_transfers()
    totals, tier = runtime.report().totals, usage(runtime)
    for lane in ("out", "in"):
        transfers, moved_bytes, busy_s, queued_bytes = tier[lane]
        assert moved_bytes >= transfers > 0 and busy_s > 0 and queued_bytes == 0
    assert tier["in"][1] == totals.swapped_in_bytes
    # A copy that nobody needs any more does not run.
    assert totals.swapped_out_bytes / 2 < tier["out"][1] <= totals.written_back_bytes
    runtime.close()


def test_no_block_is_held_once_its_graph_is_gone(make):
    runtime = make("100%")
    loss, x = swap_out_a_graph(runtime)
    assert usage(runtime)["used_bytes"] >= 5 * MIB
    del loss, x
    runtime.session.take_in_transfers()
    assert usage(runtime)["used_bytes"] == 0
    runtime.close()


@pytest.mark.filterwarnings("ignore:delta_runtime. the budget of")
def test_no_more_is_taken_than_it_may_hold(make, ordinary):
    runtime = make(budget(ordinary, 0.8), "3MiB")
    assert_same_bits(train(runtime), ordinary[0], "some of it swapped")
    tier = usage(runtime)
    assert tier["peak_used_bytes"] <= tier["cap_bytes"] <= 3 * MIB
    assert tier["refusals"] > 0 and runtime.report().totals.swap_refusals > 0
    runtime.close()


def test_sizes_that_are_no_multiple_of_anything(make):
    runtime = make("100%")
    sizes = (1, 3, 4093, 4097, 70_001)
    leaves = [torch.linspace(0, 1, 1024 + n, requires_grad=True) for n in sizes]
    with runtime.step():
        loss = sum(x.sin().exp().sum() for x in leaves)
        runtime.session.make_room(1 << 40)
        assert runtime.session.levels().swapped_now_bytes > 0
        loss.backward()
    for x in leaves:
        y = x.detach().requires_grad_()
        y.sin().exp().sum().backward()
        assert torch.equal(x.grad, y.grad)
    runtime.close()


def test_asked_for_by_several_threads_at_once(make):
    runtime = make("100%")
    loss, x = swap_out_a_graph(runtime)
    threads = [threading.Thread(target=lambda: loss.backward(retain_graph=True)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(x.grad / 4, expected_gradient())
    runtime.close()


def test_it_gives_back_what_it_holds_after_the_runtime_is_closed(make):
    before = lanes()
    runtime = make("100%")
    loss, x = swap_out_a_graph(runtime)
    runtime.close()
    assert lanes() == before, "no thread of a lane is left"
    loss.backward()
    assert torch.equal(x.grad, expected_gradient())


def test_a_throttle_bounds_both_directions(make):
    bytes_per_s = 64 * MIB
    runtime = make("100%", link_bytes_per_s=bytes_per_s)
    with runtime.step():
        loss, _ = sines()
        runtime.session.make_room(1 << 40)
        loss.backward()
    runtime.session.take_in_transfers()
    tier = usage(runtime)
    for lane in ("out", "in"):
        _, moved_bytes, busy_s, _ = tier[lane]
        assert moved_bytes >= 5 * LAYER_BYTES and busy_s >= 0.9 * moved_bytes / bytes_per_s
    runtime.close()

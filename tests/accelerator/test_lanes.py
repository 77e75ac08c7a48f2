"""Dropping and swapping on an accelerator: same bits whatever the streams do, and proof that a missing order shows.

Small networks; on the simulated device freed memory is poisoned and copies are slow. Does not cover: speed, real
models, whatever only a real card's allocator or kernels do, and the disk (test_disk.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import time

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime.act.links import PROFILES, flops_per_s, own_link_bytes_per_s
from delta_runtime.online.policies import get_policy
from tests.support.bitwise import Snapshot, assert_same_bits, freeze, prefixed
from tests.support.managed import STREAM_SABOTAGES, poisoned_host_memory, sabotage

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

WIDTH, ROWS, LAYERS = 64, 1024, 8
LAYER_BYTES = 4 * WIDTH * ROWS


class Chain(nn.Module):
    """Linear layers with everything between them that autograd saves something for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.dropout(nn.functional.gelu(norm(layer(x))), 0.1)
        return x.square().mean()


class Pictures(nn.Module):
    """A convolution, batch norm, a stride that is none of the default ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(32, 3, 16, -1).to(memory_format=torch.channels_last)
        x = torch.relu(self.norm(self.first(x)))
        x = nn.functional.max_pool2d(torch.relu(self.second(x)), 2)
        return self.head(x.mean((2, 3))).square().sum()


MODELS = {"chain": (Chain, (ROWS, WIDTH)), "pictures": (Pictures, (32, 3 * 16 * 16))}


def train(
    device: torch.device, name: str = "chain", runtime: delta.Runtime | None = None, steps: int = 4
) -> Snapshot:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    model = build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    snapshot: Snapshot = {}
    for index in range(steps):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(index)).to(device)
        optimizer.zero_grad(set_to_none=True)
        with runtime.step() if runtime else contextlib.nullcontext():
            loss = model(x)
            loss.backward()
        named = {key: p.grad.cpu() for key, p in model.named_parameters()}
        frozen = {key: freeze(value) for key, value in named.items()}
        snapshot |= prefixed(f"step {index}", {"loss": freeze(loss.cpu())} | frozen)
        optimizer.step()
        del loss
    return snapshot


def needs(device: torch.device, name: str) -> tuple[Snapshot, int, int]:
    """An ordinary run: its bits, what lived before, and its peak."""
    train(device, name, steps=1)  # workspaces of libraries come once, and stay
    gc.collect()
    torch.accelerator.synchronize()
    base_bytes = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    snapshot = train(device, name)
    return snapshot, base_bytes, torch.accelerator.max_memory_allocated(device)


@pytest.mark.filterwarnings("ignore:.*the budget of .* was passed:RuntimeWarning")
@pytest.mark.parametrize("slow", [False, True], ids=["fast copies", "slow copies"])
@pytest.mark.parametrize("policy", ["recompute", "swap", "delta", "capuchin", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_inside_a_budget(device, controls, name, policy, slow):
    snapshot, base_bytes, peak_bytes = needs(device, name)
    budget_bytes = base_bytes + int(0.7 * (peak_bytes - base_bytes))
    controls.slow_copies(200e6 if slow else 0)
    runtime = delta.Runtime(budget_bytes, device=str(device), policy=policy, host_budget="256MiB")
    assert_same_bits(train(device, name, runtime), snapshot, f"{name} {policy}")
    totals = runtime.report().totals
    assert totals.rebuilds + totals.swap_ins > 0
    if policy in ("recompute", "swap"):
        assert (totals.swap_ins > 0) == (policy == "swap"), totals
    runtime.close()


@pytest.mark.parametrize("mode", ["swap_all", "mix", "drop_all"])
@pytest.mark.parametrize("name", MODELS)
def test_same_bits_when_everything_leaves(device, controls, name, mode):
    snapshot, _, _ = needs(device, name)
    controls.slow_copies(500e6)
    for seed in range(3):
        policy = dataclasses.replace(get_policy(f"stress_{mode}"), seed=seed)
        runtime = delta.Runtime(
            device=str(device), policy=policy, min_bytes=0, host_budget="256MiB"
        )
        with poisoned_host_memory():
            assert_same_bits(train(device, name, runtime), snapshot, f"{name} {mode} {seed}")
        totals = runtime.report().totals
        assert totals.rebuilds + totals.swap_ins > 10
        runtime.close()


def chain_of_sines(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(6):
        y = y.sin()
    return y.sum()


def swap_out_a_graph(runtime: delta.Runtime, x: torch.Tensor, early=lambda: None) -> torch.Tensor:
    with runtime.step():
        loss = chain_of_sines(x)
        early()
        runtime.session.make_room(1 << 40)
    assert runtime.session.levels().swapped_now_bytes > 0
    return loss


def swapper(device: torch.device, **arguments) -> delta.Runtime:
    """Without evidence: on the simulated device whoever hashes waits for the stream, and no race is left to see."""
    settings = {
        "device": str(device),
        "policy": "swap",
        "host_budget": "256MiB",
        "min_bytes": 0,
        "verify": "off",
    }
    return delta.Runtime(1 << 34 if device.type == "fake" else "90%", **settings | arguments)


def gradient(
    device: torch.device, runtime: delta.Runtime | None, early=lambda: None, late=lambda: None
) -> torch.Tensor:
    """Of a chain that was swapped out whole; then other tensors take the memory that came free, and fill it with NaN.

    `early` is called right before the pages leave, `late` in backward, before those others are filled with NaN once
    more and give the memory back, and the first page returns.
    """
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()
    if runtime is None:
        chain_of_sines(x).backward()
        return x.grad.cpu()
    loss = swap_out_a_graph(runtime, x, early)
    others = [torch.full((1 << 18,), torch.nan, device=device) for _ in range(6)]

    def give_back(_) -> None:
        late()
        # Behind what `late` has queued, on the simulated device too. The runtime must not see it: it times what it
        # sees in its first steps, and waits for the device to do so.
        unseen = threading.Thread(target=lambda: [t.copy_(others[0]) for t in others[1:]])
        unseen.start()
        unseen.join()
        others.clear()

    loss.grad_fn.register_prehook(give_back)
    with runtime.step():
        loss.backward()
    assert not others
    return x.grad.cpu()


def test_a_graph_that_was_swapped_out_whole(device, controls):
    expected = gradient(device, None)
    controls.slow_copies(50e6)
    runtime = swapper(device)
    assert torch.equal(gradient(device, runtime, late=lambda: controls.delay(0.3)), expected)
    counters = runtime.session.counters()
    assert counters.swap_outs >= 5 and counters.swap_ins >= 5
    runtime.close()


def delayed(device, controls, where: str, verify: str = "off", make=swapper) -> torch.Tensor:
    """A gradient with one of the three streams far behind the others, in a runtime that `make` makes."""
    runtime = make(device, verify=verify)
    early = late = lambda: None
    if where == "out":
        early = lambda: controls.delay_lane(runtime, "out", 0.3)  # noqa: E731
    elif where == "in":
        late = lambda: controls.delay_lane(runtime, "in", 0.3)  # noqa: E731
    else:
        late = lambda: controls.delay(0.3)  # noqa: E731
    with poisoned_host_memory():
        found = gradient(device, runtime, early, late)
    torch.accelerator.synchronize()
    counters = runtime.session.counters()
    assert counters.swap_outs >= 5 and counters.swap_ins >= 5
    runtime.close()
    return found


WHERE_IT_SHOWS = {
    "NoOrderOut": "out",
    "NoOrderIn": "in",
    "NoOrderSide": "compute",
}


@pytest.mark.parametrize("where", WHERE_IT_SHOWS.values())
def test_a_stream_that_is_late(device, controls, where):
    expected = gradient(device, None)
    for verify in ["off"] * 5 + ["always"]:
        assert torch.equal(delayed(device, controls, where, verify), expected)


@pytest.mark.parametrize("which", STREAM_SABOTAGES)
def test_a_missing_order_shows(device, controls, which):
    """Each rule of csrc/tiers/stream_lane.h, broken on purpose, gives wrong gradients: the test above can fail."""
    expected = gradient(device, None)
    with sabotage(which):
        wrong = delayed(device, controls, WHERE_IT_SHOWS[which])
    assert not torch.equal(wrong, expected)


@pytest.mark.parametrize("which", STREAM_SABOTAGES)
def test_a_missing_order_is_told_by_evidence(device, controls, which):
    with sabotage(which), pytest.raises(delta.RecomputeMismatch, match="swapped out"):
        delayed(device, controls, WHERE_IT_SHOWS[which], verify="first")


def test_what_was_used_on_two_streams_stays(device, controls):
    runtime = swapper(device)
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()
    other = torch.Stream(device=device)
    with runtime.step():
        y = x.sin()
        other.wait_stream(torch.accelerator.current_stream())
        with other:
            z = y.exp()  # saves z, and reads y
        torch.accelerator.current_stream().wait_stream(other)
        loss = (y.cos() * z.cos()).sum()
        del y, z
        runtime.session.make_room(1 << 40)
        kept_bytes = runtime.session.levels().managed_resident_bytes
        loss.backward()
    assert kept_bytes >= 2 * (1 << 20), "y and z were used on two streams"
    x2 = x.detach().requires_grad_()
    y = x2.sin()
    (y.cos() * y.exp().cos()).sum().backward()
    assert torch.equal(x.grad.cpu(), x2.grad.cpu())
    runtime.close()


def test_the_host_does_not_wait_for_slow_copies(device, controls):
    """Eviction makes the device wait, not the program."""
    if not controls.simulated:
        pytest.skip("a real card may be too quick to tell")
    runtime = swapper(device)
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()
    with runtime.step():
        loss = chain_of_sines(x)
        torch.accelerator.synchronize()
        controls.slow_copies(10e6)  # 0.1 s for each page
        begin = time.perf_counter()
        runtime.session.make_room(1 << 40)
        took_s = time.perf_counter() - begin
    assert runtime.session.levels().swapped_now_bytes >= 5 << 20
    assert took_s < 0.2
    controls.slow_copies(0)
    loss.backward()
    runtime.close()


def test_host_memory_is_given_back(device, controls):
    gc.collect()
    before_bytes = torch.accelerator.memory_allocated(device)
    runtime = swapper(device)
    for _ in range(3):
        gradient(device, runtime)
    torch.accelerator.synchronize()
    runtime.session.take_in_transfers()
    (tier,) = runtime.session.tiers()
    assert tier["used_bytes"] == 0 and tier["peak_used_bytes"] >= 5 << 20
    assert tier["out"][1] >= 15 << 20 and tier["in"][1] >= 15 << 20
    assert tier["out"][2] > 0
    gc.collect()
    live_bytes = torch.accelerator.memory_allocated(device)
    runtime.close()
    assert live_bytes <= before_bytes + (2 << 20)
    pinned = device.type == "cuda"
    assert ("pinned host memory" if pinned else "host memory") in str(runtime.report())


def test_a_backward_after_close(device, controls):
    runtime = swapper(device)
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()
    loss = swap_out_a_graph(runtime, x)
    runtime.close()
    loss.backward()
    assert torch.equal(x.grad.cpu(), gradient(device, None))


def test_backward_on_another_thread(device, controls):
    controls.slow_copies(100e6)
    runtime = swapper(device)
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()
    loss = swap_out_a_graph(runtime, x)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(x.grad.cpu(), gradient(device, None))
    runtime.close()


def test_the_budget_holds_where_looking_ahead_can_see(device, controls):
    snapshot, base_bytes, peak_bytes = needs(device, "chain")
    budget_bytes = base_bytes + int(0.7 * (peak_bytes - base_bytes))
    for policy in ("recompute", "swap", "auto"):
        runtime = delta.Runtime(
            budget_bytes, device=str(device), policy=policy, host_budget="256MiB"
        )
        train(device, "chain", runtime, steps=4)
        torch.accelerator.reset_peak_memory_stats(device)
        with runtime.step():
            pass
        assert_same_bits(train(device, "chain", runtime, steps=4), snapshot, policy)
        over = torch.accelerator.max_memory_allocated(device) / budget_bytes
        assert over <= 1.05, f"{policy}: {over:.3f}"
        runtime.close()


@pytest.mark.parametrize("times", [4.5, 20.0])
@pytest.mark.parametrize("count", [1 << 18, 1 << 14], ids=["megabytes", "less"])
def test_a_lane_keeps_to_its_throttle(device, controls, times, count):
    """By more bytes that cross the link: copies of a given speed take so many times as long.

    The simulated device tells how many bytes crossed, and how long that took: a busy machine makes it slower.
    """
    x = torch.linspace(0, 1, count).to(device).requires_grad_()
    chain_of_sines(x).backward()
    expected, x.grad = x.grad, None
    own = own_link_bytes_per_s(device)
    link = min(own) / times
    runtime = swapper(device, link_bytes_per_s=link)
    slow = 20e6
    controls.slow_copies(slow)
    if controls.simulated:
        before, before_s = controls.copied_bytes(runtime), controls.copy_s(runtime)
    loss = swap_out_a_graph(runtime, x)
    with runtime.step():
        loss.backward()
    torch.accelerator.synchronize()
    runtime.session.take_in_transfers()
    if controls.simulated:
        after, after_s = controls.copied_bytes(runtime), controls.copy_s(runtime)
    for i, lane in enumerate(("out", "in")):
        _, moved_bytes, busy_s, _ = runtime.session.tiers()[0][lane]
        assert moved_bytes >= 5 * x.nbytes
        if controls.simulated:
            crossings = own[i] / link
            assert after[i] - before[i] == pytest.approx(moved_bytes * crossings, rel=1e-3)
            assert moved_bytes / busy_s <= 1.02 * slow / crossings
            assert busy_s == pytest.approx(after_s[i] - before_s[i], rel=0.1)
        else:  # a card's latency counts, and what else is on its link
            assert moved_bytes / busy_s == pytest.approx(link, rel=0.5)
    assert torch.equal(x.grad.cpu(), expected.cpu())
    runtime.close()


def test_a_card_by_name_has_its_ratio_on_the_device_at_hand(device, controls):
    own = own_link_bytes_per_s(device)
    speeds = {name: each.bytes_per_flop * flops_per_s(device) for name, each in PROFILES.items()}
    possible = [name for name in speeds if max(own) / 60 < speeds[name] < min(own)]
    assert possible or not controls.simulated
    for name in possible:
        runtime = swapper(device, link_bytes_per_s=name)
        assert runtime.tiers.link_bytes_per_s == speeds[name]
        assert runtime.tiers.crossings_out == own[0] / speeds[name]
        runtime.close()


@pytest.mark.parametrize(("link", "why"), [(1e15, "faster than the"), (1e3, "64 times slower")])
def test_a_link_that_it_cannot_have_is_refused(device, link, why):
    with pytest.raises(delta.UsageError, match=why):
        delta.Runtime("95%", device=str(device), link_bytes_per_s=link)


@pytest.mark.filterwarnings("ignore:delta_runtime. copying:RuntimeWarning")
def test_a_device_that_fails_kills_nobody(device, controls, failing):
    """Copies that were under way are none then; the program's own error stands, and the next runtime works."""
    runtime = swapper(device)
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()

    def step() -> None:
        with runtime.step():
            loss = chain_of_sines(x)
            runtime.session.make_room(1 << 40)
            failing(True)
            del loss
            gc.collect()
            raise KeyError("the program's own")

    controls.slow_copies(20e6)
    with pytest.raises(KeyError, match="the program's own"):
        step()
    failing(False)
    controls.slow_copies(0)
    torch.accelerator.synchronize()
    assert runtime.session.counters().failed_writes > 0
    with runtime.step():
        chain_of_sines(x).backward()
    runtime.close()
    other = swapper(device)
    assert torch.equal(gradient(device, other), x.grad.cpu())
    other.close()


@pytest.mark.filterwarnings("ignore:delta_runtime. copying:RuntimeWarning")
def test_what_was_on_its_way_back_is_recomputed_when_the_device_fails(device, controls, failing):
    runtime = swapper(device)
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()
    loss = swap_out_a_graph(runtime, x)
    torch.accelerator.synchronize()
    runtime.session.take_in_transfers()

    def fail(_: object) -> None:
        failing(True)
        runtime.session.take_in_transfers()
        failing(False)

    controls.slow_copies(20e6)
    node = loss.grad_fn.next_functions[0][0].next_functions[0][0]
    node.register_prehook(fail)
    with runtime.step():
        loss.backward()
    controls.slow_copies(0)
    torch.accelerator.synchronize()
    assert runtime.session.counters().failed_reads > 0
    assert torch.equal(x.grad.cpu(), gradient(device, None))
    runtime.close()


def fail_for_a_moment(runtime: delta.Runtime, failing) -> None:
    """The device answers nothing while the runtime asks what has become of its copies."""
    failing(True)
    runtime.session.take_in_transfers()
    failing(False)


@pytest.mark.filterwarnings("ignore:delta_runtime. copying:RuntimeWarning")
def test_what_was_on_its_way_out_is_recomputed_when_the_device_fails(device, controls, failing):
    """Its memory was given away already: what comes next on that stream waits for the copy."""
    runtime = swapper(device)
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()
    controls.slow_copies(20e6)
    loss = swap_out_a_graph(runtime, x)
    fail_for_a_moment(runtime, failing)
    controls.slow_copies(0)
    assert runtime.session.counters().failed_writes > 0
    assert runtime.session.levels().swapped_now_bytes == 0
    with runtime.step():
        loss.backward()
    assert torch.equal(x.grad.cpu(), gradient(device, None))
    runtime.close()


@pytest.mark.filterwarnings("ignore:delta_runtime. copying:RuntimeWarning")
def test_what_was_on_its_way_out_and_has_no_recipe_is_told_when_the_device_fails(
    device, controls, failing
):
    runtime = swapper(device)
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()
    other = torch.ones(1 << 18, device=device)
    controls.slow_copies(20e6)
    with runtime.step():
        loss = chain_of_sines(x + other)
        runtime.session.make_room(1 << 40)
    other.zero_()  # the first sine's argument cannot be made any more
    fail_for_a_moment(runtime, failing)
    controls.slow_copies(0)
    with (
        runtime.step(),
        pytest.raises(delta.SwapFailed, match="the device failed.*Start the program again"),
    ):
        loss.backward()
    counters = runtime.session.counters()
    assert counters.failed_writes > 0 and counters.lost_pages > 0
    runtime.close()


@pytest.mark.filterwarnings("ignore:delta_runtime. copying:RuntimeWarning")
def test_a_copy_that_is_given_up_writes_into_nobodys_memory(device, controls, failing):
    """The device may only have been deaf for a moment: the copy goes on, and its memory has another owner."""
    runtime = swapper(device)
    x = torch.linspace(0, 1, 1 << 18).to(device).requires_grad_()
    loss = swap_out_a_graph(runtime, x)
    torch.accelerator.synchronize()
    runtime.session.take_in_transfers()
    others = []

    def fail(_: object) -> None:
        fail_for_a_moment(runtime, failing)
        others.extend(torch.ones(1 << 18, device=device) for _ in range(6))

    controls.slow_copies(20e6)
    loss.grad_fn.next_functions[0][0].next_functions[0][0].register_prehook(fail)
    with runtime.step():
        loss.backward()
    controls.slow_copies(0)
    torch.accelerator.synchronize()
    assert runtime.session.counters().failed_reads > 0
    assert [bool(each.eq(1.0).all()) for each in others] == [True] * 6
    runtime.close()

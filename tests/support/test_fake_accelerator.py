"""The simulated accelerator that tests of streams and events use: does it compute, has it the hazards of CUDA?

Everything runs in one subprocess, because loading the backend changes torch for the rest of the process. The process
runs every function named check_... below and prints one line of JSON for each.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.fake_accelerator import FakeAccelerator, can_compile, load

ROOT = Path(__file__).resolve().parents[2]
COUNT = 1 << 16  # elements of the tensors that the checks of races copy
SECONDS = 0.4  # how long such a copy takes; the racing thread has half of it


def side_stream() -> torch.Stream:
    return torch.Stream(device="fake")


def check_is_the_current_accelerator(fake: FakeAccelerator) -> None:
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None and accelerator.type == "fake"
    assert torch.accelerator.device_count() == 1
    assert torch.ones(2).to("fake").device == torch.device("fake:0")


def check_stream_context_changes_the_current_stream(fake: FakeAccelerator) -> None:
    side = side_stream()
    assert side.stream_id != 0 and fake.current_stream_id() == 0
    with side:
        assert fake.current_stream_id() == side.stream_id
        assert torch.accelerator.current_stream() == side
    assert fake.current_stream_id() == 0


def check_current_stream_belongs_to_the_thread(fake: FakeAccelerator) -> None:
    seen = []
    with side_stream():
        thread = threading.Thread(target=lambda: seen.append(fake.current_stream_id()))
        thread.start()
        thread.join()
    assert seen == [0]


def check_streams_do_not_wait_for_each_other(fake: FakeAccelerator) -> None:
    side = side_stream()
    begin = time.monotonic()
    fake.delay(side.stream_id, 0.3)
    torch.accelerator.current_stream().synchronize()
    assert not side.query()
    side.synchronize()
    assert time.monotonic() - begin >= 0.3 and side.query()


def check_synchronize_waits_for_every_stream(fake: FakeAccelerator) -> None:
    side = side_stream()
    begin = time.monotonic()
    fake.delay(side.stream_id, 0.1)
    torch.accelerator.synchronize()
    assert time.monotonic() - begin >= 0.1


def check_event_query_and_synchronize(fake: FakeAccelerator) -> None:
    side, event = side_stream(), torch.Event(device="fake")
    assert event.query()  # never recorded
    fake.delay(side.stream_id, 0.1)
    event.record(side)
    assert not event.query()
    event.synchronize()
    assert event.query()


def check_event_measures_time(fake: FakeAccelerator) -> None:
    side = side_stream()
    first, second = (torch.Event(device="fake", enable_timing=True) for _ in range(2))
    first.record(side)
    fake.delay(side.stream_id, 0.1)
    second.record(side)
    second.synchronize()
    assert 100 <= first.elapsed_time(second) < 1000


def check_event_holds_back_another_stream(fake: FakeAccelerator) -> None:
    first, second, event = side_stream(), side_stream(), torch.Event(device="fake")
    fake.delay(first.stream_id, 0.1)
    event.record(first)
    second.wait_event(event)
    assert not second.query()
    second.synchronize()
    assert event.query()


def check_wait_means_the_recording_before_it(fake: FakeAccelerator) -> None:
    first, second, event = side_stream(), side_stream(), torch.Event(device="fake")
    event.record(first)
    second.wait_event(event)
    fake.delay(first.stream_id, 0.3)
    event.record(first)
    second.synchronize()
    assert not event.query()
    torch.accelerator.synchronize()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train_mlp(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    model = Mlp().to("fake")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, labels = torch.randn(16, 8, device="fake"), torch.randint(4, (16,), device="fake")
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), labels)
        loss.backward()
        assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
        optimizer.step()
        losses.append(loss.detach().cpu())
    return [*losses, *(parameter.detach().cpu() for parameter in model.parameters())]


def check_training_is_reproducible(fake: FakeAccelerator) -> None:
    first, second, other = train_mlp(0), train_mlp(0), train_mlp(1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])
    assert first[3] < first[0]


def same_gradients(model: nn.Module, x: torch.Tensor) -> None:
    """The model's gradients on the device are those on the CPU."""
    on_device = copy.deepcopy(model).to("fake")
    model(x).square().sum().backward()
    on_device(x.to("fake")).square().sum().backward()
    for (name, ours), theirs in zip(on_device.named_parameters(), model.parameters(), strict=True):
        assert ours.grad.device.type == "fake"
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")
    for ours, theirs in zip(on_device.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


def check_convolutional_network(fake: FakeAccelerator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 6)
    )
    same_gradients(model, torch.randn(2, 3, 10, 10))


def check_attention(fake: FakeAccelerator) -> None:
    torch.manual_seed(0)
    host = [torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3)]
    ours = [tensor.detach().to("fake").requires_grad_() for tensor in host]
    for tensors in (host, ours):
        functional.scaled_dot_product_attention(*tensors, is_causal=True).square().sum().backward()
    for a, b in zip(ours, host, strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad)


def check_embedding(fake: FakeAccelerator) -> None:
    torch.manual_seed(0)
    same_gradients(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3)), torch.tensor([1, 5, 1, 0]))


def check_lstm(fake: FakeAccelerator) -> None:
    class LastState(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 5, num_layers=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, (_, cell) = self.lstm(x)
            return torch.cat([out, cell])

    torch.manual_seed(0)
    same_gradients(LastState(), torch.randn(3, 2, 4))


def check_views_share_memory(fake: FakeAccelerator) -> None:
    x = torch.zeros(4, 6, device="fake")
    for view in (x.t()[1:3], x.view(2, 12)[1], x.unfold(1, 2, 1)[0], x.diagonal()):
        x.zero_()
        view.fill_(1)
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert x.sum().item() > 0
        assert torch.equal(view.cpu(), torch.ones(view.shape))


def check_results_written_to_arguments(fake: FakeAccelerator) -> None:
    x = torch.arange(6.0, device="fake")
    out = torch.empty(0, device="fake")
    assert torch.add(x, 1, out=out) is out  # has to grow
    assert out.tolist() == [1, 2, 3, 4, 5, 6]
    values = torch.empty(6, device="fake")[::2]
    torch.mul(x[:3], 2, out=values)  # has gaps
    assert values.tolist() == [0, 2, 4]
    x[torch.tensor([0, 5], device="fake")] = 9
    torch._foreach_add_([x, out], 1)
    assert x.tolist() == [10, 2, 3, 4, 5, 10] and out.tolist() == [2, 3, 4, 5, 6, 7]


def check_arguments_on_the_host_are_refused(fake: FakeAccelerator) -> None:
    x = torch.ones(3, device="fake")
    assert (x * torch.tensor(2.0)).tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)


def check_copies_of_every_kind(fake: FakeAccelerator) -> None:
    host = torch.randn(6, 8)
    x = host.to("fake")
    assert torch.equal(x.cpu(), host)
    assert torch.equal(x.t().cpu(), host.t())
    assert torch.equal(x.half().cpu(), host.half())
    assert torch.equal(x[:, ::2].clone().cpu(), host[:, ::2])
    strided = torch.zeros(8, 6).t()
    strided.copy_(x)
    assert torch.equal(strided, host)
    strided = torch.zeros(12, 8, device="fake")[::2]
    strided.copy_(host)
    assert torch.equal(strided.cpu(), host)


def check_generator_is_the_devices_own(fake: FakeAccelerator) -> None:
    torch.manual_seed(5)
    host_state = torch.get_rng_state()
    state = torch.fake.get_rng_state()
    x = torch.ones(100, device="fake")
    first = functional.dropout(x, 0.5), torch.rand(3, device="fake")
    assert torch.equal(torch.get_rng_state(), host_state)
    torch.fake.set_rng_state(state)
    second = functional.dropout(x, 0.5), torch.rand(3, device="fake")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], functional.dropout(x, 0.5))
    generator = torch.Generator(device="fake").manual_seed(3)
    drawn = torch.randn(3, device="fake", generator=generator)
    assert torch.equal(drawn, torch.randn(3, device="fake", generator=generator.manual_seed(3)))


def check_copies_are_asynchronous(fake: FakeAccelerator) -> None:
    before, side = fake.copies(), side_stream()
    x, host = torch.ones(COUNT, device="fake"), torch.zeros(COUNT)
    torch.accelerator.synchronize()
    fake.set_copy_bytes_per_s(x.nbytes / SECONDS, side.stream_id)
    begin = time.monotonic()
    with side:
        host.copy_(x, non_blocking=True)
    assert not side.query() and not host.any()
    side.synchronize()
    assert time.monotonic() - begin >= SECONDS and host.all() and fake.copies() == before + 1
    with side:
        host.copy_(x)
    assert side.query() and time.monotonic() - begin >= 2 * SECONDS and fake.copies() == before + 1


def copy_out_while_the_source_is_freed(fake: FakeAccelerator, how: str) -> torch.Tensor:
    """What arrives of a tensor of ones that is freed, and its memory filled with twos, while a copy is under way."""
    side, event = side_stream(), torch.Event(device="fake")
    x, host = torch.ones(COUNT, device="fake"), torch.zeros(COUNT)
    torch.accelerator.synchronize()
    fake.set_copy_bytes_per_s(x.nbytes / SECONDS, side.stream_id)
    with side:
        host.copy_(x, non_blocking=True)
        event.record(side)
    if how == "event":
        torch.accelerator.current_stream().wait_event(event)
    if how == "record_stream":
        x.record_stream(side)
    address = x.data_ptr()
    del x
    y = torch.empty(COUNT, device="fake")
    assert (y.data_ptr() == address) == (how != "record_stream")
    if how != "poison":
        y.fill_(2)
        assert (y == 2).all()
    side.synchronize()
    return host


def check_freeing_under_a_copy_goes_wrong(fake: FakeAccelerator) -> None:
    fake.set_poison(False)
    host = copy_out_while_the_source_is_freed(fake, "nothing")
    assert (host == 2).all()


def check_poison_shows_where_nobody_writes(fake: FakeAccelerator) -> None:
    host = copy_out_while_the_source_is_freed(fake, "poison")
    assert host.isnan().all()


def check_event_before_the_free_prevents_it(fake: FakeAccelerator) -> None:
    host = copy_out_while_the_source_is_freed(fake, "event")
    assert (host == 1).all()


def check_record_stream_prevents_it(fake: FakeAccelerator) -> None:
    host = copy_out_while_the_source_is_freed(fake, "record_stream")
    assert (host == 1).all()


def check_late_copy_in_corrupts_the_next_owner(fake: FakeAccelerator) -> None:
    side, host = side_stream(), torch.full((COUNT,), 3.0)
    for ordered in (False, True):
        x = torch.empty(COUNT, device="fake")
        torch.accelerator.synchronize()
        fake.set_copy_bytes_per_s(x.nbytes / SECONDS, side.stream_id)
        with side:
            x.copy_(host, non_blocking=True)
        if ordered:
            torch.accelerator.current_stream().wait_stream(side)
        del x
        y = torch.ones(COUNT, device="fake")
        torch.accelerator.synchronize()
        assert (y == (1 if ordered else 3)).all()
        del y


def check_pinned_memory_outlives_its_copy(fake: FakeAccelerator) -> None:
    side, x = side_stream(), torch.zeros(COUNT, device="fake")
    torch.accelerator.synchronize()
    fake.delay(side.stream_id, SECONDS)
    pinned = torch.ones(COUNT).pin_memory()
    address = pinned.data_ptr()
    with side:
        x.copy_(pinned, non_blocking=True)
    del pinned
    others = [torch.empty(COUNT, pin_memory=True).fill_(2) for _ in range(4)]
    assert address not in [other.data_ptr() for other in others]
    side.synchronize()
    assert (x == 1).all()


def check_other_streams_do_not_get_the_block(fake: FakeAccelerator) -> None:
    x = torch.empty(COUNT, device="fake")
    address = x.data_ptr()
    del x
    with side_stream():
        assert torch.empty(COUNT, device="fake").data_ptr() != address
    assert torch.empty(COUNT, device="fake").data_ptr() == address


def check_memory_statistics(fake: FakeAccelerator) -> None:
    torch.accelerator.synchronize()
    base = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    tensors = [torch.empty(1024, dtype=torch.uint8, device="fake") for _ in range(3)]
    assert torch.accelerator.memory_allocated() == base + 3072 == fake.allocated_bytes()
    del tensors[1:]
    tensors.append(torch.empty(1, device="fake"))  # rounded up
    assert torch.accelerator.memory_allocated() == base + 1024 + 512
    assert torch.accelerator.max_memory_allocated() == base + 3072
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == base + 1024 + 512
    tensors.clear()
    assert torch.accelerator.memory_allocated() == base


def filled(count: int, value: int) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.uint8, device="fake")


def same_all_over(tensor: torch.Tensor) -> bool:
    """Looked at on the host, which takes no memory of the device."""
    host = tensor.cpu()
    return bool(host.eq(host[0]).all())


def check_cut_segments_stay_whole_for_one_tensor(fake: FakeAccelerator) -> None:
    torch.accelerator.empty_cache()
    base = torch.accelerator.memory_reserved()
    fake.set_segments(1024)
    big, small = filled(8192, 1), filled(2048, 2)
    assert torch.accelerator.memory_reserved() == base + 20480, "both lie on one segment"
    del big
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == base + 20480
    assert same_all_over(small)
    del small
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == base


def check_segments_that_grow_give_back_pages(fake: FakeAccelerator) -> None:
    torch.accelerator.empty_cache()
    base = torch.accelerator.memory_reserved()
    fake.set_segments(1024, expandable=True)
    page = 20480
    parts = [filled(page, index) for index in range(8)]
    assert torch.accelerator.memory_reserved() == base + 8 * page
    # Every second page comes free, and goes back; what is asked for next goes behind all of them, or into one of them.
    del parts[::2]
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == base + 4 * page
    larger, equal = filled(2 * page, 20), filled(page, 21)
    assert torch.accelerator.memory_reserved() == base + 7 * page
    assert equal.data_ptr() < parts[0].data_ptr() < larger.data_ptr()
    # A page that something small lies on stays. What is free before and behind it joins what follows.
    del parts[0], larger
    small = filled(2048, 22)
    torch.accelerator.empty_cache()
    assert [int(each[0]) for each in (*parts, equal, small)] == [3, 5, 7, 21, 22]
    assert all(same_all_over(each) for each in (*parts, equal, small))
    assert torch.accelerator.memory_reserved() == base + 5 * page
    del parts, equal, small
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() == base


def check_segments_that_grow_stop_at_the_capacity(fake: FakeAccelerator) -> None:
    torch.accelerator.empty_cache()
    fake.set_segments(1024, expandable=True)
    page = 20480
    fake.set_capacity(torch.accelerator.memory_reserved() + 4 * page)
    parts = [filled(page, index) for index in range(4)]
    with pytest.raises(torch.OutOfMemoryError):
        filled(page, 9)
    del parts[1:3]  # two pages beside each other, which are not given back: they serve it
    parts.append(filled(2 * page, 4))
    assert [int(each[-1]) for each in parts] == [0, 3, 4]
    del parts[1]
    with pytest.raises(torch.OutOfMemoryError):
        filled(2 * page, 9)
    parts.append(filled(page, 5))
    assert all(same_all_over(each) for each in parts)


def check_capacity(fake: FakeAccelerator) -> None:
    torch.accelerator.empty_cache()
    base = torch.accelerator.memory_reserved()
    fake.set_capacity(base + 4096)
    assert torch.accelerator.get_memory_info() == (4096, base + 4096)
    first = torch.empty(2048, dtype=torch.uint8, device="fake")
    assert torch.accelerator.get_memory_info()[0] == 2048
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4096, dtype=torch.uint8, device="fake")
    del first
    torch.empty(4096, dtype=torch.uint8, device="fake")  # in place of the cached block
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(4097, dtype=torch.uint8, device="fake")


def check_backward_runs_on_a_device_thread(fake: FakeAccelerator) -> None:
    seen = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(context: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(context: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append((threading.get_native_id(), fake.current_stream_id()))
            return grad * 2

    side = side_stream()
    x = torch.ones(4, device="fake", requires_grad=True)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = Spy.apply(x).sum()
    y.backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2, 2, 2]
    ((thread, stream),) = seen
    assert thread != threading.get_native_id() and stream == side.stream_id


def check_autocast(fake: FakeAccelerator) -> None:
    layer, x = nn.Linear(4, 4).to("fake"), torch.randn(2, 4, device="fake")
    with torch.autocast("fake", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == torch.bfloat16 and y.softmax(-1).dtype == torch.float32
    y.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32


CHECKS: dict[str, Callable[[FakeAccelerator], None]] = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_")
}


def run_checks() -> None:
    torch.set_num_threads(1)
    fake = load()
    for name, check in CHECKS.items():
        error = ""
        try:
            check(fake)
        except (Exception, pytest.fail.Exception):
            error = traceback.format_exc()
            torch.accelerator.synchronize()  # while the exception still holds what is being copied
        finally:
            torch.accelerator.synchronize()
            fake.set_copy_bytes_per_s(0)
            fake.set_poison(True)
            fake.set_capacity(0)
            fake.set_segments(0)
        print(json.dumps({"check": name, "error": error}), flush=True)
    leave_work_behind(fake)


def leave_work_behind(fake: FakeAccelerator) -> None:
    """The process must end well with tasks in the queues."""
    fake.delay(0, 0.1)
    with side_stream():
        fake.delay(fake.current_stream_id(), 0.1)
        host = torch.empty(COUNT, pin_memory=True)
        host.copy_(torch.ones(COUNT, device="fake"), non_blocking=True)


class Checks:
    def __init__(self, process: subprocess.CompletedProcess[str]) -> None:
        self.process = process
        lines = [line for line in process.stdout.splitlines() if line.startswith('{"check"')]
        self.errors = {entry["check"]: entry["error"] for entry in map(json.loads, lines)}


@pytest.fixture(scope="module")
def checks() -> Checks:
    if not can_compile():
        pytest.skip("the simulated accelerator needs a C++ compiler and ninja")
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            "from tests.support.test_fake_accelerator import run_checks; run_checks()",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return Checks(process)


@pytest.mark.parametrize("name", CHECKS)
def test_check(checks: Checks, name: str) -> None:
    assert name in checks.errors, f"the process ended before this check:\n{checks.process.stderr}"
    assert not checks.errors[name], checks.errors[name]


def test_process_ends_cleanly(checks: Checks) -> None:
    assert checks.process.returncode == 0, checks.process.stderr


def test_this_process_has_no_accelerator(checks: Checks) -> None:
    """What the subprocess is for."""
    assert torch._C._get_privateuse1_backend_name() != "fake"

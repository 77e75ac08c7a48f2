"""Several storages over one memory, and memory that somebody else owns: a write through one changes the others."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from tests.faults.harness import (
    N,
    Step,
    boundary,
    by_dropping,
    check,
    constant,
    in_every_way,
    in_thread,
    leaf,
    sources,
    taken,
)
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(60)

Alias = Callable[[Tensor], Tensor]


def dlpack(t: Tensor) -> Tensor:
    return torch.from_dlpack(t)


def dlpack_capsule(t: Tensor) -> Tensor:
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(t))


def numpy(t: Tensor) -> Tensor:
    return torch.from_numpy(t.numpy())


def numpy_by_dlpack(t: Tensor) -> Tensor:
    return torch.from_dlpack(t.numpy())


def as_array(t: Tensor) -> Tensor:
    return torch.asarray(np.asarray(t))


def address(t: Tensor) -> Tensor:
    """As code does that has nothing but a pointer; whoever uses it holds the tensor as long."""
    size = t.untyped_storage().nbytes()
    raw = (ctypes.c_char * size).from_address(t.untyped_storage().data_ptr())
    return torch.frombuffer(raw, dtype=t.dtype).view(t.shape)


def slice_of_storage(t: Tensor) -> Tensor:
    """A storage of its own, over the same memory."""
    storage = t.untyped_storage()[0 : t.untyped_storage().nbytes()]
    return torch.empty(0, dtype=t.dtype).set_(storage, t.storage_offset(), t.shape, t.stride())


ALIASES = [dlpack, dlpack_capsule, numpy, numpy_by_dlpack, as_array, address, slice_of_storage]
by_every_alias = pytest.mark.parametrize("alias", ALIASES, ids=lambda f: f.__name__)


@pytest.mark.parametrize("when", ["forward", "between"])
@pytest.mark.parametrize("what", ["source", "value"])
@by_every_alias
@by_dropping
def test_a_write_through_an_alias(mode: str, alias: Alias, what: str, when: str) -> None:
    """What was read before the write is rebuilt from the old content, what was read after it from the new."""
    if alias is address and (what, when) == ("value", "between"):
        pytest.skip("nobody holds the memory then")

    def program() -> Step:
        w, x, tables = leaf(N, N), constant(N, N), sources(3, N, N)

        def step(k: int) -> list[Tensor]:
            table = tables[k]

            def forward() -> tuple[Tensor, Tensor | None]:
                m = table if what == "source" else x * 2.0
                other = alias(m)
                y = (w * (m * 1.5).exp()).sin()
                boundary()
                if when == "forward":
                    other.mul_(3.0)
                    y = y * (w * m.cos())
                y = y + w * (m + 1.0)
                return y.mean(), other if when == "between" else None

            loss, other = forward()
            if other is not None:
                boundary()
                other.mul_(3.0)
                del other
            loss.backward()
            return [loss.detach(), table, *taken(w)]

        return step

    check(program, mode)


@by_every_alias
@by_dropping
def test_a_write_through_an_alias_that_is_the_only_trace_of_it(mode: str, alias: Alias) -> None:
    """Made, filled through another storage, used and let go of: its recipe has no such write."""

    def program() -> Step:
        w, x = leaf(16, N, N), constant(N, N)  # a copy is small beside what is read with it

        def step(k: int) -> list[Tensor]:
            def filled() -> Tensor:
                m = x * (1.0 + k)
                other = alias(m)
                other.mul_(3.0)
                other[0].fill_(7.0)
                return m

            def forward() -> Tensor:
                return (w * filled()).sin().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


@by_every_alias
@by_dropping
def test_a_write_to_what_an_alias_is_a_source_of(mode: str, alias: Alias) -> None:
    """The other way round: the recipe reads the alias, the write goes to the tensor that it came from."""

    def program() -> Step:
        w, tables = leaf(N, N), sources(3, N, N)

        def step(k: int) -> list[Tensor]:
            table = tables[k]

            def forward() -> Tensor:
                other = alias(table)
                y = (w * (other * 1.5).exp()).sin()
                boundary()
                table.mul_(3.0)
                y = y * (w * other.cos())
                del other
                table[: N // 2].zero_()
                return y.mean()

            loss = forward()
            table.add_(1.0)
            loss.backward()
            return [loss.detach(), table, *taken(w)]

        return step

    check(program, mode)


@in_every_way
def test_two_tensors_over_one_array(mode: str) -> None:
    """Neither of them owns it, they overlap in part, and each is written and read in turn."""

    def program() -> Step:
        w = leaf(N, N)
        array = constant(2 * N, N).numpy().copy()

        def step(k: int) -> list[Tensor]:
            array[:] = constant(2 * N, N, seed=k).numpy()
            upper, middle = (
                torch.from_numpy(array[:N]),
                torch.from_numpy(array[N // 2 : N // 2 + N]),
            )

            def forward() -> Tensor:
                y = (w * (upper * 1.5).exp()).sin()
                boundary()
                middle.mul_(3.0)
                y = y + w * upper.cos()
                z = w * (middle * 0.5).exp()
                upper.add_(1.0)
                return (y * z * (w * middle.tanh())).mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), torch.tensor(array), *taken(w)]

        return step

    check(program, mode)


@by_dropping
def test_a_parameter_and_an_array_over_it(mode: str) -> None:
    """A shared vocabulary: ordinary ops change the weights through the alias, between steps and within one."""

    def program() -> Step:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N))
        weight = torch.from_numpy(model[0].weight.detach().numpy())

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                with torch.no_grad():
                    gate = (model[0].weight * 2.0).sigmoid()
                y = (gate * model[2].weight).tanh().mean()
                boundary()
                weight.mul_(0.9)
                return y + model(constant(N, N, seed=k)).square().mean()

            loss = forward()
            loss.backward()
            weight.add_(0.01)
            return [loss.detach(), *taken(*model.parameters())]

        return step

    check(program, mode, steps=4)


@by_dropping
def test_an_alias_that_is_read_after_the_step(mode: str) -> None:
    """While somebody holds the memory of a saved value by another storage, it stays what it is."""

    def program() -> Step:
        w = leaf(N, N)

        def step(k: int) -> list[Tensor]:
            def forward() -> tuple[Tensor, Tensor, np.ndarray]:
                h = (w * (1.5 + k)).exp()
                held, array = torch.from_dlpack(h.detach()), h.detach().numpy()[1:]
                return (h * h.sin()).tanh().mean(), held, array

            loss, held, array = forward()
            boundary()
            loss.backward()
            blocks = [torch.full((N, N), 7.0) for _ in range(8)]
            del blocks
            return [loss.detach(), held, torch.tensor(array), *taken(w)]

        return step

    check(program, mode)


# ------------------------------------------------------------------- memory that others own, and others write


def _array() -> tuple[np.ndarray, Tensor]:
    array = np.zeros((N, N), dtype=np.float32)
    return array, torch.from_numpy(array)


def _bytes() -> tuple[np.ndarray, Tensor]:
    raw = bytearray(4 * N * N)
    return (
        np.frombuffer(raw, dtype=np.float32).reshape(N, N),
        torch.frombuffer(raw, dtype=torch.float32).view(N, N),
    )


def _anonymous_map() -> tuple[np.ndarray, Tensor]:
    memory = mmap.mmap(-1, 4 * N * N)
    return (
        np.frombuffer(memory, dtype=np.float32).reshape(N, N),
        torch.frombuffer(memory, dtype=torch.float32).view(N, N),
    )


def _shared() -> tuple[np.ndarray, Tensor]:
    """As between the processes of a data loader."""
    tensor = torch.zeros(N, N).share_memory_()
    return tensor.numpy(), tensor


def _pointer() -> tuple[np.ndarray, Tensor]:
    raw = (ctypes.c_float * (N * N))()
    return (
        np.ctypeslib.as_array(raw).reshape(N, N),
        torch.frombuffer(raw, dtype=torch.float32).view(N, N),
    )


BUFFERS = [_array, _bytes, _anonymous_map, _shared, _pointer]
over_every_buffer = pytest.mark.parametrize("make", BUFFERS, ids=lambda f: f.__name__.strip("_"))


@over_every_buffer
@in_every_way
def test_one_buffer_refilled_in_each_step(mode: str, make: Callable) -> None:
    """Wrapped once; the next batch comes after backward, as a plain loader does it."""

    def program() -> Step:
        w = leaf(N, N)
        array, batch = make()

        def step(k: int) -> list[Tensor]:
            array[:] = constant(N, N, seed=k).numpy()

            def forward() -> Tensor:
                h = (batch * 1.5).exp()
                return (w * h).sin().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode, steps=4)


@pytest.mark.parametrize("where", ["between", "forward", "thread", "hook"])
@over_every_buffer
def test_one_buffer_refilled_while_it_is_needed(make: Callable, where: str) -> None:
    """The next batch comes before backward: ordinarily nothing reads the old one again. Nobody can see such a write."""

    def program() -> Step:
        w = leaf(N, N)
        array, batch = make()

        def step(k: int) -> list[Tensor]:
            w.grad = None
            array[:] = constant(N, N, seed=k).numpy()

            def refill(*_: object) -> None:
                array[:] = constant(N, N, seed=1000 + k).numpy()

            def forward() -> Tensor:
                h = (batch * 1.5).exp()
                y = (w * h).sin()
                del h
                boundary()
                if where == "forward":
                    refill()
                    y = y * (w * (batch * 0.5).tanh())
                if where == "hook":
                    y.register_hook(refill)
                return y.mean()

            loss = forward()
            if where == "between":
                refill()
            elif where == "thread":
                in_thread(refill)
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all", steps=5, may_be_loud=True)


@by_dropping
def test_a_loader_thread_fills_one_of_two_buffers(mode: str) -> None:
    """Double buffering: while the step runs on one, the other is filled. Never the same, so never an error."""

    def program() -> Step:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, 8))
        arrays = [np.zeros((N, N), dtype=np.float32) for _ in range(2)]
        batches = [torch.from_numpy(each) for each in arrays]
        arrays[0][:] = constant(N, N, seed=0).numpy()

        def step(k: int) -> list[Tensor]:
            def fill() -> None:
                arrays[(k + 1) % 2][:] = constant(N, N, seed=k + 1).numpy()

            loader = threading.Thread(target=fill)
            loader.start()
            loss = model((batches[k % 2] * 2.0).exp()).square().mean()
            loss.backward()
            loader.join()
            return [loss.detach(), *taken(*model.parameters())]

        return step

    check(program, mode, steps=4)


@pytest.mark.parametrize("when", ["forward", "between"])
@by_dropping
def test_two_maps_of_one_file(mode: str, when: str, tmp_path: Path) -> None:
    """Two addresses, one memory: not even a table of addresses shows that a write to one is a write to the other."""
    path = tmp_path / "shared"
    path.write_bytes(bytes(4 * N * N))

    def program() -> Step:
        w = leaf(N, N)
        first, second = (
            torch.from_file(str(path), shared=True, size=N * N).view(N, N) for _ in range(2)
        )

        def step(k: int) -> list[Tensor]:
            w.grad = None
            first.copy_(constant(N, N, seed=k))

            def forward() -> Tensor:
                y = (w * (first * 1.5).exp()).sin()
                boundary()
                if when == "forward":
                    second.mul_(3.0)
                    y = y * (w * (first * 1.5).tanh())
                return y.mean()

            loss = forward()
            if when == "between":
                second.mul_(3.0)
            loss.backward()
            return [loss.detach(), first, *taken(w)]

        return step

    check(program, mode, steps=5, may_be_loud=True)


@by_dropping
def test_recipes_that_begin_at_foreign_memory_are_used(mode: str) -> None:
    """A data set in an array, wrapped once, never written: what is made of it goes and comes back."""

    def program() -> Step:
        w = leaf(N, N)
        data = torch.from_numpy(constant(8 * N, N).numpy().copy())

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                batch = data[k * N : (k + 1) * N]
                return (w * (batch * 1.5).exp()).sin().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


# ---------------------------------------------------------------- aliases that no recorded op has seen

LATE = 4
"""A step after those that compare everything."""


def on_a_thread(write: Callable[[], object]) -> None:
    thread = threading.Thread(target=write)
    thread.start()
    thread.join()


def while_disabled(write: Callable[[], object]) -> None:
    with delta.disable():
        write()


def at_once(write: Callable[[], object]) -> None:
    write()


@pytest.mark.parametrize("around", [on_a_thread, while_disabled, at_once], ids=lambda f: f.__name__)
@by_every_alias
def test_a_late_write_through_an_alias_of_before_the_runtime(
    alias: Alias, around: Callable[[Callable[[], object]], None]
) -> None:
    """What it changes is copied first: the op that writes is the first that shows the alias."""
    w, x = leaf(N, N), constant(N, N)
    other = alias(x)
    with delta.Runtime("100%", device="cpu", policy="stress_drop_all") as runtime:
        for step in range(LATE + 4):
            w.grad = None
            x.fill_(0.5)
            expected = (x * (1.0 + step)).exp()
            loss = ((x * (1.0 + step)).exp() * w).sum()
            boundary()
            if step >= LATE:
                around(lambda: other.fill_(0.25))
            loss.backward()
            assert torch.equal(w.grad, expected), step
        assert runtime.session.counters().drops > LATE
    runtime.close()


@by_every_alias
def test_a_late_write_that_is_told_after_it_was_made(alias: Alias) -> None:
    """`mark_written` of an alias is of all that lies over its memory: an error, and the next step is as ordinary."""
    w, x = leaf(N, N), constant(N, N)
    other = alias(x)
    loud = []
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    for step in range(LATE + 4):
        w.grad = None
        x.fill_(0.5)
        expected = (x * (1.0 + step)).exp()
        try:
            with runtime.step():
                loss = ((x * (1.0 + step)).exp() * w).sum()
                boundary()
                if step == LATE:
                    ctypes.memset(other.data_ptr(), 0x3D, other.nbytes)
                    delta.mark_written(other)
                loss.backward()
        except delta.InplaceModification:
            loud.append(step)
            continue
        assert torch.equal(w.grad, expected), step
    assert loud == [LATE]
    runtime.close()


def test_memory_that_no_op_has_used_is_not_charged() -> None:
    """A data set mapped into memory is looked at, or filled by another thread, while a step goes on."""
    w = leaf(N, N)
    data = torch.from_numpy(np.zeros((64, N, N), dtype=np.float32))
    with delta.Runtime("100%", device="cpu", policy="delta") as runtime:
        with runtime.step():
            data.numpy()
            on_a_thread(lambda: data[1].fill_(1.0))
            (w.sin() * w).sum().backward()
            unused = runtime.session.levels().uncounted_bytes
            (w * data[1]).sum().backward()
            used = runtime.session.levels().uncounted_bytes
    assert used - unused == data.nbytes
    runtime.close()


@by_every_alias
def test_one_op_writes_to_one_memory_through_two_storages(alias: Alias) -> None:
    """Each would get memory of its own if the op were run again. It begins when nothing is compared any more."""
    w, x = leaf(N, N), constant(N, N)

    def forward(step: int) -> Tensor:
        with torch.no_grad():
            a, another, large = x * (1.0 + step), x * 1.0, torch.ones(16 * N * N)
            b = alias(a if step >= LATE else another)
            torch._foreach_add_([a, b, large], 1.0)
            del b, another
            c = a * 1.0
        loss = (c.sin() * w).sum()
        boundary()
        with torch.no_grad():
            a.zero_()
        return loss

    def gradients(runtime: delta.Runtime | None) -> list[Tensor]:
        got = []
        for step in range(LATE + 4):
            w.grad = None
            with runtime.step() if runtime else contextlib.nullcontext():
                loss = forward(step)
                boundary()
                loss.backward()
            assert w.grad is not None
            got.append(w.grad)
        return got

    expected = gradients(None)
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    assert all(map(torch.equal, gradients(runtime), expected))
    assert runtime.session.counters().drops >= LATE
    runtime.close()


@pytest.mark.parametrize("mode", ["drop_all", "random"])
def test_a_small_array_is_read_and_written_by_one_op(mode: str) -> None:
    """The op reads one tensor over it, and writes its result to another."""

    def program() -> Step:
        w = leaf(N)
        large = torch.linspace(-0.1, 0.1, N * N).view(N, N)
        first = np.linspace(0.1, 1, N).astype(np.float32)
        array = first.copy()
        read, written = torch.from_numpy(array), torch.from_numpy(array)

        def step(k: int) -> list[Tensor]:
            array[:] = first
            with torch.no_grad():
                torch.mv(large * (1.0 + k), read, out=written)
            loss = ((read * 2).sin() * w).sum() + (w * 2.0).exp().sin().sum()
            boundary()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


@pytest.mark.timeout(120)
def test_one_foreign_input_does_not_make_all_others_slow() -> None:
    """Which tensors lie over its memory is not found out by looking through all that there are."""
    n = 3000
    parameters = [torch.zeros(4, requires_grad=True) for _ in range(n)]
    inputs = {
        "own": torch.ones(4),
        "foreign": torch.from_numpy(np.ones(4, dtype=np.float32)),
    }
    best = dict.fromkeys(inputs, float("inf"))
    for _ in range(2):
        for kind, x in inputs.items():
            runtime = delta.Runtime(
                "100%", device="cpu", policy="stress_drop_all", min_bytes=1 << 20
            )
            for _ in range(3):
                fresh = [torch.ones(4) for _ in range(n)]
                begin = time.perf_counter()
                with runtime.step():
                    h = x * 1
                    for parameter, each in zip(parameters, fresh, strict=True):
                        h = h + parameter * each
                    h.sum().backward()
                best[kind] = min(best[kind], time.perf_counter() - begin)
            runtime.close()
    assert best["foreign"] < 2 * best["own"], best


@pytest.mark.timeout(120)
def test_foreign_parameters_do_not_make_an_optimizer_slow() -> None:
    """Its state is memory that no recorded op has seen; whether that lies over a parameter's is found at once."""
    n = 3000
    kinds: dict[str, Callable[[], Tensor]] = {
        "own": lambda: torch.ones(4),
        "foreign": lambda: torch.from_numpy(np.ones(4, dtype=np.float32)),
    }
    best = dict.fromkeys(kinds, float("inf"))
    for kind, make in kinds.items():
        parameters = [make().requires_grad_() for _ in range(n)]
        optimizer = torch.optim.Adam(parameters, foreach=False)
        with delta.Runtime("100%", device="cpu") as runtime:
            for _ in range(3):
                h = torch.ones(4)
                for parameter in parameters:
                    h = h + parameter
                h.sum().backward()
                begin = time.perf_counter()
                optimizer.step()
                best[kind] = min(best[kind], time.perf_counter() - begin)
                optimizer.zero_grad()
        runtime.close()
    assert best["foreign"] < 3 * best["own"], best


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["stacked", "one op each", "slices of one array"])
def test_very_many_foreign_tensors_do_not_cost_their_square(kind: str) -> None:
    """As a collate function makes them, or parameters that share one array."""

    def seconds(n: int) -> float:
        whole = np.ones(4 * n, dtype=np.float32)
        arrays = [whole[4 * i : 4 * i + 4] for i in range(n)]
        if kind != "slices of one array":
            arrays = [each.copy() for each in arrays]
        w = leaf(4)
        runtime = delta.Runtime("100%", device="cpu")
        best = float("inf")
        for _ in range(3):
            begin = time.perf_counter()
            with runtime.step():
                if kind == "stacked":
                    x = torch.stack([torch.from_numpy(each) for each in arrays])
                elif kind == "one op each":
                    x = torch.stack([torch.from_numpy(each) + 1.0 for each in arrays])
                else:
                    views = [torch.from_numpy(whole), *map(torch.from_numpy, arrays)]
                    for view in views[1:]:
                        view.mul_(1.0)
                    x = torch.stack(views[1:])
                (x * w).sin().sum().backward()
            best = min(best, time.perf_counter() - begin)
        runtime.close()
        return best / n

    few, many = seconds(1500), seconds(12000)
    assert many < 4 * few, f"{many * 1e6:.1f} us each, with fewer {few * 1e6:.1f} us"


@pytest.mark.parametrize("strict", [False, True])
def test_foreign_memory_that_is_gone_is_not_charged(strict: bool) -> None:
    """Micro-batches of bytes, one alive at a time: 40 MiB in all, within 16 MiB."""
    conv = nn.Linear(64, 8)
    before = cpu_pool.allocated_bytes()
    runtime = delta.Runtime(before + (16 << 20), device="cpu", strict=strict, policy="recompute")
    for _ in range(3):
        with runtime.step():
            loss = torch.zeros(())
            for i in range(40):
                batch = torch.from_numpy(np.full(1 << 20, i, dtype=np.uint8))
                loss = loss + conv(batch[:64].float() / 255.0).sum()
                del batch
            loss.backward()
        peak_bytes = runtime.report().last.peak_bytes - before
        assert 1 << 20 <= peak_bytes <= 4 << 20
    assert runtime.report().totals.over_budget_steps == 0
    runtime.close()


def test_foreign_memory_counts_as_long_as_it_is_there() -> None:
    """The peak of a step is what was live at one time, that of others included."""
    w = leaf(N, N)
    with delta.Runtime("100%", device="cpu", policy="recompute") as runtime:
        with runtime.step():
            first = torch.from_numpy(np.ones((64, N, N), dtype=np.float32))
            loss = (w * first[0].sum()).sum()
            first_bytes = first.nbytes
            del first
            boundary()
            second = torch.from_numpy(np.ones((16, N, N), dtype=np.float32))
            (loss + (w * second[0]).sum()).backward()
        peak_bytes = runtime.report().last.peak_bytes
        live_bytes = cpu_pool.allocated_bytes()
    assert first_bytes + live_bytes <= peak_bytes + (1 << 20)
    assert peak_bytes <= first_bytes + live_bytes + second.nbytes // 2
    runtime.close()


@pytest.mark.timeout(120)
def test_a_data_set_of_which_rows_are_read_is_not_hashed_for_each() -> None:
    """Mini-batches are slices of one array; what is made from them is kept, or made again from copies."""
    data = torch.from_numpy(np.random.default_rng(0).random((1 << 17, 64), dtype=np.float32))
    layer = nn.Linear(64, 8)

    def step(first: int) -> list[Tensor]:
        loss = torch.zeros(())
        for i in range(first, first + 60):
            loss = loss + layer((data[16 * i : 16 * i + 16] - 0.5) * 2.0).square().mean()
        loss.backward()
        return taken(*layer.parameters())

    ordinary = [step(60 * each) for each in range(4)]
    with contextlib.closing(
        delta.Runtime("100%", device="cpu", policy="stress_drop_all", min_bytes=0)
    ) as runtime:
        for each, expected in enumerate(ordinary):
            begin = time.perf_counter()
            with runtime.step():
                ours = step(60 * each)
            last_s = time.perf_counter() - begin
            assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    begin = time.perf_counter()
    for _ in range(60):
        data.sum()
    assert last_s < time.perf_counter() - begin, "it was read whole for each mini-batch"


def test_a_data_set_that_is_dear_to_watch_may_be_written_to() -> None:
    """Nothing is made again from what nobody looks at any more."""
    whole = np.linspace(0.0, 1.0, (1 << 12) * 64, dtype=np.float32).reshape(-1, 64)
    data = torch.from_numpy(whole)
    w = leaf(64)

    def step() -> Tensor:
        for i in range(12):
            (data[i] * w).sum().backward()
        w.grad = None
        loss = (data[3] * 2.0 * w).sum()
        boundary()
        whole[3] += 1.0
        boundary()
        loss.backward()
        (gradient,) = taken(w)
        return gradient

    kept = whole.copy()
    ordinary = [step() for _ in range(4)]
    whole[:] = kept
    with contextlib.closing(
        delta.Runtime("100%", device="cpu", policy="stress_drop_all", min_bytes=0)
    ) as runtime:
        for expected in ordinary:
            with runtime.step():
                assert torch.equal(step(), expected)

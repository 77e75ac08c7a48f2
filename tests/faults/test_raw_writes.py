"""Writes that no dispatcher sees: by pointer, by numpy, by methods of tensors and storages that run no op.

Nobody is told of them and no version moves. Where a value that such a write made has gone already, an error is all that
is left; after it the value is kept, and the following steps are ordinary ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import raw_access
from tests.faults.harness import (
    N,
    Step,
    boundary,
    by_dropping,
    check,
    constant,
    in_thread,
    leaf,
    sources,
    taken,
)
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(60)

SIDE = 32
"""Small: some writers call Python for each element."""
STEPS = 5

Writer = Callable[[Tensor, Tensor], None]
Factory = Callable[[Tensor], Tensor]


def by_pointer(m: Tensor, content: Tensor) -> None:
    """As a C++ or Triton kernel does that takes data_ptr()."""
    ctypes.memmove(m.data_ptr(), content.data_ptr(), m.numel() * m.element_size())


def by_address_of_a_view(m: Tensor, content: Tensor) -> None:
    half = m[m.shape[0] // 2 :]
    raw = (ctypes.c_float * half.numel()).from_address(half.data_ptr())
    raw[:] = content.flatten().tolist()[: half.numel()]


def by_numpy(m: Tensor, content: Tensor) -> None:
    m.numpy()[:] = content.numpy()


def by_reading_a_file(m: Tensor, content: Tensor) -> None:
    io.BytesIO(content.numpy().tobytes()).readinto(m.numpy())


def by_ufunc(m: Tensor, content: Tensor) -> None:
    np.add(m.numpy(), content.numpy() * 2, out=m.numpy())


def by_numpy_from_dlpack(m: Tensor, content: Tensor) -> None:
    np.copyto(np.from_dlpack(m), content.numpy())


def by_apply(m: Tensor, content: Tensor) -> None:
    m.apply_(lambda v: v * 0.5 + 0.25)


def by_map(m: Tensor, content: Tensor) -> None:
    m.map_(content, lambda a, b: a * 0.5 + b)


def by_map2(m: Tensor, content: Tensor) -> None:
    m.map2_(content, content, lambda a, b, c: a * 0.5 + b * c)


def by_apply_on_a_view(m: Tensor, content: Tensor) -> None:
    m.t()[3:].apply_(lambda v: v * 0.5 + 0.25)


def by_storage_byteswap(m: Tensor, content: Tensor) -> None:
    bits = torch.arange(m.numel(), dtype=torch.int32).remainder(200).view(m.shape)
    m.view(torch.int32).copy_((bits << 8) + 0x3D00003E)  # a number of usual size either way round
    m.untyped_storage().byteswap(m.dtype)


def by_storage_item(m: Tensor, content: Tensor) -> None:
    storage = m.untyped_storage()
    for i in range(3, len(storage), 4):
        storage[i] = 0x3E


def by_typed_storage_item(m: Tensor, content: Tensor) -> None:
    storage = m._typed_storage()
    for i in range(0, len(storage), 7):
        storage[i] = 0.5


def by_storage_fill(m: Tensor, content: Tensor) -> None:
    m.untyped_storage().fill_(0x3D)


def by_slice_of_storage(m: Tensor, content: Tensor) -> None:
    m.untyped_storage()[: m.nbytes // 2].fill_(0x3D)


def by_storage_copy(m: Tensor, content: Tensor) -> None:
    m.untyped_storage().copy_(content.untyped_storage())


WRITERS = [
    by_pointer,
    by_address_of_a_view,
    by_numpy,
    by_reading_a_file,
    by_ufunc,
    by_numpy_from_dlpack,
    by_apply,
    by_map,
    by_map2,
    by_apply_on_a_view,
    by_storage_byteswap,
    by_storage_item,
    by_typed_storage_item,
    by_storage_fill,
    by_slice_of_storage,
    by_storage_copy,
]
by_every_writer = pytest.mark.parametrize("write", WRITERS, ids=lambda f: f.__name__)


def zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape)


def zeros_like(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def new_ones(x: Tensor) -> Tensor:
    return x.new_ones(x.shape)


def full(x: Tensor) -> Tensor:
    return torch.full(x.shape, 0.125)


def filled(x: Tensor) -> Tensor:
    return torch.empty_like(x).fill_(0.5)


def counted(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), dtype=torch.float32).view(x.shape).div_(x.numel())


def identity(x: Tensor) -> Tensor:
    return torch.eye(x.shape[0])


def copied(x: Tensor) -> Tensor:
    return x.clone()


def computed(x: Tensor) -> Tensor:
    return x * 1.5


def padded(x: Tensor) -> Tensor:
    return F.pad(x[:-4, :-4], (2, 2, 2, 2))


def drawn(x: Tensor) -> Tensor:
    return torch.rand(x.shape)


FACTORIES = [
    zeros,
    zeros_like,
    new_ones,
    full,
    filled,
    counted,
    identity,
    copied,
    computed,
    padded,
    drawn,
]


def _made_and_filled(factory: Factory, write: Writer) -> Callable[[], Step]:
    def program() -> Step:
        w, x = leaf(SIDE, SIDE), constant(SIDE, SIDE)

        def step(k: int) -> list[Tensor]:
            w.grad = None
            content = constant(SIDE, SIDE, seed=200 + k)

            def forward() -> Tensor:
                with torch.no_grad():
                    m = factory(x)
                    write(m, content)
                y = (w * m).exp() + (w.sin() * m.cos())
                del m
                return y.tanh().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    return program


@by_every_writer
@by_dropping
def test_zeros_that_foreign_code_fills(mode: str, write: Writer) -> None:
    """Made, filled, used by ordinary ops, let go of."""
    check(_made_and_filled(zeros_like, write), mode, steps=STEPS, may_be_loud=True)


@pytest.mark.parametrize("factory", FACTORIES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("write", [by_pointer, by_map], ids=lambda f: f.__name__)
def test_what_any_op_made_and_foreign_code_fills(write: Writer, factory: Factory) -> None:
    check(_made_and_filled(factory, write), "drop_all", steps=STEPS, may_be_loud=True)


@pytest.mark.parametrize("factory", [zeros, copied, computed], ids=lambda f: f.__name__)
@by_every_writer
def test_a_write_between_two_uses(write: Writer, factory: Factory) -> None:
    """What came before it is rebuilt from the old content, and what came after it from the new; or neither."""

    def program() -> Step:
        w, x = leaf(SIDE, SIDE), constant(SIDE, SIDE)

        def step(k: int) -> list[Tensor]:
            w.grad = None

            def forward() -> Tensor:
                with torch.no_grad():
                    m = factory(x)
                y = w * (m * 2.0).exp()
                boundary()
                write(m, constant(SIDE, SIDE, seed=200 + k))
                y = y * (w * (m * 0.5).cos())
                del m
                return y.tanh().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all", steps=STEPS, may_be_loud=True)


@pytest.mark.parametrize("where", ["between", "thread", "hook"])
@by_every_writer
def test_a_write_to_a_source_after_forward(write: Writer, where: str) -> None:
    """Autograd saved none of it, only what was made of it: ordinarily the write does not matter."""

    def program() -> Step:
        w, tables = leaf(SIDE, SIDE), sources(STEPS, SIDE, SIDE)

        def step(k: int) -> list[Tensor]:
            w.grad = None
            table = tables[k]

            def foul(*_: object) -> None:
                write(table, constant(SIDE, SIDE, seed=200 + k))

            def forward() -> Tensor:
                y = (w * (table * 2.0).exp()).tanh()
                boundary()
                if where == "hook":
                    y.register_hook(foul)
                return y.mean()

            loss = forward()
            if where == "between":
                foul()
            elif where == "thread":
                in_thread(foul)
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, "drop_all", steps=STEPS, may_be_loud=True)


@pytest.mark.parametrize("write", [by_pointer, by_numpy, by_storage_copy], ids=lambda f: f.__name__)
@by_dropping
def test_a_deep_net_whose_layers_are_computed_by_foreign_code(mode: str, write: Writer) -> None:
    """An extension per layer that allocates by zeros_like and writes by pointer, forward and backward."""

    class Foreign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h: Tensor) -> Tensor:
            out = torch.zeros_like(h)
            write(out, torch.from_numpy(np.tanh(h.detach().numpy())))
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            (out,) = ctx.saved_tensors
            result = torch.zeros_like(grad)
            write(result, torch.from_numpy(grad.numpy() * (1 - out.numpy() ** 2)))
            return result

    def program() -> Step:
        torch.manual_seed(3)
        layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(8))
        x = constant(SIDE, SIDE)

        def step(k: int) -> list[Tensor]:
            layers.zero_grad()

            def forward() -> Tensor:
                h = x
                for layer in layers:
                    h = Foreign.apply(layer(h))
                return h.square().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(*layers.parameters())]

        return step

    # One layer after another may be found out. Nothing is saved that foreign code has not made.
    check(program, mode, steps=14, may_be_loud=True, may_be_kept=True)


@by_dropping
def test_an_optimizer_in_numpy(mode: str) -> None:
    """It writes the weights past torch, after backward; what the next backward rebuilds is made from the new ones."""

    def program() -> Step:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))

        def step(k: int) -> list[Tensor]:
            h = (model[0].weight * 2.0).exp().sin() @ model[2].weight.tanh()
            loss = (h + model(constant(SIDE, SIDE, seed=k))).square().mean()
            del h
            loss.backward()
            gradients = taken(*model.parameters())
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.detach().numpy()[:] -= 0.1 * gradient.numpy()
            return [loss.detach(), *gradients, *model.parameters()]

        return step

    check(program, mode, steps=4)


@by_dropping
def test_a_batch_read_from_a_file_into_a_tensor_of_the_step(mode: str, tmp_path: Path) -> None:
    """torch.zeros(n), then readinto(m.numpy()): a loader without a copy."""
    path = tmp_path / "data"
    path.write_bytes(constant(STEPS * SIDE, SIDE).numpy().tobytes())

    def program() -> Step:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, 4))

        def step(k: int) -> list[Tensor]:
            model.zero_grad()

            def forward() -> Tensor:
                batch = torch.zeros(SIDE, SIDE)
                with path.open("rb") as file:
                    file.seek(k * batch.numel() * 4)
                    file.readinto(batch.numpy())
                return model(batch).square().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(*model.parameters())]

        return step

    check(program, mode, steps=STEPS, may_be_loud=True)


@pytest.mark.parametrize("move", ["share_memory", "same_bytes"])
@by_dropping
def test_memory_that_moves_without_an_op(mode: str, move: str) -> None:
    """The content stays as it is: nothing is wrong with it, and nothing may come of it."""

    def program() -> Step:
        w, x = leaf(SIDE, SIDE), constant(SIDE, SIDE)

        def step(k: int) -> list[Tensor]:
            def forward() -> Tensor:
                m = x * (1.5 + k)
                y = w * m.exp()
                boundary()
                if move == "share_memory":
                    m.share_memory_()
                else:
                    m.numpy()[:] = m.numpy().copy()
                y = y * (w * m.cos())
                return y.tanh().mean()

            loss = forward()
            loss.backward()
            return [loss.detach(), *taken(w)]

        return step

    check(program, mode)


def test_arrays_taken_between_steps_leave_nothing_behind() -> None:
    """The methods stay wrapped until the runtime is closed; of tensors that are gone nothing stays for long."""
    w = leaf(N, N)
    runtime = delta.Runtime("100%", device="cpu")
    with runtime.step():
        (w.sin() * w).sum().backward()
    for _ in range(5000):
        torch.ones(10).numpy()
    assert runtime.session.levels().pages < 2000
    with runtime.step():
        for _ in range(5000):
            torch.ones(10).numpy()
        assert runtime.session.levels().pages < 2000
        (w.sin() * w).sum().backward()
    runtime.close()


def test_an_array_taken_while_the_runtime_stands_aside() -> None:
    """Nothing is saved yet then; the array is written to when something is."""

    def gradient() -> Tensor:
        w, x = leaf(N, N), torch.linspace(0, 1, N * N).view(N, N).clone()
        with delta.disable():
            array = x.numpy()
        loss = ((x * 2.0).sin().cos() * w).sum()
        boundary()
        array *= 3.0
        loss.backward()
        assert w.grad is not None
        return w.grad

    expected = gradient()
    with delta.Runtime("100%", device="cpu", policy="stress_drop_all") as runtime:
        assert torch.equal(gradient(), expected)
    runtime.close()


def test_an_array_taken_between_steps_and_written_to_in_a_late_one() -> None:
    """Nobody is in the runtime when it is taken. The array is written to after the steps that compare everything."""
    for known in (True, False):
        w, runtime = leaf(N, N), delta.Runtime("100%", device="cpu", policy="stress_drop_all")
        x = constant(N, N)
        for step in range(10):
            if not known:
                x = constant(N, N)
            w.grad = None
            x.fill_(0.5)
            if step in (0, 4):
                array = x.numpy()
            expected = (x * (1.0 + step)).exp()
            with runtime.step():
                loss = ((x * (1.0 + step)).exp() * w).sum()
                boundary()
                if step >= 4:
                    array[:] = 0.25
                loss.backward()
            assert torch.equal(w.grad, expected), (known, step)
        runtime.close()


@pytest.mark.parametrize("where", ["between steps", "in a step"])
def test_weights_are_recomputed_from_again_when_arrays_of_them_are_gone(where: str) -> None:
    """As where somebody logs their norms: with all arrays gone nobody can write to them."""
    w = leaf(N, N)
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    drops = []

    def norm() -> float:
        first, second = w.detach().numpy(), np.asarray(w.detach())
        return float(np.linalg.norm(first[1:]) + second.sum())

    for step in range(8):
        before = runtime.session.counters().drops
        with runtime.step():
            if step == 3 and where == "in a step":
                norm()
            ((w * 2.0).sin().cos() * w).sum().backward()
        drops.append(runtime.session.counters().drops - before)
        if step == 3 and where == "between steps":
            norm()
    assert set(drops[4:]) == {drops[0]} and drops[0] > 0, drops
    runtime.close()


def test_a_part_of_an_array_keeps_the_weights_watched() -> None:
    """The array has gone, but not what was cut out of it; that is written to when nothing is compared any more."""
    w, x = leaf(N, N), constant(N, N)
    part = x.numpy()[1:, 3]
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    for step in range(10):
        if step == 2:
            part = x.numpy()[1:][:, 3]
            gc.collect()
        w.grad = None
        x.fill_(0.5)
        expected = (x * (1.0 + step)).exp()
        with runtime.step():
            loss = ((x * (1.0 + step)).exp() * w).sum()
            boundary()
            if step >= 4:
                part[:] = 0.25
            loss.backward()
        assert torch.equal(w.grad, expected), step
    runtime.close()


def test_an_array_that_is_never_made() -> None:
    """`numpy()` of what needs a gradient is an error: nothing was lent."""
    w = leaf(N, N)
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    drops = []
    for step in range(6):
        before = runtime.session.counters().drops
        with runtime.step():
            if step == 2:
                with pytest.raises(RuntimeError, match="requires grad"):
                    w.numpy()
            ((w * 2.0).sin().cos() * w).sum().backward()
        drops.append(runtime.session.counters().drops - before)
    assert set(drops[3:]) == {drops[0]} and drops[0] > 0, drops
    runtime.close()


@pytest.mark.timeout(120)
def test_many_arrays_taken_between_steps_are_cheap() -> None:
    """What one costs does not grow with how many there are."""
    w, best = leaf(N, N), {}
    runtime = delta.Runtime("100%", device="cpu")
    with runtime.step():
        (w.sin() * w).sum().backward()
    for many in (4000, 16000):
        best[many] = float("inf")
        for _ in range(3):
            rows = [torch.ones(4) for _ in range(many)]
            begin = time.perf_counter()
            arrays = [row.numpy() for row in rows]
            best[many] = min(best[many], (time.perf_counter() - begin) / many)
            del arrays, rows
    runtime.close()
    assert best[16000] < 2.5 * best[4000], best


@pytest.mark.parametrize("where", ["between steps", "in a step"])
def test_an_array_of_memory_that_was_moved(where: str) -> None:
    """`share_memory_` gives a tensor other memory; what lay at the old address may be gone.

    In the middle of a step that is an error, if something that was dropped needs what lay there.
    """
    n = 1 << 22
    w, x = leaf(n), torch.linspace(0.1, 1, n)

    def move() -> None:
        x.share_memory_()
        x.numpy()

    loud = []
    with contextlib.closing(
        delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    ) as runtime:
        for step in range(6):
            w.grad = None
            expected = (x * (1.0 + step)).sin()
            try:
                with runtime.step():
                    loss = ((x * (1.0 + step)).sin() * w).sum()
                    boundary()
                    if step == 3 and where == "in a step":
                        move()
                    loss.backward()
            except delta.InplaceModification:
                loud.append(step)
                continue
            if step == 3 and where == "between steps":
                move()
            assert w.grad is not None and torch.equal(w.grad, expected), step
    assert loud == ([3] if where == "in a step" else [])


def test_a_write_through_a_slice_of_a_storage_that_begins_to_come_late() -> None:
    """After the steps that compare everything; taken before the runtime saw the tensor, or since."""
    for early in (True, False):
        w, x = leaf(N, N), constant(N, N)
        part = x.untyped_storage()[: x.nbytes // 2]
        with delta.Runtime("100%", device="cpu", policy="stress_drop_all") as runtime:
            for step in range(12):
                w.grad = None
                x.fill_(0.5)
                expected = (x * (1.0 + step)).exp()
                if not early:
                    part = x.untyped_storage()[: x.nbytes // 2]
                loss = ((x * (1.0 + step)).exp() * w).sum()
                boundary()
                if step > 4:
                    part.fill_(0x3D)
                loss.backward()
                assert torch.equal(w.grad, expected), (early, step)
        runtime.close()


def test_who_wraps_a_method_after_us_keeps_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the runtime has wrapped is unwrapped when it is closed, but not what others wrapped since."""
    original = torch.Tensor.numpy
    calls = []
    runtime = delta.Runtime("100%", device="cpu")
    with runtime.step():
        ours = torch.Tensor.numpy
        assert ours is not original

        def theirs(self: Tensor, *args: object, **kwargs: object) -> np.ndarray:
            calls.append(self)
            return ours(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, "numpy", theirs)
    runtime.close()
    gc.collect()
    assert torch.Tensor.numpy is theirs
    assert torch.Tensor.apply_ is torch._C.TensorBase.apply_
    assert torch.ones(2).numpy().sum() == 2 and len(calls) == 1
    monkeypatch.undo()
    torch.Tensor.numpy = original  # type: ignore[method-assign]
    del torch.Tensor.numpy


@pytest.mark.parametrize("end", ["left", "closed", "closed and gone", "gone"])
def test_an_array_taken_when_the_runtime_has_ended_before_backward(end: str) -> None:
    """What was dropped by then is made again later, from memory that numpy writes to."""

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        w = leaf(N, N)
        m = torch.linspace(-1, 1, N * N).view(N, N).tanh()
        loss = F.gelu((F.linear(w, m) * 0.2).exp()).mean()
        boundary()
        return w, m, loss

    def gradient(w: Tensor, m: Tensor, loss: Tensor) -> Tensor:
        np.asarray(m)[:, 1] = 0.907
        loss.backward()
        assert w.grad is not None
        return w.grad

    expected = gradient(*forward())
    method = Tensor.__dict__.get("__array__")
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all", min_bytes=0)
    with runtime:
        made = forward()
    assert runtime.session.levels().dropped_now_bytes > 0
    if "closed" in end:
        runtime.close()
    if "gone" in end:
        del runtime
        gc.collect()
    assert torch.equal(gradient(*made), expected)
    if "closed" in end:
        del made
        torch.ones(1).numpy()  # the first that nobody hears
        assert Tensor.__dict__.get("__array__") is method


@pytest.mark.parametrize("late", [0, 4], ids=["from the first step", "once trusted"])
@pytest.mark.parametrize(
    ("policy", "verify"),
    [
        ("stress_swap_all", "first"),
        ("stress_swap_all", "always"),
        ("stress_swap_all", "off"),
        ("stress_mix", "first"),
        ("stress_mix", "always"),
    ],
)
def test_a_copy_made_before_an_array_was_taken_is_not_used(
    policy: str, verify: str, late: int
) -> None:
    """What backward will use is clipped through an array; the array is gone when the tensor goes once more."""
    n = 1 << 14

    def step(step: int) -> Tensor:
        w = torch.linspace(-1, 1, n).requires_grad_()
        y = (w * (1.0 + step)).exp()
        node, loss = y.grad_fn, (y * 1.0).sum()
        assert node is not None
        del y
        for _ in range(3):
            boundary()
        saved = node._saved_result  # type: ignore[attr-defined]
        if step >= late:
            array = saved.detach().numpy()
            np.clip(array, 0.5, 1.5, out=array)
            del array
        del saved
        for _ in range(3):
            boundary()
        loss.backward()
        assert w.grad is not None
        return w.grad

    steps = range(8)
    ordinary = [step(each) for each in steps]
    runtime = delta.Runtime(
        "100%", device="cpu", policy=policy, min_bytes=0, verify=verify, host_budget=1 << 28
    )
    with contextlib.closing(runtime):
        for each in steps:
            with runtime.step():
                assert torch.equal(step(each), ordinary[each]), each
        swap_ins = runtime.report().totals.swap_ins
        assert swap_ins > 0 or policy == "stress_mix", "chance may leave it here"


@pytest.fixture
def few_are_watched() -> Iterator[None]:
    before = delta.extension._C.set_most_watched_bytes(4 * N)
    yield
    delta.extension._C.set_most_watched_bytes(before)


@pytest.mark.usefixtures("few_are_watched")
@pytest.mark.parametrize("late", [0, 3], ids=["from the first step", "once trusted"])
@pytest.mark.parametrize("reads_on", [False, True])
def test_what_is_too_large_to_look_at_is_not_made_again(late: int, reads_on: bool) -> None:
    """An array of it may have been written to: its recipe says nothing, nor do those of what is made from it."""
    x = torch.linspace(0.5, 1.0, 64)

    def step(step: int) -> Tensor:
        w = torch.ones(1, requires_grad=True)
        y = x.repeat(N)
        loss = (y * w).sum()
        if step >= late:
            array = y.numpy()
            array[::7] = 7.0
            del array
        if reads_on:
            loss = loss + ((y * 2.0) * w).sum()
        del y
        boundary()
        loss.backward()
        assert w.grad is not None
        return w.grad

    ordinary = [step(each) for each in range(6)]
    with contextlib.closing(
        delta.Runtime("100%", device="cpu", policy="stress_drop_all", min_bytes=0)
    ) as runtime:
        for each, expected in enumerate(ordinary):
            with runtime.step():
                assert torch.equal(step(each), expected), each
        assert (runtime.report().totals.drops > 0) == (late > 0)


@pytest.mark.timeout(120)
def test_many_arrays_that_are_kept_cost_no_look_at_each() -> None:
    """A replay buffer: what is looked at in each step is what has gone since the last one."""
    with delta.Runtime("100%", device="cpu") as runtime:
        arrays = [torch.ones(4).numpy() for _ in range(2000)]
        assert len(raw_access._lent) == 2000
        del arrays[::2]
        assert len(raw_access._gone) + 2000 - len(raw_access._lent) == 1000
        raw_access.take_back()
        assert len(raw_access._lent) == 1000 and not raw_access._gone
        with pytest.raises(TypeError):
            torch.ones(4).numpy(wrong=True)  # type: ignore[call-arg]
        assert len(raw_access._returned) == 1
        raw_access.take_back()
        assert len(raw_access._lent) == 1000 and not raw_access._returned
    runtime.close()
    assert not raw_access._lent

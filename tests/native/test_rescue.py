"""Room made inside an allocation: wherever the allocation comes from, memory is freed, nothing hangs, the bits stay.

Covers the rescue (csrc/evict/eviction.h, Note: freeing inside an allocation) with the GIL held and not, under a Python
error, on other threads, during garbage collection and nested inside a rebuild; the pool itself is test_cpu_pool.py's.
In most tests the budget is all of the machine and only the pool's soft limit is tight: then nothing is evicted at op
boundaries, and what was freed was freed by a rescue.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import _C, cpu_pool
from tests.support import warm_children
from tests.support.bitwise import Snapshot, assert_same_bits, freeze, gradients, random_state
from tests.support.fixtures import one_thread  # noqa: F401

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 8
WIDTH = 128
ROWS = 512
MIB = 2**20
ACTIVATIONS_BYTES = LAYERS * 3 * 4 * ROWS * WIDTH
"""Of Net, three quarters: what there is to free."""
MARGIN_BYTES = 64 * 1024


@pytest.fixture(autouse=True)
def last_resort(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process with all stacks where a deadlock keeps pytest-timeout from running."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        terminal = os.dup(2)
    faulthandler.dump_traceback_later(90, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(terminal)


class Net(nn.Module):
    """Out-of-place and in-place ops and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = nn.functional.gelu(layer(x))
            x = nn.functional.dropout(x + h.mul(1.5).relu_(), 0.1)
        return x.square().mean()


def build() -> tuple[Net, torch.Tensor]:
    """The same model and batch every time; dropout begins from the same state."""
    cpu_pool.install()
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(ROWS, WIDTH)
    torch.manual_seed(1)
    return model, x


def ordinary() -> Snapshot:
    """The bits of one step without the runtime."""
    model, x = build()
    model(x).backward()
    return gradients(model) | random_state()


@dataclass
class Rescue:
    """What happened inside a `tight` block so far."""

    runtime: delta.Runtime
    limit_bytes: int = 0
    before: dict[str, int] = field(default_factory=dict)
    pool_bytes: int = 0

    def tighten(self, room_bytes: int = MARGIN_BYTES) -> None:
        """From here on an allocation that needs more than this has to free something first."""
        self.before = self.runtime.session.counters()
        self.pool_bytes = _C.cpu_pool.rescued_bytes()
        self.limit_bytes = cpu_pool.allocated_bytes() + room_bytes
        _C.cpu_pool.set_soft_limit(self.limit_bytes)

    def since(self, name: str) -> int:
        """How far a counter has moved since `tighten`."""
        return getattr(self.runtime.session.counters(), name) - getattr(self.before, name)

    def assert_freed(self, least_bytes: int = 1) -> None:
        """By rescues alone, and by the allocator's own count."""
        assert self.since("rescues") > 0
        assert self.since("drops") > 0
        assert self.since("boundary_evictions") == 0
        assert self.since("rescued_bytes") >= least_bytes
        assert _C.cpu_pool.rescued_bytes() - self.pool_bytes >= least_bytes
        assert _C.cpu_pool.soft_limit_bytes() == self.limit_bytes  # nobody else has set it


@contextlib.contextmanager
def tight(**options: object) -> Iterator[Rescue]:
    """A step whose budget never binds; `tighten` makes the soft limit bind."""
    runtime = delta.Runtime("100%", device="cpu", policy="recompute", **options)
    try:
        with runtime.step():
            yield Rescue(runtime)
    finally:
        runtime.close()


def on_a_thread(work: Callable[[], object]) -> None:
    """Runs `work` on a thread of its own to its end; raises what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        torch.set_num_threads(1)
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


# ------------------------------------------------------------------------------ with the GIL, and without

HALF = ACTIVATIONS_BYTES // 2
WITH_GIL = {
    "torch.tensor": lambda: torch.tensor([0.5] * (HALF // 4)),
    "torch.as_tensor": lambda: torch.as_tensor([[0.5] * (HALF // 16)] * 4),
}
WITHOUT_GIL = {"torch.empty": lambda: torch.empty(HALF, dtype=torch.uint8)}


@pytest.mark.parametrize("allocate", [*WITH_GIL.values(), *WITHOUT_GIL.values()],
                         ids=[*WITH_GIL, *WITHOUT_GIL])  # fmt: skip
def test_one_allocation_frees_what_it_needs(allocate):
    expected = ordinary()
    model, x = build()
    with tight() as rescue:
        loss = model(x)
        rescue.tighten()
        with cpu_pool.capacity(rescue.limit_bytes):  # it could not be had without freeing
            block = allocate()
        assert cpu_pool.allocated_bytes() <= rescue.limit_bytes
        rescue.assert_freed(HALF - 2 * MARGIN_BYTES)
        del block
        loss.backward()
    assert_same_bits(gradients(model) | random_state(), expected)


def test_an_allocation_inside_a_cpp_backward():
    """The engine runs without the GIL; the gradient of a lookup is a table that no look-ahead foresees."""

    def run(rescue: Rescue | None) -> Snapshot:
        model, x = build()
        table = torch.ones(HALF // 512, 128, requires_grad=True)
        index = torch.arange(4)
        loss = model(x) + table[index].sum()  # made last: its backward runs first
        if rescue:
            rescue.tighten()
        loss.backward()
        assert table.grad is not None
        return gradients(model) | random_state() | {"table": freeze(table.grad)}

    expected = run(None)
    with tight() as rescue:
        found = run(rescue)
        rescue.assert_freed(HALF - 2 * MARGIN_BYTES)
    assert_same_bits(found, expected)


def test_a_whole_step_by_rescues_alone():
    """Forward and backward under a limit that no look-ahead knows, capacity at the limit."""
    expected = ordinary()
    model, x = build()
    with tight() as rescue:
        rescue.tighten(ACTIVATIONS_BYTES)
        with cpu_pool.capacity(rescue.limit_bytes):
            cpu_pool.reset_peak()
            model(x).backward()
            assert cpu_pool.peak_bytes() <= rescue.limit_bytes
        rescue.assert_freed(HALF)
        assert rescue.since("rebuilds") > 0
    assert_same_bits(gradients(model) | random_state(), expected)


# ---------------------------------------------------------------------------------- a Python error pending


class Failure(Exception):
    """Raised by the tests."""


def test_an_allocation_with_the_error_indicator_set():
    """C code may allocate after it has set an error: the rescue must not touch, or trip over, it."""
    expected = ordinary()
    model, x = build()
    with tight() as rescue:
        loss = model(x)
        rescue.tighten()
        with cpu_pool.capacity(rescue.limit_bytes):
            assert _C.allocate_with_error_pending(HALF)
        rescue.assert_freed(HALF - 2 * MARGIN_BYTES)
        loss.backward()
    assert_same_bits(gradients(model) | random_state(), expected)


class AllocatesWhenItDies:
    """Runs ops in its destructor."""

    ran = 0

    def __del__(self) -> None:
        block = torch.empty(HALF, dtype=torch.uint8)
        block[:64].fill_(1)
        AllocatesWhenItDies.ran += 1


def raise_past(*held: object) -> None:
    """Raises; `held` dies while the error is on its way."""
    local = AllocatesWhenItDies()
    raise Failure("on its way", len(held), type(local).__name__)


def test_allocations_while_an_error_is_on_its_way():
    """In a destructor, a finally and an except: the error arrives as it was raised, the bits stay."""
    expected = ordinary()
    model, x = build()
    AllocatesWhenItDies.ran = 0
    with tight() as rescue:
        loss = model(x)
        rescue.tighten()
        rescues = []

        def fail() -> None:
            try:
                raise_past(x.detach().requires_grad_().exp())
            finally:
                rescues.append(rescue.since("rescues"))
                torch.empty(HALF + MIB, dtype=torch.uint8)
                rescues.append(rescue.since("rescues"))

        arrived = None
        try:
            fail()
        except Failure as failure:
            torch.empty(HALF + 2 * MIB, dtype=torch.uint8)
            rescues.append(rescue.since("rescues"))
            arrived = failure.with_traceback(None)  # what the frames hold dies here
        assert arrived is not None
        assert arrived.args == ("on its way", 1, "AllocatesWhenItDies")
        assert rescues == sorted(
            set(rescues)
        )  # every one of them had to free something, or tried to
        assert AllocatesWhenItDies.ran == 1
        rescue.assert_freed(HALF - 2 * MARGIN_BYTES)
        loss.backward()
    assert_same_bits(gradients(model) | random_state(), expected)


@pytest.mark.filterwarnings("ignore:delta_runtime. the budget")
@pytest.mark.parametrize("policy", ["delta", "recompute"])
def test_python_decides_while_an_error_is_on_its_way(policy):
    """The pump runs in the destructor of an object that dies by an error: neither disturbs the other."""
    expected = ordinary()
    model, x = build()
    AllocatesWhenItDies.ran = 0
    budget = cpu_pool.allocated_bytes() + ACTIVATIONS_BYTES // 2
    runtime = delta.Runtime(budget, device="cpu", policy=policy)
    with runtime.step():
        h, error = x, None
        loss = model(h)
        runtime.session.set_budget(cpu_pool.allocated_bytes() + MARGIN_BYTES)
        pumps = runtime.session.counters().pumps
        for _ in range(70):  # the pump has an interval of so many ops
            torch.empty(1)
        try:
            raise_past()
        except Failure as failure:
            error = failure.with_traceback(None)
        pumped = runtime.session.counters().pumps - pumps
        drops = runtime.session.counters().drops
        runtime.session.set_budget(budget)
        loss.backward()
    runtime.close()
    assert error is not None and error.args == ("on its way", 0, "AllocatesWhenItDies")
    assert AllocatesWhenItDies.ran == 1
    assert drops > 0
    assert pumped > 0 or policy == "recompute"
    assert_same_bits(gradients(model) | random_state(), expected)


# ------------------------------------------------------------------------------------------ other threads


def test_an_allocation_on_another_thread_frees_what_the_main_one_saved():
    expected = ordinary()
    model, x = build()
    with tight() as rescue:
        loss = model(x)
        rescue.tighten()
        on_a_thread(lambda: torch.empty(HALF, dtype=torch.uint8))
        rescue.assert_freed(HALF - 2 * MARGIN_BYTES)
        loss.backward()
    assert_same_bits(gradients(model) | random_state(), expected)


def test_threads_allocate_while_the_main_one_trains():
    """Rescues on four threads, with packs, unpacks and rebuilds going on; with the GIL held and not."""
    expected = ordinary()
    stop = threading.Event()
    taken = []

    def work(number: int) -> None:
        torch.set_num_threads(1)
        turn = 0
        while not stop.is_set():
            elements = MIB // 8 + 2048 * (turn % 16)
            block = torch.tensor([0.5] * elements) if number % 2 else torch.empty(elements)
            del block
            turn += 1
            stop.wait(0.0005)
        taken.append(turn)

    model, x = build()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with tight() as rescue:
        rescue.tighten(HALF)
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                torch.manual_seed(1)
                model.zero_grad(set_to_none=True)
                model(x).backward()
                assert_same_bits(gradients(model) | random_state(), expected)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        rescue.assert_freed(HALF)
        assert rescue.since("rebuilds") > 0
    assert len(taken) == 4 and min(taken) > 0


def test_another_thread_trains_on_its_own():
    """Its graphs are not ours: nothing of it is managed, all of it is right."""
    expected = ordinary()

    def other() -> None:
        generator = torch.Generator().manual_seed(7)
        w = torch.randn(64, 64, generator=generator, requires_grad=True)
        (w.tanh() @ w).sum().backward()
        assert w.grad is not None and bool(w.grad.isfinite().all())

    model, x = build()
    with tight() as rescue:
        loss = model(x)
        packs = rescue.runtime.session.counters().packs
        rescue.tighten()
        on_a_thread(other)
        assert rescue.runtime.session.counters().packs == packs
        loss.backward()
    assert_same_bits(gradients(model) | random_state(), expected)


# --------------------------------------------------------------------------------------- garbage collection


class Cycle:
    """Garbage that only the collector finds, and that allocates when it does."""

    allocations = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        torch.empty(MIB + 4096 * (Cycle.allocations % 8), dtype=torch.uint8)
        Cycle.allocations += 1


def test_allocations_during_garbage_collection():
    """The collector runs wherever Python allocates, so also in the middle of packing and unpacking."""
    expected = ordinary()
    model, x = build()
    in_callback = []
    Cycle.allocations = 0

    def callback(phase: str, info: dict[str, int]) -> None:
        before = rescue.since("rescues")
        torch.tensor([0.5] * (MIB // 8))
        torch.empty(MIB // 4)
        in_callback.append(rescue.since("rescues") - before)

    def litter(*_: object) -> None:
        for _ in range(4):
            Cycle()

    handles = [layer.register_forward_pre_hook(litter) for layer in model.layers]
    handles += [layer.weight.register_hook(litter) for layer in model.layers]
    thresholds = gc.get_threshold()
    with tight() as rescue:
        rescue.tighten(HALF)
        gc.callbacks.append(callback)
        gc.set_threshold(15, 2, 2)
        try:
            model(x).backward()
        finally:
            gc.set_threshold(*thresholds)
            gc.callbacks.remove(callback)
        rescue.assert_freed(HALF)
    for handle in handles:
        handle.remove()
    assert Cycle.allocations > 0
    assert sum(in_callback) > 0
    found = gradients(model) | random_state()
    assert_same_bits(found, expected)


# --------------------------------------------------------------------------------------- inside a rebuild

LINKS = 12


def chain(inplace: bool) -> tuple[torch.Tensor, list[torch.autograd.graph.Node]]:
    """A chain of saved results of 1 MiB each, and the nodes that save them, the last first."""
    y = torch.linspace(-1, 1, MIB // 4).requires_grad_()
    y = y * 1.5
    for _ in range(LINKS):
        y = y.add(0.1).tanh_() if inplace else y.tanh()
    nodes, node = [], y.grad_fn
    while node is not None and hasattr(node, "next_functions"):
        if node.name().startswith("Tanh"):
            nodes.append(node)
        node = node.next_functions[0][0] if node.next_functions else None
    return y, nodes


@pytest.mark.parametrize("inplace", [False, True], ids=["out of place", "in place"])
def test_a_rescue_nested_inside_a_rebuild(inplace):
    """Replayed ops allocate, and have to evict others; they never evict what the replay itself needs."""
    _, nodes = chain(inplace)
    expected = {str(i): freeze(node._saved_result) for i, node in enumerate(nodes)}
    assert len(expected) == LINKS
    with tight() as rescue:
        y, nodes = chain(inplace)
        del y  # only autograd holds them
        session = rescue.runtime.session
        assert session.make_room(7 * MIB) >= 7 * MIB
        rescue.tighten()
        nested = 0
        for i, node in enumerate(nodes):
            rebuilds, rescues = rescue.since("rebuilds"), rescue.since("rescues")
            result = node._saved_result  # runs nothing but unpack, and what unpack rebuilds
            if rescue.since("rebuilds") > rebuilds:
                nested += rescue.since("rescues") - rescues
            assert_same_bits({str(i): freeze(result)}, {str(i): expected[str(i)]})
            del result
        assert nested > 0
        rescue.assert_freed(MIB)
        del nodes, node


def test_nothing_to_free_is_no_error_below_the_capacity():
    """The soft limit is passed, and counted; at the capacity the allocation fails, and all is as it was."""
    expected = ordinary()
    model, x = build()
    with tight() as rescue:
        loss = model(x)
        rescue.tighten()
        block = torch.empty(4 * ACTIVATIONS_BYTES, dtype=torch.uint8)
        assert cpu_pool.allocated_bytes() > rescue.limit_bytes
        assert rescue.since("shortfalls") > 0
        del block
        with cpu_pool.capacity(rescue.limit_bytes):
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(8 * ACTIVATIONS_BYTES, dtype=torch.uint8)
        _C.cpu_pool.set_soft_limit(0)
        loss.backward()
    assert_same_bits(gradients(model) | random_state(), expected)


def test_with_the_rescue_switched_off_nothing_is_freed():
    """The switch that the sweep of budgets relies on; and so the tests above can fail."""
    model, x = build()
    with tight() as rescue:
        loss = model(x)
        rescue.tighten()
        _C.cpu_pool.set_rescue_enabled(False)
        try:
            with cpu_pool.capacity(rescue.limit_bytes), pytest.raises(torch.OutOfMemoryError):
                torch.empty(HALF, dtype=torch.uint8)
        finally:
            _C.cpu_pool.set_rescue_enabled(True)
        assert (rescue.since("rescues"), rescue.since("drops")) == (0, 0)
        loss.backward()


# ------------------------------------------------------------------- in a process of its own: it may crash


def child(folder: Path, code: str) -> str:
    """Runs code in a process of its own; a crash or a deadlock there fails the test and nothing else."""
    script = folder / "child.py"
    head = """
        import faulthandler, gc, sys, threading
        faulthandler.enable()
        faulthandler.dump_traceback_later(40, exit=True)
        import torch
        import delta_runtime as delta
        from delta_runtime import _C, cpu_pool
        cpu_pool.install()
        torch.set_num_threads(1)
    """
    script.write_text(textwrap.dedent(head) + textwrap.dedent(code))
    environ = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    done = warm_children.run(
        [script], cwd=ROOT, env=environ | {"PYTHONPATH": str(ROOT)}, timeout=55
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_allocation_on_the_pool_of_jit_threads(tmp_path):
    """On a thread of a C++ pool, without the GIL and without Python."""
    told = child(tmp_path, """
        torch.set_num_interop_threads(1)

        @torch.jit.script
        def work(x: torch.Tensor, n: int):
            block = torch.zeros(n)
            return x.exp().sin() + block[0]

        def run(x: torch.Tensor):
            y = torch.jit.wait(torch.jit.fork(work, x, 1)) * x.cos()
            for _ in range(6):
                y = y.sin() * x.cos()  # by this thread: what others make is kept
            return y.sum()

        x = torch.linspace(0, 1, 1 << 18, requires_grad=True)
        run(x).backward()
        expected, x.grad = x.grad, None
        runtime = delta.Runtime("100%", device="cpu")
        with runtime.step():
            loss = run(x)
            _C.cpu_pool.set_soft_limit(cpu_pool.allocated_bytes() + 65536)
            torch.jit.wait(torch.jit.fork(work, x.detach()[:16], 3 << 18))
            counters = runtime.session.counters()
            assert counters.rescued_bytes > 2 << 20
            loss.backward()
        assert torch.equal(x.grad, expected)
        print("ok")
    """)  # fmt: skip
    assert told == "ok\n"


def test_threads_of_a_pool_outlive_the_runtimes_that_they_saw(tmp_path):
    """They inherit the observer from whoever forks, and must not remember a session that is gone."""
    told = child(tmp_path, """
        torch.set_num_interop_threads(1)

        @torch.jit.script
        def work(x: torch.Tensor):
            return x.exp().sin()

        @torch.jit.script
        def run(x: torch.Tensor):
            return torch.jit.wait(torch.jit.fork(work, x))

        x = torch.linspace(0, 1, 1 << 12, requires_grad=True)
        (run(x).sum() + run(x).sum()).backward()
        expected, x.grad = x.grad, None
        for turn in range(30):
            policy = "recompute" if turn % 3 == 2 else "stress_drop_all"
            runtime = delta.Runtime("100%", device="cpu", policy=policy)
            with runtime.step():
                y = run(x)
                future = torch.jit.fork(work, x)
                (y.sum() + torch.jit.wait(future).sum()).backward()
            assert torch.equal(x.grad, expected)
            x.grad = None
            del runtime, future, y
            gc.collect()
            junk = [bytearray(4096) for _ in range(1000)]  # over the place where the session was
        print("ok")
    """)  # fmt: skip
    assert told == "ok\n"


def test_memory_that_python_owns_is_not_freed_by_a_rescue(tmp_path):
    """Its deleter takes the GIL. A thread that has the GIL and waits for the session's lock would wait for ever."""
    told = child(
        tmp_path,
        """
        import time
        import numpy as np

        sys.setswitchinterval(1e-4)  # else whoever lets go of the GIL waits 5 ms for each busy thread
        library = torch.library.Library("delta_test", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.from_numpy(x.detach().numpy() * 2), "CPU")

        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                y = torch.ops.delta_test.twice(x)  # over memory of numpy
                ctx.save_for_backward(y)
                return y

            @staticmethod
            def backward(ctx, gradient):
                (y,) = ctx.saved_tensors
                return gradient * y

        def run(w):
            y = w
            for _ in range(8):
                y = Twice.apply((y * 0.5).tanh())
            return y.sum()

        w = torch.linspace(-1, 1, 1 << 18, requires_grad=True)
        run(w).backward()
        expected, w.grad = w.grad, None
        runtime = delta.Runtime("100%", device="cpu", verify="off")
        stop = False

        def busy():  # takes the session's lock with the GIL held, all the time
            while not stop:
                runtime.session.publish(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int8), 0)

        threads = [threading.Thread(target=busy) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(30):
                with runtime.step():
                    loss = run(w)
                    _C.cpu_pool.set_soft_limit(cpu_pool.allocated_bytes() + 65536)
                    drops = runtime.session.counters().drops
                    for k in range(20):
                        torch.empty(4_000_000 + 4096 * k)  # more than there is to free
                        time.sleep(0)
                    drops = runtime.session.counters().drops - drops
                    assert drops <= 8, f"{drops}: more than the results of tanh"
                    loss.backward()
                assert torch.equal(w.grad, expected)
                w.grad = None
        finally:
            stop = True
            for thread in threads:
                thread.join()
        assert runtime.session.counters().rescued_bytes > 0
        print("ok")
    """,
    )
    assert told == "ok\n"

"""Closing, ending and forking on other threads than the one that entered; nothing is left, nobody is stuck."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from scripts.stress_interrupts import leftovers
from tests.support import warm_children
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.nets import net

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    yield
    assert not leftovers()


def train(model: nn.Module) -> None:
    model(torch.ones(1024, 64)).square().mean().backward()


def on_another_thread(work: Callable[[], None]) -> BaseException | None:
    """Runs it there to the end; returns what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised[0] if raised else None


@pytest.mark.parametrize("marked", [True, False], ids=["step", "context"])
def test_closing_from_another_thread_is_refused_while_it_is_entered(marked):
    """It cannot take this thread's hooks away; it would leave them here for ever."""
    runtime = delta.Runtime("100%", device="cpu")
    with runtime.step() if marked else runtime:
        error = on_another_thread(runtime.close)
        assert isinstance(error, delta.UsageError)
        assert "another thread" in str(error) and "MainThread" in str(error)
        train(net())
    assert runtime.report().totals.steps == 1  # it went on as it was
    assert on_another_thread(runtime.close) is None  # it is not entered any more
    with pytest.raises(delta.UsageError, match="closed"), runtime:
        pass


@pytest.mark.parametrize("marked", [True, False], ids=["step", "context"])
def test_leaving_from_another_thread_is_refused(marked):
    """As closing is: the hooks of this thread would stay."""
    runtime = delta.Runtime("100%", device="cpu")
    block = runtime.step() if marked else runtime
    with block:
        error = on_another_thread(lambda: block.__exit__(None, None, None))
        assert isinstance(error, delta.UsageError)
        assert "another thread" in str(error) and "MainThread" in str(error)
        train(net())
    assert runtime.report().totals.steps == 1
    with runtime.step():  # it can be entered as before
        train(net())
    runtime.close()


@pytest.mark.parametrize("marked", [True, False], ids=["step", "context"])
def test_leaving_twice_changes_nothing(marked):
    runtime = delta.Runtime("100%", device="cpu")
    block = runtime.step() if marked else runtime
    with block:
        train(net())
        block.__exit__(None, None, None)
        assert not leftovers()
    with runtime.step():
        train(net())
    assert runtime.report().totals.steps == 2
    runtime.close()


@pytest.mark.parametrize("marked", [True, False], ids=["step", "context"])
def test_leaving_after_the_thread_that_entered_has_ended(marked):
    """A loader, say, that was suspended inside of the block, and is collected here."""
    runtime = delta.Runtime("100%", device="cpu")
    block = runtime.step() if marked else runtime
    assert on_another_thread(lambda: block.__enter__()) is None
    block.__exit__(None, None, None)
    assert not leftovers()
    with pytest.raises(delta.UsageError, match="closed"), runtime:
        pass


def test_a_thread_that_ends_while_it_is_in_a_runtime_leaves_the_process_usable():
    budget_bytes = cpu_pool.allocated_bytes() + 2_700_000
    lost = [delta.Runtime(budget_bytes, device="cpu") for _ in range(2)]
    assert on_another_thread(lambda: lost[0]._enter()) is None
    assert on_another_thread(lost[0].close) is None
    assert not leftovers()

    assert on_another_thread(lambda: lost[1]._enter()) is None
    assert leftovers()
    model, expected = net(), net()
    train(expected)
    runtime = delta.Runtime(budget_bytes, device="cpu")
    with runtime.step():  # takes the place of the one whose thread is gone
        train(model)
    assert runtime.report().totals.drops > 0
    for a, b in zip(model.parameters(), expected.parameters()):
        assert torch.equal(a.grad, b.grad)
    with pytest.raises(delta.UsageError, match="closed"), lost[1]:
        pass
    runtime.close()


def python(program: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    return warm_children.run(
        ["-c", textwrap.dedent(program)],
        cwd=ROOT,
        env=clean | {"PYTHONPATH": str(ROOT)} | environ,
        timeout=120,
    )


FORKS = """
    import os, sys, threading
    import torch
    from torch import nn
    import delta_runtime as delta
    from delta_runtime import cpu_pool

    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)))

    def train():
        model(torch.ones(1024, 64)).square().mean().backward()

    def child():
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        train()
        runtime = delta.Runtime(cpu_pool.allocated_bytes() + 2_700_000, device="cpu")
        for _ in range(3):
            with runtime.step():
                train()
        assert runtime.report().totals.drops, runtime.report()
        runtime.close()
        print("child trained", flush=True)

    def fork():
        pid = os.fork()
        if pid == 0:
            try:
                child()
            finally:
                sys.stdout.flush()
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

    with delta.Runtime("100%", device="cpu") as runtime:
        train()
        if {other}:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        else:
            fork()
        train()
    print("parent trained", runtime.report().totals.steps, flush=True)
"""


@pytest.mark.parametrize("other", [True, False], ids=["another thread", "the same thread"])
def test_a_forked_child_is_free_of_the_runtime_and_says_nothing(other):
    done = python(FORKS.replace("{other}", str(other)))
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["child trained", "parent trained 2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore")
def test_children_forked_while_threads_write_go_on():
    """Each write of a thread that is not followed takes locks, which nobody lets go of in the child."""
    w = torch.randn(64, 64, requires_grad=True)
    stop = threading.Event()

    def write() -> None:
        x = torch.zeros(10)
        while not stop.is_set():
            x.add_(1)

    threads = [threading.Thread(target=write, daemon=True) for _ in range(2)]
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0)
    with runtime:
        loss = (w.sin().exp() * w).mean()
        for thread in threads:
            thread.start()
        try:
            end_s = time.monotonic() + 5
            while time.monotonic() < end_s:
                child = os.fork()
                if child == 0:
                    torch.zeros(3).add_(1).numpy()
                    os._exit(0)
                limit_s = time.monotonic() + 10
                while os.waitpid(child, os.WNOHANG)[0] == 0:
                    if time.monotonic() > limit_s:
                        os.kill(child, signal.SIGKILL)
                        os.waitpid(child, 0)
                        pytest.fail("a child hangs")
                    time.sleep(0.0005)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        loss.backward()
    runtime.close()


SAVED_SMALL = """
import os, signal, threading, time
import torch
import delta_runtime as delta

torch.set_num_threads(1)
x, k = torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True)
with delta.Runtime("2GiB", device="cpu"):
    y = x
    for _ in range(400):
        y = y.sin()
    y, z = y.sum(), k.exp()
stop = False

def unpack():
    while not stop:
        y.backward(retain_graph=True)

thread = threading.Thread(target=unpack)
thread.start()
ended, ends_s = [], time.monotonic() + 8
while len(ended) < 400 and time.monotonic() < ends_s:
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # which ends a child that hangs
        z.grad_fn._saved_result
        os._exit(0)
    ended.append(os.waitpid(child, 0)[1])
stop = True
thread.join()
print(len(ended) > 50, set(ended))
"""


def test_children_forked_while_a_thread_unpacks_unpack_too():
    """Backward asks for what is saved without the interpreter's lock; the runtime was left, and nobody watches."""
    assert python(SAVED_SMALL).stdout == "True {0}\n"


REBUILDS = """
import os, signal, threading, time
import torch
import delta_runtime as delta

torch.set_num_threads(1)

def made():
    w, x = torch.randn(512, 512, requires_grad=True), torch.randn(512, 512)
    loss = torch.zeros(())
    for _ in range(6):
        x = (x @ w).tanh() * 1.01
        torch.zeros(1).add(1.0)
        loss = loss + x.mean()
    torch.zeros(1).add(1.0)
    return loss

def backward_on_thread(loss):
    # A thread's first op takes a lock of PyTorch's: a child forked within it hangs, runtime or not.
    begun = threading.Event()

    def backward():
        torch.zeros(1).add(1.0)
        begun.set()
        loss.backward()

    thread = threading.Thread(target=backward)
    thread.start()
    begun.wait()
    return thread

def new_runtime():
    return delta.Runtime(policy="stress_drop_all", device="cpu", min_bytes=0)

def die_where_pytorch_is_locked():
    # At every node of a backward PyTorch takes the lock of its list of observers: a child forked within that hangs at
    # the first op of each of its threads, runtime or not. The probe takes that lock, and nothing of ours. It would
    # keep Python's lock for ever, so the alarm ends the process.
    signal.alarm(5)
    probe = threading.Thread(target=torch._C._autograd._enable_record_function, args=(False,))
    probe.start()
    probe.join()
    signal.alarm(0)

def wait(child):
    ends_s = time.monotonic() + 40
    while time.monotonic() < ends_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"

free = []
ends_s = time.monotonic() + 80
with new_runtime():
    backward_on_thread(made()).join()  # the runtime's own thread has its first op here
    k = 0
    while len(free) < 8 and time.monotonic() < ends_s:
        k += 1
        thread = backward_on_thread(made())
        time.sleep(0.004 * (k % 4 + 1))
        child = os.fork()
        if child == 0:
            die_where_pytorch_is_locked()
            signal.alarm(35)
            with new_runtime() as runtime:
                backward_on_thread(made()).join()
            os._exit(0 if runtime.report().totals.rebuilds > 0 else 3)
        status = wait(child)
        free += [status] * (status != -signal.SIGALRM)
        thread.join()
print(len(free), set(free))
"""


def test_children_forked_while_a_thread_rebuilds_rebuild_too():
    """Ops are run again on a thread of the runtime's own, which has a lock."""
    assert python(REBUILDS).stdout == "8 {0}\n"

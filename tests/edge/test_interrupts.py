"""Signals at any moment: what their handlers raise arrives in the program, and the next runtime works.

Covers the moments that matter one by one, and 40 random ones in a process of its own; scripts/stress_interrupts.py
sends a thousand. Does not cover: exceptions that the program raises itself (test_runtime.py).
"""

# ruff: noqa: PT012  the interrupt comes anywhere in the block
from __future__ import annotations

import contextlib
import gc
import inspect
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import _C, cpu_pool
from delta_runtime.core.interrupts import give_way
from delta_runtime.extension import shielded
from delta_runtime.planners import joint_heuristic
from scripts.stress_interrupts import leftovers
from tests.support.fixtures import one_thread  # noqa: F401
from tests.support.nets import net

ROOT = Path(__file__).resolve().parents[2]
WIDTH, ROWS, LAYERS = 64, 512, 4


class Late(TimeoutError):
    """What a program's own signal handler raises."""


def raise_late(signum: int, frame: object) -> None:
    raise Late


def interrupt_by(way: str) -> Callable[[], None]:
    number = signal.SIGINT if way == "ctrl-c" else signal.SIGUSR1
    return lambda: os.kill(os.getpid(), number)


WAYS = {"ctrl-c": KeyboardInterrupt, "own handler": Late}


@pytest.fixture(params=WAYS)
def way(request) -> Iterator[str]:
    former = signal.signal(signal.SIGUSR1, raise_late)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)
    yield request.param
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)) == handlers
    signal.signal(signal.SIGUSR1, former)


@pytest.fixture(autouse=True)
def nothing_is_left():
    gc.collect()
    yield
    assert not leftovers()


def step(model: nn.Module) -> None:
    model(torch.ones(ROWS, WIDTH)).square().mean().backward()


def tight(**settings: object) -> delta.Runtime:
    """A runtime with room for less than the step needs."""
    return delta.Runtime(
        cpu_pool.allocated_bytes() + 8 * ROWS * WIDTH * 4, device="cpu", **settings
    )


def check_that_the_next_one_works() -> None:
    assert not leftovers()
    expected, model = net(WIDTH, LAYERS), net(WIDTH, LAYERS)
    step(expected)
    runtime = tight()
    with runtime.step():
        step(model)
    assert runtime.report().totals.steps == 1
    assert runtime.report().totals.drops > 0
    runtime.close()
    for a, b in zip(model.parameters(), expected.parameters()):
        assert torch.equal(a.grad, b.grad)


# ------------------------------------------------------------------------------- where our Python runs


OWNERS = {
    "hooks._pump": lambda runtime: runtime.hooks,
    "pump.drain": lambda runtime: runtime.steps.pump,
    "pump.end_step": lambda runtime: runtime.steps.pump,
    "steps.finish": lambda runtime: runtime.steps,
    "steps.begin": lambda runtime: runtime.steps,
    "steps._learn": lambda runtime: runtime.steps,
    "hooks.attach": lambda runtime: runtime.hooks,
    "hooks.detach": lambda runtime: runtime.hooks,
}


def interrupted_at(runtime: delta.Runtime, method: str, interrupt: Callable[[], None], monkeypatch):
    """Has the interrupt come while a method of the runtime runs, once; returns who knows whether it did."""
    ran = []
    owner, name = OWNERS[method](runtime), method.split(".")[-1]
    real = getattr(owner, name)

    def first_interrupted(*args, **kwargs):
        if not ran:
            ran.append(method)
            interrupt()
            for _ in range(100):  # Python would run the handler here
                len(ran)
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, first_interrupted)
    return ran


@pytest.mark.parametrize("method", OWNERS)
@pytest.mark.parametrize("marked", [True, False], ids=["step", "context"])
def test_an_interrupt_in_the_runtimes_own_code_arrives(way, method, marked, monkeypatch):
    model = net(WIDTH, LAYERS)
    runtime = tight(policy="dtr")
    ran = interrupted_at(runtime, method, interrupt_by(way), monkeypatch)
    with pytest.raises(WAYS[way]):
        for _ in range(3):
            with runtime.step() if marked else runtime:
                for _ in range(3):
                    step(model)
                    assert not ran, "the program went on"
    assert ran == [method]
    check_that_the_next_one_works()
    # And the same one goes on.
    with runtime.step():
        step(model)
    runtime.close()


def test_a_handler_that_raises_nothing_runs_once_and_in_the_programs_code(monkeypatch):
    frames = []

    def note(signum, frame):
        frames.append(frame)

    former = signal.signal(signal.SIGUSR1, note)
    try:
        runtime = tight()
        ran = interrupted_at(
            runtime, "steps.finish", lambda: os.kill(os.getpid(), signal.SIGUSR1), monkeypatch
        )
        with runtime:
            for _ in range(3):
                step(net(WIDTH, LAYERS))
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert ran and len(frames) == 1
    assert "delta_runtime" not in frames[0].f_code.co_filename.replace(str(ROOT), "")
    assert runtime.report().totals.steps == 3
    runtime.close()


def test_planning_is_broken_off(monkeypatch):
    """It may take long: Ctrl-C does not wait for it, and what was half planned is forgotten."""
    began_s = []

    def endless(*_: object, **__: object) -> None:
        began_s.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
        while time.monotonic() < began_s[0] + 20:
            give_way()
        pytest.fail("nobody stopped it")

    runtime = tight()
    model = net(WIDTH, LAYERS)
    with monkeypatch.context() as patch:
        patch.setattr(joint_heuristic, "plan", endless)
        with pytest.raises(KeyboardInterrupt), runtime:
            for _ in range(3):
                step(model)
    assert time.monotonic() < began_s[0] + 5
    with runtime:
        for _ in range(3):
            step(model)
    assert runtime.plan() is not None
    runtime.close()


def test_an_error_of_a_policy_is_told_and_does_not_stop_the_training(monkeypatch):
    model = net(WIDTH, LAYERS)
    runtime = tight(policy="dtr")
    told = []

    def broken(need: int) -> None:
        raise RuntimeError("of the policy")

    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with runtime.step():
        runtime.session.set_pump(broken)
        step(model)
    assert told and "policy failed" in str(told[0].object or told[0].err_msg)
    runtime.close()


def test_an_error_that_another_thread_sends_arrives():
    """What PyThreadState_SetAsyncExc raises is not a signal: nothing holds it back."""
    import ctypes

    class Sent(BaseException):
        pass

    model = net(WIDTH, LAYERS)
    runtime = tight(policy="dtr")
    ran = []

    def pump(need: int) -> None:
        ran.append(need)
        if len(ran) == 1:
            ident = ctypes.c_ulong(threading.get_ident())
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(Sent))
            for _ in range(1000):
                len(ran)

    with pytest.raises(Sent), runtime.step():
        runtime.session.set_pump(pump)
        for _ in range(5):
            step(model)
    assert ran
    check_that_the_next_one_works()
    runtime.close()


# ------------------------------------------------------------------------------------- what takes long


def press_ctrl_c_in(seconds: float) -> None:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


def test_waiting_for_a_lane_ends_when_somebody_presses_ctrl_c():
    """Half a MiB at 0.2 MB/s: the copy back takes 2.6 s."""
    x = torch.ones(1 << 17, requires_grad=True)
    runtime = delta.Runtime(
        "100%", device="cpu", policy="swap", host_budget="8MiB", link_bytes_per_s=2e5
    )
    with pytest.raises(KeyboardInterrupt), runtime.step():
        loss = x.exp().sum()
        runtime.session.make_room(1 << 40)
        assert runtime.session.levels().swapped_now_bytes == 1 << 19
        press_ctrl_c_in(0.2)
        began_s = time.monotonic()
        loss.backward()
        pytest.fail("it waited to the end")
    assert 0.15 < time.monotonic() - began_s < 2.0
    runtime.close()
    check_that_the_next_one_works()


def test_rebuilding_ends_when_somebody_presses_ctrl_c():
    """Each of 24 unpacks makes all products before it again: many seconds in one call of backward()."""
    w = torch.randn(640, 640, requires_grad=True)
    m = torch.randn(640, 640) / 640**0.5
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    with pytest.raises(KeyboardInterrupt), runtime.step():
        h = w
        for _ in range(24):
            h = (h @ m).tanh()
        loss = h.sum()
        del h
        press_ctrl_c_in(0.2)
        began_s = time.monotonic()
        loss.backward()
        pytest.fail("it went on to the end")
    assert 0.15 < time.monotonic() - began_s < 1.5
    runtime.close()
    check_that_the_next_one_works()


def test_an_interrupt_in_an_op_that_is_audited_arrives_and_says_nothing_of_the_op():
    """A custom op in Python is rebuilt once and compared: there its code runs, and signals arrive."""
    calls = []

    @torch.library.custom_op("delta_test::interrupted", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(calls))
        if len(calls) == 2:  # in the audit
            os.kill(os.getpid(), signal.SIGINT)
        return x.exp()

    op.register_autograd(
        lambda ctx, gradient: gradient * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
    )

    def run(x: torch.Tensor) -> None:
        y = op(x * 2)
        z = y.sin()
        del y
        z.sum().backward()

    x = torch.linspace(0, 1, 1 << 14, requires_grad=True)
    runtime = delta.Runtime("100%", device="cpu", policy="stress_drop_all")
    with pytest.raises(KeyboardInterrupt), runtime.step():
        run(x)
        for _ in range(1000):
            len(calls)
        pytest.fail("it was swallowed")
    assert len(calls) == 2
    totals = runtime.report().totals
    assert (totals.audits, totals.audit_failures) == (1, 0)
    runtime.close()


@pytest.mark.parametrize("when", ["getstate", "setstate"])
def test_an_interrupt_while_pythons_random_state_is_kept_arrives(way, when, monkeypatch):
    """An op written in Python is run again; what its numbers were drawn from is put back all the same."""

    @torch.library.custom_op("delta_test::in_python", mutates_args=())
    def in_python(x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    x, w = torch.linspace(0, 1, 4096), torch.linspace(0, 1, 4096).requires_grad_()
    interrupt, original = interrupt_by(way), getattr(random, when)
    armed: list[bool] = []

    def interrupted(*args: object) -> object:
        if armed:
            armed.clear()
            interrupt()
        return original(*args)

    with delta.Runtime("100%", device="cpu", policy="stress_drop_all", min_bytes=0) as runtime:
        for _ in range(3):
            w.grad = None
            loss = (in_python(x).sin() * w).sum()
            torch.ones(4).add(1)
            drops = runtime.session.counters().drops
            with monkeypatch.context() as patched:
                patched.setattr(random, when, interrupted)
                numbers = random.getstate(), numpy.random.get_state()
                armed.append(True)
                with pytest.raises(WAYS[way]):
                    loss.backward()
                assert not armed, "nothing was run again"
            assert random.getstate() == numbers[0]
            assert (numpy.random.get_state()[1] == numbers[1][1]).all()
        assert drops > 0
    runtime.close()


def test_an_interrupt_that_meets_an_error_of_ours_arrives(way):
    """It came while autograd ran. Autograd asks for the error's text, and swallows what a handler raises in there."""
    x = torch.ones(64, requires_grad=True)
    a, b = torch.ones(2000, 2000, requires_grad=True), torch.ones(2000, 2000)
    runtime = tight()
    timer = threading.Timer(0.02, interrupt_by(way))
    with pytest.raises(WAYS[way]), runtime.step():
        y = x.exp()
        h = y.sin()  # saves y
        with torch.no_grad():
            y.add_(1)
        loss = (a @ b).sum() + h.sum()  # the product's backward runs first, and takes its time
        timer.start()
        with contextlib.suppress(delta.InplaceModification):
            loss.backward()
        pytest.fail("it was swallowed")
    timer.join()
    runtime.close()


# -------------------------------------------------------------------------------------- any moment


@pytest.mark.timeout(240)
def test_forty_interrupts_at_random_moments():
    """In a process of its own: SIGALRM is pytest-timeout's here."""
    seed = 7
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "stress_interrupts.py"), "--interrupts", "40"]
        + ["--seed", str(seed)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed {seed}: 40 of 40 arrived" in done.stdout
    assert " 0 of them held back" not in done.stdout


# -------------------------------------------------------------------------------- what is shielded


def test_what_is_shielded_passes_for_what_it_is():
    assert delta.Runtime.close.__name__ == "close"
    assert "Idempotent" in (delta.Runtime.close.__doc__ or "")
    assert list(inspect.signature(delta.Runtime.close).parameters) == ["self"]
    assert delta.Runtime.__enter__.__qualname__ == "Runtime.__enter__"

    class Thing:
        @shielded
        def method(self, *args: int, more: int = 0) -> tuple[Thing, tuple[int, ...], int]:
            return self, args, more

    thing = Thing()
    assert thing.method(1, 2, more=3) == (thing, (1, 2), 3)
    assert Thing.method(thing) == (thing, (), 0)
    with pytest.raises(TypeError):
        thing.method(other=1)


def test_shields_inside_each_other_end_with_the_outermost(way):
    happened = []

    @shielded
    def inner() -> None:
        interrupt_by(way)()
        for _ in range(100):
            len(happened)
        happened.append("inner")

    @shielded
    def outer() -> None:
        inner()
        for _ in range(100):
            len(happened)
        happened.append("outer")

    with pytest.raises(WAYS[way]):
        outer()
        for _ in range(100):
            len(happened)
    assert happened == ["inner", "outer"]


def test_a_shield_on_another_thread_holds_nothing_back(way):
    """Signals are the main thread's business: it must not wait for what other threads do."""
    begun, end = threading.Event(), threading.Event()

    @shielded
    def work() -> None:
        begun.set()
        end.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(20)
    try:
        with pytest.raises(WAYS[way]):
            interrupt_by(way)()
            for _ in range(1000):
                begun.is_set()
    finally:
        end.set()
        thread.join()


def test_a_handler_of_c_code_is_left_alone():
    """faulthandler's, for instance: what Python has no handler for is not touched."""
    import faulthandler

    if not hasattr(faulthandler, "register"):
        pytest.skip("no such thing here")
    with open(os.devnull, "w") as nowhere:
        faulthandler.register(signal.SIGUSR2, file=nowhere)
        try:
            before = _C.signals_held()
            shielded(lambda: os.kill(os.getpid(), signal.SIGUSR2))()
            assert _C.signals_held() == before
        finally:
            faulthandler.unregister(signal.SIGUSR2)


def test_contexts_are_decorators_as_before():
    runtime = delta.Runtime("100%", device="cpu")
    model = net(WIDTH, LAYERS)

    @runtime.step()
    def train() -> None:
        step(model)

    train()
    train()
    assert runtime.report().totals.steps == 2

    @delta.disable()
    def apart() -> bool:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    with runtime, contextlib.suppress(ValueError):
        assert apart() and apart()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    runtime.close()

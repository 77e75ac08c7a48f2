"""Does an interrupt at any moment reach the program, and does the next runtime work after it?

A stress run, not a benchmark. While a small model trains under a budget, an interrupt comes at a seeded random moment:
SIGINT from another process (what Ctrl-C sends), SIGINT from a thread, SIGALRM whose handler raises KeyboardInterrupt or
an error of the program's own. It has to arrive, as what it is, in the code that trains; nothing of the runtime may be
left then (hooks, soft limit, "another runtime is entered already"); and a new runtime in the same
process has to train the same bits as without one. The programs also enter, leave, disable and close runtimes all the
time, so that many interrupts meet those. Takes about two minutes for 1,000 interrupts on two cores; needs no GPU.
Exits 1 if one was lost or if anything was left.

    python scripts/stress_interrupts.py [--interrupts 1000] [--seed 0] [--only NAME ...] [--ordinary]

`--ordinary` runs the same programs without a runtime: what Python itself loses. tests/edge/test_interrupts.py runs a
short version.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import delta_runtime as delta
from delta_runtime import _C, cpu_pool, entered

LAYERS = 3
WIDTH = 48
ROWS = 256
MOST_DELAY_S = 0.04
"""An interrupt comes at most so long after it was armed: several steps, several runtimes."""
MOST_WAIT_S = 10.0
"""One that has not arrived so long after it was armed is lost."""


class Late(TimeoutError):
    """What a program's own handler of SIGALRM raises."""


class Net(nn.Module):
    """Linear, an in-place op, dropout: drops and rebuilds at half of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.1))
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.nn.functional.gelu(block(x))
        return x.square().mean()


def _batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def _trained(runtime: delta.Runtime | None) -> list[torch.Tensor]:
    """Two whole steps from a fixed seed: losses, gradients and weights."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    told = []
    for _ in range(2):
        optimizer.zero_grad()
        with runtime.step() if runtime else contextlib.nullcontext():
            loss = model(_batch())
            loss.backward()
        optimizer.step()
        told += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return [*told, *(p.detach() for p in model.parameters())]


class World:
    """The model that is trained, budgets for it, and what it trains to without a runtime."""

    def __init__(self, seed: int, *, ordinary: bool = False) -> None:
        cpu_pool.install()
        self.seed = seed
        self.ordinary = ordinary
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        gc.collect()
        cpu_pool.reset_peak()
        base_bytes = cpu_pool.allocated_bytes()
        self.wanted = _trained(None)
        self.range_bytes = cpu_pool.peak_bytes() - base_bytes

    def runtime(self, share: float = 0.6, **settings: object) -> delta.Runtime:
        """Return a new runtime that leaves `share` of what the step needs."""
        budget_bytes = cpu_pool.allocated_bytes() + int(share * self.range_bytes)
        return delta.Runtime(budget_bytes, device="cpu", **settings)

    def train(self) -> None:
        """One ordinary step."""
        self.model(_batch()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


# ----------------------------------------------------------------------------------------- programs
#
# Each runs for some milliseconds, again and again until the interrupt comes, and begins with no runtime entered.


def steps(world: World) -> None:
    """Return marked steps, the optimizer outside of them."""
    runtime = world.runtime()
    for _ in range(4):
        with runtime.step():
            world.model(_batch()).backward()
        world.optimizer.step()
        world.optimizer.zero_grad(set_to_none=True)
    runtime.close()


def context(world: World) -> None:
    """Only entered: the boundaries of steps are found, and plans made, inside of ops."""
    with world.runtime() as runtime:
        for _ in range(6):
            world.train()
    runtime.close()


def online(world: World) -> None:
    """Return a filter decides at ops, in Python."""
    with world.runtime(0.4, policy="dtr"):
        for _ in range(3):
            world.train()


def swapping(world: World) -> None:
    """Through two slow lanes."""
    runtime = world.runtime(0.5, policy="swap", host_budget="64MiB", link_bytes_per_s=1e8)
    with runtime:
        for _ in range(2):
            world.train()
    runtime.close()


def in_and_out(world: World) -> None:
    """Entering and leaving, with next to nothing between."""
    runtime = world.runtime()
    for _ in range(20):
        with runtime:
            pass
        with runtime.step():
            pass
    runtime.close()


def disabled(world: World) -> None:
    """Taken away and put back in the middle of steps, by the program and by what bears no hooks."""
    with world.runtime():
        for _ in range(4):
            with delta.disable():
                torch.zeros(4)
            torch.func.grad(lambda x: x.sin().sum())(torch.ones(4))
        world.train()


def closed_inside(world: World) -> None:
    """Return closed where it is entered."""
    for _ in range(4):
        with world.runtime() as runtime:
            runtime.close()
        with world.runtime() as runtime, runtime.step():
            world.model(_batch())
            runtime.close()


@torch.library.custom_op("delta_stress::in_python", mutates_args=())
def _in_python(x: torch.Tensor) -> torch.Tensor:
    return x * 2.0


def ops_in_python(world: World) -> None:
    """Run again to rebuild; what Python and numpy draw numbers from is put back around each."""
    x, w = torch.linspace(0, 1, 4096), torch.linspace(0, 1, 4096).requires_grad_()
    with world.runtime(policy="stress_drop_all", min_bytes=0) as runtime:
        for _ in range(3):
            loss = torch.zeros(())
            for _ in range(6):
                loss = loss + (_in_python(x).sin() * w).sum()
            loss.backward()
    runtime.close()


PROGRAMS: tuple[Callable[[World], None], ...] = (
    steps,
    context,
    online,
    swapping,
    in_and_out,
    disabled,
    closed_inside,
    ops_in_python,
)


# --------------------------------------------------------------------------------------- interrupts


def _raise_late(signum: int, frame: FrameType | None) -> None:
    raise Late("the program's own time is over")


_OTHER_PROCESS = """
import os, signal, sys, time
for line in sys.stdin:
    time.sleep(float(line))
    os.kill(os.getppid(), signal.SIGINT)
"""


class Interrupter:
    """Sends one interrupt after a while, in one of several ways."""

    ways = ("process", "thread", "alarm", "error")

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _OTHER_PROCESS], stdin=subprocess.PIPE, text=True
        )
        self._former = signal.getsignal(signal.SIGALRM)

    def arm(self, way: str, delay_s: float) -> None:
        """Have it come."""
        if way == "process":
            assert self._process.stdin is not None
            self._process.stdin.write(f"{delay_s}\n")
            self._process.stdin.flush()
        elif way == "thread":
            timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
            timer.daemon = True
            timer.start()
        else:
            handler = _raise_late if way == "error" else signal.default_int_handler
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-6))

    def close(self) -> None:
        signal.signal(signal.SIGALRM, self._former)
        self._process.terminate()
        self._process.wait()


# ------------------------------------------------------------------------------------------ the run


@dataclass
class Outcome:
    """What became of the interrupts."""

    sent: Counter[str] = field(default_factory=Counter)
    arrived: Counter[str] = field(default_factory=Counter)
    held_back: int = 0
    """Of them, those that came while Python code of the runtime ran."""
    latencies_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def leftovers() -> list[str]:
    """Return what a runtime must not leave behind."""
    found = []
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        found.append("saved-tensor hooks")
    if _C.cpu_pool.soft_limit_bytes():
        found.append("a soft limit")
    if entered.entered() is not None:
        found.append("an entered runtime")
    if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
        found.append("optimizer hooks")
    if torch.autograd.graph.disable_saved_tensors_hooks is not _DISABLE_HOOKS:
        found.append("a patched disable_saved_tensors_hooks")
    return found


_DISABLE_HOOKS = torch.autograd.graph.disable_saved_tensors_hooks


def clear_away() -> None:
    """So that one fault does not make everything that follows fail."""
    runtime = entered.entered()
    if runtime is not None:
        entered.release(runtime)
        runtime.session.leave()
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    _global_optimizer_pre_hooks.clear()
    _global_optimizer_post_hooks.clear()
    torch.autograd.graph.disable_saved_tensors_hooks = _DISABLE_HOOKS
    _C.cpu_pool.set_soft_limit(0)
    _C.cpu_pool.set_soft_limit_is_hard(False)


def _works(world: World) -> str:
    """Whether a new runtime trains as ever; what is wrong if not."""
    try:
        runtime = world.runtime(1.0 if world.ordinary else 0.6)
        told = _trained(None if world.ordinary else runtime)
        totals = runtime.report().totals
        runtime.close()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not all(torch.equal(a, b) for a, b in zip(told, world.wanted, strict=True)):
        return "other bits"
    if not world.ordinary and totals.steps != 2:
        return f"{totals.steps} steps instead of 2"
    return "" if world.ordinary or totals.drops else "nothing was managed"


def _until_it_comes(world: World, program: Callable[[World], None], deadline: float) -> None:
    while time.monotonic() < deadline:
        program(world)


@contextlib.contextmanager
def _without_runtimes() -> Iterator[None]:
    """Return the programs as they are without us: runtimes that do nothing."""

    class Nothing(contextlib.AbstractContextManager["Nothing"]):
        def step(self) -> Nothing:
            return self

        def close(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    real, World.runtime = World.runtime, lambda self, *_, **__: Nothing()
    try:
        yield
    finally:
        World.runtime = real


def interrupt(
    world: World, interrupter: Interrupter, number: int, names: Sequence[str], outcome: Outcome
) -> None:
    """Send one interrupt into a program and looks at what comes of it."""
    draw = random.Random(f"{world.seed}/{number}")
    chosen = [each for each in PROGRAMS if not names or each.__name__ in names]
    program = draw.choice(chosen)
    way = draw.choice(interrupter.ways)
    delay_s = draw.uniform(0, MOST_DELAY_S)
    where = f"{program.__name__}, {way}"
    outcome.sent[where] += 1
    held_before = _C.signals_held()
    wanted = Late if way == "error" else KeyboardInterrupt
    armed_s = time.monotonic()
    try:
        interrupter.arm(way, delay_s)
        if world.ordinary:
            with _without_runtimes():
                _until_it_comes(world, program, armed_s + MOST_WAIT_S)
        else:
            _until_it_comes(world, program, armed_s + MOST_WAIT_S)
        outcome.faults.append(f"{number} ({where}): lost")
    except BaseException as error:
        if type(error) is wanted:
            outcome.arrived[where] += 1
            outcome.latencies_s.append(time.monotonic() - armed_s - delay_s)
        else:
            outcome.faults.append(f"{number} ({where}): became {type(error).__name__}: {error}")
            with contextlib.suppress(KeyboardInterrupt, Late):
                time.sleep(2 * MOST_DELAY_S)  # it may come yet
    outcome.held_back += (_C.signals_held() if hasattr(_C, "signals_held") else 0) - held_before
    world.optimizer.zero_grad(set_to_none=True)
    torch.set_grad_enabled(True)  # the interrupt may have met torch's own `no_grad`
    left = leftovers()
    if left:
        outcome.faults.append(f"{number} ({where}): left {', '.join(left)}")
        clear_away()
    wrong = _works(world)
    if wrong:
        outcome.faults.append(f"{number} ({where}): the next runtime: {wrong}")
        clear_away()


def stress(
    interrupts: int,
    seed: int,
    *,
    names: Sequence[str] = (),
    ordinary: bool = False,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Send interrupts one after the other.

    Args:
        interrupts: how many.
        seed: of programs, ways and moments.
        names: programs to choose from; all if empty.
        ordinary: without a runtime.
        say: told of each fault, and now and then of the progress.
    """
    outcome = Outcome()
    interrupter = Interrupter()
    began_s = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # budgets that are passed
            world = World(seed, ordinary=ordinary)
            for number in range(interrupts):
                known = len(outcome.faults)
                interrupt(world, interrupter, number, names, outcome)
                for fault in outcome.faults[known:] if say else ():
                    say(fault)
                if say and (number + 1) % 100 == 0:
                    say(
                        f"{number + 1} sent, {outcome.arrived.total()} arrived, {outcome.held_back} held back, "
                        f"{len(outcome.faults)} faults, {time.monotonic() - began_s:.0f} s"
                    )
    finally:
        interrupter.close()
    return outcome


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--interrupts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=(), choices=[p.__name__ for p in PROGRAMS])
    parser.add_argument("--ordinary", action="store_true", help="without a runtime")
    options = parser.parse_args(argv)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts jobs in the background with SIGINT ignored: every one that is sent would count as lost.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    outcome = stress(
        options.interrupts,
        options.seed,
        names=options.only,
        ordinary=options.ordinary,
        say=lambda text: print(text, flush=True),
    )
    print(f"\n{'program, way':24} sent  arrived")
    for where, sent in sorted(outcome.sent.items()):
        print(f"{where:24} {sent:4}  {outcome.arrived[where]:7}")
    late_s = sorted(outcome.latencies_s) or [0.0]
    print(
        f"\nseed {options.seed}: {outcome.arrived.total()} of {outcome.sent.total()} arrived, "
        f"{outcome.held_back} of them held back while the runtime's own Python ran; from sending to arriving "
        f"{1e3 * late_s[len(late_s) // 2]:.1f} ms in the middle, {1e3 * late_s[-1]:.0f} ms at the most; "
        f"{len(outcome.faults)} faults"
    )
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())

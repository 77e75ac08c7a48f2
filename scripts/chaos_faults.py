"""The faults of stress_chaos.py, the net that they strike, and what it trains to without one.

Question: none by itself; stress_chaos.py asks it. Covers: where saved tensors go (`WAYS`), when in a step a fault comes
(`PHASES`), and what each fault does (`FAULTS`), with the errors that may come of it. Does not cover the order of
strikes, and how they are judged and told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import random
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.online.policies import get_policy

BLOCKS = 6
WIDTH = 64
ROWS = 512
FORWARD, BACKWARD, BETWEEN = "forward", "backward", "between"
PHASES = (FORWARD, BACKWARD, BETWEEN)
"""When a fault comes: at a block of forward or of backward, or between two steps."""
DROPPED, HOST, DISK = "dropped", "host", "disk"
WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        DROPPED: {"policy": "recompute"},
        HOST: {"policy": "swap", "host_budget": "64MiB", "link_bytes_per_s": 2e9},
        DISK: {"policy": "swap", "disk_budget": "64MiB"},
    }
)
"""Where saved tensors go, with the runtime's settings for it."""
_CHILD_S = 60.0


class Struck(Exception):
    """Raised by a fault, in code that is not the runtime's."""


_op_fails: list[Callable[[], None]] = []


@torch.library.custom_op("delta_chaos::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    """Multiply by 1.5; an op of a program's own, which can be told to fail."""
    for fail in _op_fails:
        fail()
    return x * 1.5


@scaled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


scaled.register_autograd(lambda ctx, grad: grad * 1.5)


class Block(nn.Module):
    """Linear, an op in place, dropout, an op of the program's own, and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.linear(x))
        y = nn.functional.gelu(scaled(nn.functional.dropout(y, 0.1)))
        return x + y.view(-1).view_as(x).tanh()


class World:
    """The net, what it trains to, and where in a step somebody wants to be called.

    Attributes:
        moment: called with the phase and the number of the block, whenever one is reached.
        around_block: encloses each block of forward.
    """

    def __init__(self, seed: int) -> None:
        cpu_pool.install()
        self.seed = seed
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.x = torch.randn(ROWS, WIDTH)
        self.moment: Callable[[str, int], None] = lambda phase, block: None
        self.around_block: Callable[[int], contextlib.AbstractContextManager[None]] = lambda block: (
            contextlib.nullcontext()
        )
        base_bytes = cpu_pool.allocated_bytes()
        cpu_pool.reset_peak()
        self.wanted = self.step(None)
        self.range_bytes = cpu_pool.peak_bytes() - base_bytes

    def loss(self) -> Tensor:
        """Run forward."""
        x = self.x
        for number, block in enumerate(self.blocks):
            self.moment(FORWARD, number)
            with self.around_block(number):
                x = block(x)
            # Not the block itself: `self` would be held by the graph, and the graph by an error's traceback.
            x.register_hook(lambda _, number=number: self.moment(BACKWARD, number))
        return x.square().mean()

    def step(self, runtime: delta.Runtime | None) -> list[Tensor]:
        """Run one step on fixed numbers; return the loss, all gradients, and the random state behind it."""
        for parameter in self.blocks.parameters():
            parameter.grad = None
        torch.manual_seed(self.seed)
        with runtime.step() if runtime else contextlib.nullcontext():
            loss = self.loss()
            loss.backward()
        gradients = [p.grad for p in self.blocks.parameters() if p.grad is not None]
        return [loss.detach(), *(each.clone() for each in gradients), torch.get_rng_state()]

    def is_right(self, told: list[Tensor]) -> bool:
        """Whether these are the bits of a step without a runtime."""
        return len(told) == len(self.wanted) and all(map(torch.equal, told, self.wanted))

    def runtime(self, share: float = 0.7, **settings: Any) -> delta.Runtime:
        """Return a new runtime that leaves `share` of what the step needs."""
        budget_bytes = cpu_pool.allocated_bytes() + int(share * self.range_bytes)
        return delta.Runtime(budget_bytes, device="cpu", min_bytes=0, **settings)

    def rest(self) -> None:
        """Let nobody be called any more, and forget the gradients."""
        self.moment = lambda phase, block: None
        self.around_block = lambda block: contextlib.nullcontext()
        for parameter in self.blocks.parameters():
            parameter.grad = None


@dataclass
class Strike:
    """One fault in one step.

    Attributes:
        world: that it strikes.
        way, phase: where tensors go, and when it comes.
        block: at which block of that phase.
        random: whatever else is by chance.
        runtime: that it strikes.
        files: descriptors of what the runtime has open: its spill file.
        armed: whether what was prepared may take effect.
        took: whether it was delivered; of an error that is raised later, whether it was raised.
        after: is done when the step is over, whatever came of it; the last one first.
        wrong: what else went wrong because of it.
    """

    world: World
    way: str
    phase: str
    block: int
    random: random.Random
    runtime: delta.Runtime = field(init=False)
    files: set[int] = field(default_factory=set)
    armed: bool = False
    took: bool = False
    after: list[Callable[[], None]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Args:
        strike: does it, at the moment that was chosen.
        phases, ways: when and where it makes sense.
        errors: that may come up in the program because of it.
        must_raise: whether one of them has to, once it was delivered.
        settings: of the runtime that it strikes, beside those of the way.
        arms: whether `strike` is called before the step begins, and takes effect at the moment by itself.
        never: ways and phases in which what it waits for does not come.
    """

    strike: Callable[[Strike], None]
    phases: tuple[str, ...] = PHASES
    ways: tuple[str, ...] = tuple(WAYS)
    errors: tuple[type[BaseException], ...] = ()
    must_raise: bool = False
    settings: Callable[[Strike], Mapping[str, Any]] | None = None
    arms: bool = False
    never: tuple[tuple[str, str], ...] = ()

    def makes_sense(self, way: str, phase: str) -> bool:
        """Whether it is struck there."""
        return way in self.ways and phase in self.phases and (way, phase) not in self.never


# ------------------------------------------------------------------------------------------- memory and files


def no_memory(strike: Strike) -> None:
    """Nearly nothing may be allocated any more, in any op, until the step is over."""
    former = cpu_pool.capacity_bytes()
    cpu_pool.set_capacity(cpu_pool.allocated_bytes() + strike.random.choice((1, 1 << 15, 1 << 18)))
    strike.after.append(lambda: cpu_pool.set_capacity(former))
    strike.took = True


def _limit_files(strike: Strike, size_bytes: int) -> None:
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, former[1]))
    strike.after.append(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, former))
    strike.took = True


def full_disk(strike: Strike) -> None:
    """No write to a file succeeds until the step is over."""
    _limit_files(strike, 0)


def short_write(strike: Strike) -> None:
    """End writes somewhere within a tensor: from there on they fail."""
    tensor_bytes = 4 * ROWS * WIDTH
    _limit_files(strike, int(tensor_bytes * (strike.random.randrange(4) + 0.5)))


def read_error(strike: Strike) -> None:
    """Let no read of the spill file succeed until the step is over; writes do."""
    for descriptor in strike.files:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        kept = os.dup(descriptor)
        for_writes = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | (flags & os.O_DIRECT))
        os.dup2(for_writes, descriptor)
        os.close(for_writes)
        strike.after.append(partial(os.close, kept))
        strike.after.append(partial(os.dup2, kept, descriptor))
        strike.took = True


def open_files() -> set[int]:
    """Return the descriptors of this process that are regular files."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.fstat(int(entry)).st_mode):
                found.add(int(entry))
    return found


def stopped_lanes(strike: Strike) -> None:
    """End the threads that copy, in the middle of a step."""
    strike.runtime.session.stop_lanes()
    strike.took = True


def slow_lanes(strike: Strike) -> None:
    """Do nothing: the lanes are a hundred times too slow from the beginning."""
    strike.took = True


# --------------------------------------------------------------------------------------- errors of others


def failing_pack(strike: Strike) -> None:
    """Raise in saved-tensor hooks that the program has around one block, when a tensor is saved."""
    _hooks_around_block(strike, fails=FORWARD)


def failing_unpack(strike: Strike) -> None:
    """Raise in saved-tensor hooks that the program has around one block, when a tensor is asked for."""
    _hooks_around_block(strike, fails=BACKWARD)


def _hooks_around_block(strike: Strike, fails: str) -> None:
    def raising(phase: str) -> Callable[[Tensor], Tensor]:
        def pass_on(tensor: Tensor) -> Tensor:
            if phase == fails:
                strike.took = True
                raise Struck(f"in a hook of {phase}")
            return (
                tensor.detach()
            )  # a saved result would hold its own graph, for ever where backward does not end

        return pass_on

    @contextlib.contextmanager
    def around(number: int) -> Iterator[None]:
        if number != strike.block:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(raising(FORWARD), raising(BACKWARD)):
            yield

    strike.world.around_block = around


def failing_policy(strike: Strike) -> Mapping[str, Any]:
    """Return a policy that is asked whenever room is needed, and raises from the moment on."""
    policy = get_policy(str(WAYS[strike.way]["policy"]))
    assert policy.filter is not None
    weigh = policy.filter.weights

    def weights(columns: Any) -> Any:
        if strike.armed:
            strike.took = True
            raise Struck("in a policy")
        return weigh(columns)

    ranks = dataclasses.replace(policy.filter, weights=weights)
    return {"policy": dataclasses.replace(policy, filter=ranks, plans=False), "share": 0.55}


def from_now_on(strike: Strike) -> None:
    """Let what was prepared take effect."""
    strike.armed = True
    strike.after.append(lambda: setattr(strike, "armed", False))


def failing_rebuild(strike: Strike) -> None:
    """Raise in an op of the program's own, when it is run again."""

    def fail() -> None:
        strike.took = True
        raise Struck("in an op that is run again")

    _op_fails.append(fail)
    strike.after.append(_op_fails.clear)


def dropped_graph(strike: Strike) -> None:
    """Raise in the program: what was recorded so far is never used."""
    strike.took = True
    raise Struck("the graph is dropped")


def interrupt(strike: Strike) -> None:
    """Raise KeyboardInterrupt from a signal handler, up to three milliseconds later."""

    def handler(number: int, frame: FrameType | None) -> None:
        strike.took = True
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, handler)

    def end() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)

    strike.after.append(end)
    signal.setitimer(signal.ITIMER_REAL, 1e-5 + 3e-3 * strike.random.random())


# --------------------------------------------------------------------------------- threads, processes, runtimes


def fork(strike: Strike) -> None:
    """Fork; the child trains a step in a runtime of its own, and the parent goes on.

    Forked within a backward, PyTorch has no backward in the child: there it runs forward only.
    """
    strike.took = True
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(int(_CHILD_S / 2))
            strike.world.rest()
            runtime = strike.world.runtime()
            if strike.phase == BACKWARD:
                torch.manual_seed(strike.world.seed)
                with torch.enable_grad(), runtime.step():
                    loss = strike.world.loss()
                status = 0 if torch.equal(loss, strike.world.wanted[0]) else 3
            else:
                status = 0 if strike.world.is_right(strike.world.step(runtime)) else 3
        finally:
            os._exit(status)

    def wait() -> None:
        ends_s = time.monotonic() + _CHILD_S
        while time.monotonic() < ends_s:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                if status:
                    strike.wrong.append(f"the forked child: {os.waitstatus_to_exitcode(status)}")
                return
            time.sleep(1e-3)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        strike.wrong.append("the forked child hangs")

    strike.after.append(wait)


def other_thread(strike: Strike) -> None:
    """Another thread trains a model of its own, with the same ops, until the step is over."""
    strike.took = True
    stop = threading.Event()
    weights = strike.world.blocks[0].linear.weight.detach().clone().requires_grad_()
    x = strike.world.x.clone()

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad((x @ weights).tanh().square().mean(), weights)
        return found

    told: list[Tensor] = []

    def train() -> None:
        try:
            while not stop.is_set() or not told:
                told.append(gradient())
        except Exception as error:
            strike.wrong.append(f"the other thread: {type(error).__name__}: {error}")

    thread = threading.Thread(target=train)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()
        wanted = gradient()
        if not told or not all(torch.equal(each, wanted) for each in told):
            strike.wrong.append("the other thread computed other bits")

    strike.after.append(end)


def other_budget(strike: Strike) -> None:
    """Close the runtime, and go on with one of another budget."""
    strike.took = True
    within = strike.phase != BETWEEN
    strike.runtime.close()
    share = strike.random.choice((0.6, 0.8, 1.5))
    strike.runtime = strike.world.runtime(share, **WAYS[strike.way])
    if within:
        strike.runtime.__enter__()
        strike.after.append(lambda: strike.runtime.__exit__(None, None, None))


def closed(strike: Strike) -> None:
    """Close the runtime; what follows goes on without it."""
    strike.took = True
    strike.runtime.close()


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "no memory": Fault(no_memory, errors=(torch.OutOfMemoryError,)),
        "disk full": Fault(full_disk, ways=(DISK,)),
        "short write": Fault(short_write, ways=(DISK,)),
        "read error": Fault(read_error, ways=(DISK,), errors=(delta.SwapFailed,)),
        "lanes stopped": Fault(stopped_lanes, ways=(HOST, DISK)),
        "lanes slow": Fault(
            slow_lanes,
            phases=(FORWARD, BACKWARD),
            ways=(HOST,),
            settings=lambda strike: {"link_bytes_per_s": 2e7},
        ),
        "error in pack": Fault(
            failing_pack, phases=(FORWARD,), errors=(Struck,), must_raise=True, arms=True
        ),
        "error in unpack": Fault(
            failing_unpack, phases=(BACKWARD,), errors=(Struck,), must_raise=True, arms=True
        ),
        # In backward nothing has to be ranked any more: what went in forward stays below until it is asked for.
        "error in policy": Fault(
            from_now_on,
            errors=(Struck,),
            settings=failing_policy,
            never=((HOST, BACKWARD), (DISK, BACKWARD)),
        ),
        "error in rebuild": Fault(
            failing_rebuild, phases=(BACKWARD,), ways=(DROPPED,), errors=(Struck,)
        ),
        "graph dropped": Fault(
            dropped_graph, phases=(FORWARD, BACKWARD), errors=(Struck,), must_raise=True
        ),
        "interrupt": Fault(interrupt, errors=(KeyboardInterrupt,), must_raise=True),
        "fork": Fault(fork),
        "other thread": Fault(other_thread),
        "other budget": Fault(other_budget),
        "closed": Fault(closed),
    }
)
"""Every fault, by name."""

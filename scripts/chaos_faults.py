"""The faults of stress_chaos.py that any device can have, and the table of all.

Question: none by itself; stress_chaos.py asks it. Covers: what each fault does, with the errors that may come of it.
Does not cover those that only an accelerator has (chaos_accelerator.py), the net that they strike (chaos_world.py), the
order of strikes, and how they are judged and told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch import Tensor

import delta_runtime as delta
from delta_runtime.online.policies import get_policy
from scripts.chaos_accelerator import (
    ACCELERATORS,
    NOTHING_LEAVES,
    OF_ACCELERATORS,
    show_slow_copies,
)
from scripts.chaos_strike import LAST_BLOCKS, Fault, Never, Strike, Struck
from scripts.chaos_world import (
    BACKWARD,
    BETWEEN,
    CPU,
    DISK,
    DROPPED,
    FORWARD,
    HOST,
    WIDTH,
    Block,
    op_fails,
)

_CHILD_S = 60.0
_RUNS_S = 10.0
_LESS = {DROPPED: (0.45, 0.55), HOST: (0.2, 0.25), DISK: (0.15, 0.175)}
"""How much of what the step needs fits into the smaller device. At 0.4, 0.15 and 0.1 steps die: all that may leave
has left then, and in a first step what an op of the program's own made may not."""
_LESS_ON_ACCELERATORS = {**_LESS, DROPPED: (0.45, 0.5), DISK: _LESS[HOST]}
"""There the ways to host and disk are alike: at 0.175 steps die by both. At 0.55 what is dropped may be enough late in
backward."""
_SLOW_BYTES_PER_S = 2e7


# ------------------------------------------------------------------------------------------- memory and files


def no_memory(strike: Strike) -> None:
    """Nearly nothing may be allocated any more, in any op, until the step is over."""
    tensor_bytes = strike.device.tensor_bytes
    strike.takes_if_more(strike.device.refusals)
    strike.device.shrink_around(strike.random.choice((1, tensor_bytes // 4, tensor_bytes)))
    strike.after.append(strike.device.widen)


def less_memory(strike: Strike) -> None:
    """Make the device smaller than the budget until the step is over; what may leave is more than that."""
    less = _LESS if strike.device.name == CPU else _LESS_ON_ACCELERATORS
    strike.takes_if_more(strike.device.refusals)
    share = strike.random.choice(less[strike.way])
    strike.device.shrink(strike.world.budget_bytes(share))
    strike.after.append(strike.device.widen)


def _limit_files(strike: Strike, size_bytes: int) -> None:
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, former[1]))
    strike.after.append(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, former))
    strike.takes_if_more(lambda: strike.runtime.session.counters().failed_writes)


def full_disk(strike: Strike) -> None:
    """No write to a file succeeds until the step is over."""
    _limit_files(strike, 0)


def short_write(strike: Strike) -> None:
    """End writes somewhere within a tensor: from there on they fail."""
    _limit_files(strike, int(strike.device.tensor_bytes * (strike.random.randrange(4) + 0.5)))


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
    strike.takes_if_more(lambda: strike.runtime.session.counters().failed_reads)


def open_files() -> set[int]:
    """Return the descriptors of this process that are regular files."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISREG(os.fstat(int(entry)).st_mode):
                found.add(int(entry))
    return found


def stopped_lanes(strike: Strike) -> None:
    """End whatever copies, in the middle of a step: what comes later is refused, or waits for its own copy."""
    session = strike.runtime.session
    session.stop_lanes()
    strike.takes_if_more(lambda: sum(each["refusals"] for each in session.tiers()))
    strike.takes_if_more(lambda: session.counters().swap_ins)


def slow_lanes(strike: Strike) -> None:
    """Do nothing: the lanes are a hundred times too slow from the beginning."""
    show_slow_copies(strike, _SLOW_BYTES_PER_S)


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
    policy = get_policy(str(strike.device.ways[strike.way]["policy"]))
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

    op_fails.append(fail)
    strike.after.append(op_fails.clear)


def dropped_graph(strike: Strike) -> None:
    """Raise in the program: what was recorded so far is never used."""
    strike.took = True
    raise Struck("the graph is dropped")


def handle_alarms(strike: Strike) -> Mapping[str, Any]:
    """Let an alarm raise KeyboardInterrupt. Only the main thread may; a strike in backward may be on another."""

    def handler(number: int, frame: FrameType | None) -> None:
        strike.took = True
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGALRM, handler)
    strike.after.append(lambda: signal.signal(signal.SIGALRM, former))
    strike.after.append(lambda: signal.setitimer(signal.ITIMER_REAL, 0))
    return {}


def interrupt(strike: Strike) -> None:
    """Raise KeyboardInterrupt from a signal handler, up to three milliseconds later."""
    signal.setitimer(signal.ITIMER_REAL, 1e-5 + 3e-3 * strike.random.random())


# --------------------------------------------------------------------------------- threads, processes, runtimes


def fork(strike: Strike) -> None:
    """Fork; the child trains a step in a runtime of its own, and the parent goes on.

    Forked within a backward, PyTorch has no backward in the child: there it runs forward only. Nor has it an
    accelerator: there it runs forward on the CPU.
    """
    if strike.device.name != CPU:
        torch.accelerator.synchronize()  # so that no thread of the simulated one holds a lock
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(int(_CHILD_S / 2))
            torch.set_num_threads(1)  # OpenMP's others, of a thread of backward, do not exist here
            run = _step_of_child if strike.device.name == CPU else _forward_on_cpu
            status = 0 if run(strike) else 3
        finally:
            os._exit(status)
    strike.took = True

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


def _step_of_child(strike: Strike) -> bool:
    world = strike.world
    world.rest()
    runtime = world.runtime()
    if strike.phase != BACKWARD:
        return world.is_right(world.step(runtime))
    world.device.seed(world.seed)
    with torch.enable_grad(), runtime.step():
        loss = world.loss()
    return torch.equal(loss, world.wanted[0])


def _forward_on_cpu(strike: Strike) -> bool:
    net, x = torch.nn.Sequential(Block(), Block()), torch.randn(64, WIDTH)

    def loss() -> Tensor:
        torch.default_generator.manual_seed(0)
        return torch.as_tensor(net(x).square().mean())

    with torch.enable_grad(), delta.Runtime("64MiB", device="cpu", min_bytes=0).step():
        told = loss()
    return torch.equal(told, loss())


def other_thread(strike: Strike) -> None:
    """Another thread trains a model of its own, with the same ops, until the step is over."""
    stop = threading.Event()
    weights = strike.world.blocks[0].linear.weight.detach().clone().requires_grad_()
    x = strike.world.x.clone()

    told: list[Tensor] = []
    runs = threading.Event()

    def gradient() -> Tensor:
        loss = (x @ weights).tanh().square().mean()
        runs.set()
        return torch.autograd.grad(loss, weights)[0]

    def train() -> None:
        try:
            while not stop.is_set() or not told:
                told.append(gradient())
        except Exception as error:
            strike.wrong.append(f"the other thread: {type(error).__name__}: {error}")

    thread = threading.Thread(target=train)
    thread.start()
    strike.took = runs.wait(
        _RUNS_S
    )  # not for its gradient: this may be the thread of all backwards

    def end() -> None:
        stop.set()
        thread.join()
        wanted = gradient()
        if not told or not all(torch.equal(each, wanted) for each in told):
            strike.wrong.append("the other thread computed other bits")

    strike.after.append(end)


def other_budget(strike: Strike) -> None:
    """Close the runtime, and go on with one of another budget."""
    within = strike.phase != BETWEEN
    strike.runtime.close()
    strike.took = True
    share = strike.random.choice((0.6, 0.8, 1.5))
    strike.runtime = strike.world.runtime(share, **strike.device.ways[strike.way])
    if within:
        strike.runtime.__enter__()
        strike.after.append(lambda: strike.runtime.__exit__(None, None, None))


def closed(strike: Strike) -> None:
    """Close the runtime; what follows goes on without it."""
    strike.runtime.close()
    strike.took = True


def closed_by_backward(strike: Strike) -> None:
    """Ask for the runtime to be closed on the thread of backward, which may not."""
    strike.took = True
    strike.runtime.close()


_BY_WRITES = (Never(NOTHING_LEAVES, phases=(BACKWARD,)),)
_NOT_RANKED = (
    "what went in forward stays below until it is asked for: nothing has to be ranked any more"
)
_THREAD_OF_BACKWARD = "backward runs on a thread of its own there, which may close nothing"
_BY_CLOSING = (Never(_THREAD_OF_BACKWARD, devices=ACCELERATORS, phases=(BACKWARD,)),)

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        "no memory": Fault(
            no_memory, errors=(torch.OutOfMemoryError,), backward_blocks=LAST_BLOCKS
        ),
        "less memory": Fault(less_memory, backward_blocks=LAST_BLOCKS),
        "disk full": Fault(full_disk, ways=(DISK,), never=_BY_WRITES),
        "short write": Fault(short_write, ways=(DISK,), never=_BY_WRITES),
        "read error": Fault(
            read_error, ways=(DISK,), errors=(delta.SwapFailed,), backward_blocks=LAST_BLOCKS
        ),
        "lanes stopped": Fault(stopped_lanes, ways=(HOST, DISK), backward_blocks=LAST_BLOCKS),
        "lanes slow": Fault(
            slow_lanes,
            devices=(CPU,),
            phases=(FORWARD, BACKWARD),
            ways=(HOST,),
            backward_blocks=LAST_BLOCKS,
            prepare=lambda strike: {"link_bytes_per_s": _SLOW_BYTES_PER_S},
        ),
        "error in pack": Fault(
            failing_pack, phases=(FORWARD,), errors=(Struck,), must_raise=True, arms=True
        ),
        "error in unpack": Fault(
            failing_unpack, phases=(BACKWARD,), errors=(Struck,), must_raise=True, arms=True
        ),
        "error in policy": Fault(
            from_now_on,
            errors=(Struck,),
            prepare=failing_policy,
            never=(Never(_NOT_RANKED, ways=(HOST, DISK), phases=(BACKWARD,)),),
        ),
        "error in rebuild": Fault(
            failing_rebuild, phases=(BACKWARD,), ways=(DROPPED,), errors=(Struck,)
        ),
        "graph dropped": Fault(
            dropped_graph, phases=(FORWARD, BACKWARD), errors=(Struck,), must_raise=True
        ),
        "interrupt": Fault(
            interrupt, errors=(KeyboardInterrupt,), must_raise=True, prepare=handle_alarms
        ),
        "fork": Fault(fork),
        "other thread": Fault(other_thread),
        "other budget": Fault(other_budget, never=_BY_CLOSING),
        "closed": Fault(closed, never=_BY_CLOSING),
        "closed by backward": Fault(
            closed_by_backward,
            devices=ACCELERATORS,
            phases=(BACKWARD,),
            errors=(delta.UsageError,),
            must_raise=True,
        ),
        **OF_ACCELERATORS,
    }
)
"""Every fault, by name."""

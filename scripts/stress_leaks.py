"""Does a process that trains for long, and in which much goes wrong, end with what it began with?

A stress run, not a benchmark. 2,000 small steps under seeded random budgets and policies: exceptions in forward, in a
kernel, in backward and after it; forwards without backward, two backwards, gradients of gradients, early exits, graphs
kept over steps, backwards outside of the step, after closing and on other threads, budgets that cannot be met,
capacities that run out. Live bytes of the pool, tickets, pages, op records, runtimes, threads and file descriptors
have to end where they began. Takes about a minute on one idle core; needs no GPU. Exits 1 on a leak.

    python scripts/stress_leaks.py [--steps 2000] [--seed 0] [--check-every 100] [--only NAME ...]

tests/scripts/test_leaks.py runs the same for fewer steps.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import random
import sys
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

import psutil
import torch
from torch import nn

import delta_runtime as delta
from delta_runtime import _C, cpu_pool
from delta_runtime.core.events import Place
from delta_runtime.online.policies import Policy, get_policy

LAYERS = 4
WIDTH = 64
ROWS = 256
MOST_KNOWN_PAGES = 600
"""Pages that a session may know of while no graph lives: weights, buffers, and what it has not swept yet."""
POLICIES = ("recompute", "auto", "delta", "dtr", "lru", "next_use", "stress_drop_all")
POLICIES += ("stress_random", "off", "swap", "capuchin", "stress_swap_all", "stress_mix")
HOST_BUDGETS = ("64KiB", "4MiB", "1GiB")


class Planned(Exception):
    """Raised by the scenarios in unexpected places."""


class Net(nn.Module):
    """State of every kind: running statistics, dropout, an in-place op, a view, a small tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH),
                nn.BatchNorm1d(WIDTH),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
            )
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.nn.functional.gelu(block(x)).view(-1, WIDTH)
        return x.square().mean() + x.sum(1).tanh().mean()


@dataclass(frozen=True)
class Footprint:
    """What a process holds that must not grow."""

    live_bytes: int
    records: int
    runtimes: int
    threads: int
    tasks: int
    files: int

    def growth(self, before: Footprint) -> list[str]:
        """Return what is more, or less, than before, in words."""
        return [
            f"{field.name}: {getattr(before, field.name):,} at first, {getattr(self, field.name):,} at the end"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(before, field.name)
        ]


def _entries(folder: str) -> int:
    """Return number of entries of a folder of /proc; 0 where there is no /proc."""
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


def settle() -> None:
    """Lets go of what PyTorch and Python hold for no one.

    Of a backward that raised, the autograd engine keeps what it had not run until the thread's next backward.
    """
    torch.ones((), requires_grad=True).exp().backward()
    for _ in range(2):  # what one collection frees may make more unreachable
        gc.collect()


def footprint(live_bytes: Callable[[], int] = cpu_pool.allocated_bytes) -> Footprint:
    """Take the footprint of this process, after garbage collection.

    Args:
        live_bytes: asked for what lives on the device.
    """
    settle()
    return Footprint(
        live_bytes=live_bytes(),
        records=_C.live_records(),
        runtimes=sum(type(thing) is delta.Runtime for thing in gc.get_objects()),
        threads=threading.active_count(),
        tasks=_entries("/proc/self/task"),
        files=_entries("/proc/self/fd"),
    )


class World:
    """A model that is trained, the runtime of the moment, and graphs that are kept for a while."""

    def __init__(self, seed: int) -> None:
        cpu_pool.install()
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.kept: list[torch.Tensor] = []
        self.index = 0
        self.batch_bytes = 4 * ROWS * WIDTH
        self.runtime: delta.Runtime | None = None
        self.drops = self.rebuilds = self.swaps = 0
        gc.collect()
        self.base_bytes = cpu_pool.allocated_bytes()
        cpu_pool.reset_peak()
        self.ordinary_step()
        self.range_bytes = cpu_pool.peak_bytes() - self.base_bytes

    # ------------------------------------------------------------------ what scenarios use

    def x(self) -> torch.Tensor:
        """Return the next batch."""
        self.index += 1
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(self.index))

    @property
    def entered(self) -> delta.Runtime:
        assert self.runtime is not None
        return self.runtime

    def ordinary_step(self) -> None:
        self.model(self.x()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def budget_bytes(self) -> int:
        """Return a random one: from far too little to more than enough."""
        share = self.random.choice((0.05, 0.3, 0.5, 0.7, 0.9, 1.3))
        return cpu_pool.allocated_bytes() + int(share * self.range_bytes)

    # ------------------------------------------------------------------ runtimes

    def change_runtime(self) -> None:
        """Make another runtime, or gives the one there is another budget."""
        if self.runtime is not None and self.random.random() < 0.7:
            if self.random.random() < 0.5:
                self.runtime.budget_bytes = self.budget_bytes()
                self.runtime.session.set_budget(self.runtime.budget_bytes)
            return
        self.drop_runtime(close=self.random.random() < 0.8)
        policy = get_policy(self.random.choice(POLICIES))
        self.runtime = delta.Runtime(
            self.budget_bytes(),
            device="cpu",
            policy=dataclasses.replace(policy, seed=self.index),
            **self.tiers(policy),
            verify=self.random.choice(("first", "first", "always", "off")),
            min_bytes=self.random.choice((0, 4096)),
            strict=self.random.random() < 0.15,
        )

    def tiers(self, policy: Policy) -> dict[str, object]:
        """Host memory, disk, or both below the device, for a policy that swaps."""
        if Place.SWAPPED not in policy.evicts_to:
            return {}
        below: dict[str, object] = {}
        which = self.random.choice(("host", "host", "disk", "both"))
        if which != "disk":
            below["host_budget"] = self.random.choice(HOST_BUDGETS)
        if which != "host":
            below["disk_budget"] = self.random.choice(HOST_BUDGETS)
        if which != "disk" and policy.director:
            below["link_bytes_per_s"] = self.random.choice((None, 2e8, 5e9))
        return below

    def drop_runtime(self, *, close: bool = True) -> None:
        if self.runtime is None:
            return
        totals = self.runtime.report().totals
        self.drops += totals.drops + totals.swap_outs
        self.rebuilds += totals.rebuilds + totals.swap_ins
        self.swaps += totals.swap_ins
        if close:
            self.runtime.close()
        self.runtime = None

    def check(self) -> list[str]:
        """Return what the runtime of the moment still holds though no graph lives; [] if it holds nothing."""
        self.kept.clear()
        self.optimizer.zero_grad(set_to_none=True)
        with contextlib.suppress(delta.BudgetInfeasible), self.entered.step():
            plain(self)
        settle()
        levels = self.entered.session.levels()
        found = [
            f"{name}: {getattr(levels, name)}"
            for name in ("live_tickets", "managed_pages", "managed_resident_bytes")
            + ("dropped_now_bytes", "swapped_now_bytes")
            if getattr(levels, name)
        ]
        self.entered.session.take_in_transfers()  # takes in what the lanes have finished
        for tier in self.entered.session.tiers():
            if tier["used_bytes"]:
                found.append(f"{tier['used_bytes']:,} bytes of {tier['tier']}")
        if levels.pages > MOST_KNOWN_PAGES:
            found.append(f"known pages: {levels.pages}")
        over = cpu_pool.allocated_bytes() - self.base_bytes
        if over > 4 * self.batch_bytes:
            found.append(f"{over:,} live bytes more than at first")
        if _C.live_records():
            found.append(f"records: {_C.live_records()}")
        return found

    def end(self) -> None:
        """Lets go of all that scenarios left, the runtime included."""
        self.kept.clear()
        self.optimizer.zero_grad(set_to_none=True)
        self.drop_runtime()


# ---------------------------------------------------------------------------------------- scenarios
#
# Each is one step: it may raise Planned, or what its entry in SCENARIOS allows, and leaves nothing behind but
# what it puts into world.kept.


def plain(world: World) -> None:
    """Return an ordinary training step."""
    world.model(world.x()).backward()
    world.optimizer.step()
    world.optimizer.zero_grad(set_to_none=True)


def optimizer_outside(world: World) -> None:
    with world.entered.step():
        world.model(world.x()).backward()
    world.optimizer.step()
    world.optimizer.zero_grad(set_to_none=True)


def context(world: World) -> None:
    """Only entered: the runtime finds the steps itself."""
    with world.entered:
        for _ in range(2):
            plain(world)


def accumulate(world: World) -> None:
    for _ in range(2):
        world.model(world.x()).backward()
    world.optimizer.step()


def raise_in_forward(world: World) -> None:
    def fail(*_: object) -> None:
        raise Planned

    with _hooked(world.model.blocks[2].register_forward_pre_hook(fail)):
        world.model(world.x())


def raise_in_kernel(world: World) -> None:
    y = world.model(world.x())
    with contextlib.suppress(RuntimeError):
        torch.mm(y.expand(2, 2), torch.ones(3, 3))
    with contextlib.suppress(RuntimeError):
        world.model(torch.ones(ROWS, WIDTH + 1))
    y.backward()


def raise_in_backward(world: World) -> None:
    def fail(_: torch.Tensor) -> None:
        raise Planned

    with _hooked(world.model.blocks[1][0].weight.register_hook(fail)):
        world.model(world.x()).backward()


def raise_after_backward(world: World) -> None:
    world.model(world.x()).backward()
    raise Planned


def raise_with_a_graph(world: World) -> None:
    """Return the traceback holds the graph for as long as the exception lives."""
    loss = world.model(world.x())
    raise Planned(loss)


def forward_only(world: World) -> None:
    world.model(world.x())


def evaluate(world: World) -> None:
    with torch.no_grad():
        world.model(world.x())


def early_exit(world: World) -> None:
    """Leaves the step by `return`, before backward."""
    with world.entered.step():
        loss = world.model(world.x())
        if loss is not None:
            return


def twice(world: World) -> None:
    loss = world.model(world.x())
    loss.backward(retain_graph=True)
    loss.backward()


def retain(world: World) -> None:
    """Retained, and dropped without another backward."""
    world.model(world.x()).backward(retain_graph=True)


def second_order(world: World) -> None:
    x = world.x().requires_grad_()
    (gradient,) = torch.autograd.grad(world.model(x), x, create_graph=True)
    gradient.square().sum().backward()


def part_of_a_graph(world: World) -> None:
    """Backward through a part; the rest of the graph is dropped unused."""
    h = world.model.blocks[0](world.x())
    loss = world.model(h)
    torch.autograd.grad(loss, h, retain_graph=world.random.random() < 0.5)


def keep_graph(world: World) -> None:
    world.kept.append(world.model(world.x()))
    del world.kept[: max(0, len(world.kept) - 3)]


def backward_of_kept(world: World) -> None:
    """Step later; the weights may have changed, which is an error as without the runtime."""
    if not world.kept:
        world.kept.append(world.model(world.x()))
    world.kept.pop(0).backward()


def drop_kept(world: World) -> None:
    world.kept.clear()
    world.model(world.x()).backward()


def backward_outside(world: World) -> None:
    with world.entered.step():
        loss = world.model(world.x())
    loss.backward()


def close_then_backward(world: World) -> None:
    with world.entered.step():
        loss = world.model(world.x())
    world.drop_runtime()
    loss.backward()


def close_inside(world: World) -> None:
    with world.entered.step():
        loss = world.model(world.x())
        world.drop_runtime()
        loss.backward()


def backward_on_a_thread(world: World) -> None:
    loss = world.model(world.x())
    errors: list[BaseException] = []

    def work() -> None:
        try:
            loss.backward()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


def graph_dies_on_a_thread(world: World) -> None:
    """Tickets are released on a thread that never entered anything."""
    box = [world.model(world.x())]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()


def disable_inside(world: World) -> None:
    loss = world.model(world.x())
    with delta.disable():
        world.model(world.x()).backward()
    loss.backward()


def capacity_runs_out(world: World) -> None:
    room = world.random.randrange(world.range_bytes)
    with cpu_pool.capacity(cpu_pool.allocated_bytes() + room):
        world.model(world.x()).backward()


def not_feasible(world: World) -> None:
    """Return a strict runtime with a budget that cannot be met."""
    world.drop_runtime()
    budget_bytes = cpu_pool.allocated_bytes() + world.range_bytes // 20
    world.runtime = delta.Runtime(budget_bytes, device="cpu", strict=True)
    try:
        with world.runtime.step():
            plain(world)
    finally:
        world.drop_runtime()


def reference_cycle(world: World) -> None:
    """Return a graph that only the garbage collector frees."""
    loss = world.model(world.x())
    loss.itself = [loss]  # type: ignore[attr-defined]


def autocast(world: World) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = world.model(world.x())
    loss.backward()


@contextlib.contextmanager
def _hooked(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


OUT_OF_MEMORY = (torch.OutOfMemoryError, delta.BudgetInfeasible)
WRITTEN = (delta.InplaceModification, RuntimeError)
"""Weights changed between forward and backward: PyTorch's own error where the tensor was not dropped."""

INSIDE: dict[Callable[[World], None], tuple[type[BaseException], ...]] = {
    plain: (),
    accumulate: (),
    raise_in_forward: (Planned,),
    raise_in_kernel: (),
    raise_in_backward: (Planned,),
    raise_after_backward: (Planned,),
    raise_with_a_graph: (Planned,),
    forward_only: (),
    evaluate: (),
    twice: (),
    retain: (),
    second_order: (),
    part_of_a_graph: (),
    keep_graph: (),
    backward_of_kept: WRITTEN,
    drop_kept: (),
    backward_on_a_thread: (),
    graph_dies_on_a_thread: (),
    disable_inside: (),
    capacity_runs_out: OUT_OF_MEMORY,
    reference_cycle: (),
    autocast: (),
}
"""Scenarios that run inside of one `runtime.step()`, and the exceptions that each may end with."""

OUTSIDE: dict[Callable[[World], None], tuple[type[BaseException], ...]] = {
    optimizer_outside: (),
    context: (),
    early_exit: (),
    backward_outside: (),
    close_then_backward: (),
    close_inside: (),
    not_feasible: OUT_OF_MEMORY,
}
"""Scenarios that enter the runtime themselves."""

SCENARIOS = INSIDE | OUTSIDE
NAMES = {scenario.__name__: scenario for scenario in SCENARIOS}


def run_step(world: World, scenario: Callable[[World], None]) -> bool:
    """Run one scenario; returns whether it ended in an exception, which it may end with.

    Raises:
        BaseException: what the scenario may not end with.
    """
    if world.runtime is None:
        world.change_runtime()
    allowed = SCENARIOS[scenario]
    if world.entered.config.strict:
        allowed += OUT_OF_MEMORY
    raised = False
    try:
        if scenario in INSIDE:
            with world.entered.step():
                scenario(world)
        else:
            scenario(world)
    except allowed:
        raised = True
    world.optimizer.zero_grad(set_to_none=True)
    return raised


# ------------------------------------------------------------------------------------------ the whole


@dataclass
class Outcome:
    """What a run of many steps found.

    Args:
        faults: leaks, in words; empty if there is none.
        ran: how often each scenario ran.
        raised: how many steps ended in an exception.
        drops, rebuilds: storages evicted and brought back: a run that evicts nothing proves nothing.
        swaps: how many of these came back from host memory.
        resident_growth_bytes: of the process, for information: the C library keeps what is freed.
    """

    faults: list[str]
    ran: Counter[str]
    raised: int
    drops: int
    rebuilds: int
    swaps: int
    resident_growth_bytes: int


def churn(
    steps: int,
    seed: int,
    *,
    check_every: int = 50,
    scenarios: Sequence[Callable[[World], None]] = tuple(SCENARIOS),
    tell: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run `steps` random scenarios and compares what the process holds before and after.

    Args:
        steps: after a warm-up of every scenario twice, in which threads and caches come to be.
        seed: of the choice of scenarios, budgets and policies.
        check_every: steps between looks at what the runtime of the moment holds.
        scenarios: what to choose from.
        tell: called with a line of progress.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    world = World(seed)
    ran: Counter[str] = Counter()
    raised = 0
    faults: list[str] = []
    alive: weakref.WeakSet[delta.Runtime] = weakref.WeakSet()

    def step(scenario: Callable[[World], None]) -> None:
        nonlocal raised
        world.change_runtime()
        alive.add(world.entered)
        raised += run_step(world, scenario)
        ran[scenario.__name__] += 1

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "delta_runtime: the budget", RuntimeWarning)
        warnings.filterwarnings("ignore", "Using backward.. with create_graph", UserWarning)
        try:
            for scenario in [*scenarios, *scenarios]:
                step(scenario)
            world.end()
            before = footprint()
            resident_bytes = psutil.Process().memory_info().rss
            world.base_bytes = before.live_bytes
            for number in range(1, steps + 1):
                step(world.random.choice(scenarios))
                if number % check_every == 0 or number == steps:
                    world.change_runtime()
                    found = world.check()
                    faults += [f"after {number} steps: {text}" for text in found]
                    tell(
                        f"{number}/{steps} steps, {raised} ended in an exception, "
                        f"{len(alive)} runtimes alive; {'; '.join(found) or 'nothing is held'}"
                    )
            world.end()
            after = footprint()
            faults += after.growth(before)
            growth_bytes = psutil.Process().memory_info().rss - resident_bytes
        finally:
            world.end()
            torch.set_num_threads(threads)
    return Outcome(faults, ran, raised, world.drops, world.rebuilds, world.swaps, growth_bytes)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check-every", type=int, default=100)
    parser.add_argument("--only", nargs="+", choices=list(NAMES), default=list(NAMES))
    arguments = parser.parse_args(argv)
    begin = time.perf_counter()
    print(f"seed {arguments.seed}", flush=True)
    outcome = churn(
        arguments.steps,
        arguments.seed,
        check_every=arguments.check_every,
        scenarios=[NAMES[name] for name in arguments.only],
        tell=lambda text: print(f"  {text}", flush=True),
    )
    for name, count in sorted(outcome.ran.items()):
        print(f"  {name:24}{count:6}")
    print(
        f"{arguments.steps} steps in {time.perf_counter() - begin:.0f} s, {outcome.raised} ended in an exception; "
        f"{outcome.drops:,} storages evicted, {outcome.rebuilds:,} brought back, "
        f"{outcome.swaps:,} of these swapped in; "
        f"resident memory {outcome.resident_growth_bytes / 1e6:+.1f} MB"
    )
    for fault in outcome.faults:
        print(f"LEAK {fault}")
    if not outcome.faults:
        print("no leak")
    return 1 if outcome.faults or not outcome.rebuilds else 0


if __name__ == "__main__":
    sys.exit(main())

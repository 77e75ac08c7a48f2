"""What does the runtime cost where it has nothing to do?

A benchmark in five parts, each in one process with its contenders in turns:
  (a) models: step time of M1 and M2 under a budget that never binds, over the ordinary steps around it: of idle steps,
      at most 1.005, and of observed ones, at most 1.02;
  (b) ops: microseconds per atomic op of 24 tiny blocks, where launching is all that costs, of an ordinary step, of one
      under an empty RecordFunction callback that asks for inputs and outputs (the floor), under our observer without
      hooks, with the hooks, and as a whole `runtime.step()`; the observer costs at most 1.4 times the floor;
  (c) saved tensors: microseconds per saved tensor, pack and unpack, of a managed tensor; at most 2.5;
  (d) tiny: as (a), of a net of 726 tiny ops, where launching is all that a step takes: of idle steps, at most 1.03;
  (e) plan: what a step of that net takes, over the ordinary steps around it, while it follows a plan (what it runs
      again left out); in a runtime that no op is announced to, whose hooks therefore decline each tensor; and what
      PyTorch's own ways to see ops and saved tensors take there: an empty RecordFunction callback that asks for inputs
      and outputs, saved-tensor hooks that do nothing, and both.
Takes about 5 minutes on two idle cores; needs no GPU. Exits 1 if a limit is missed.

    python -m benchmarks.overhead [--parts ops,plan] [--models resnet50,gpt] [--rounds 15] [--json FILE]

Differences are taken within each round; what is reported are medians with their quartiles. All parts but (a) run four
times as many rounds, on one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import delta_runtime as delta
from benchmarks.common import (
    BENCH_WORKLOADS,
    SEED,
    Spread,
    console,
    machine,
    train_step,
    write_json,
)
from delta_runtime import _C, cpu_pool
from delta_runtime.idle_steps import QUIET_STEPS, IdleSteps
from delta_runtime.known_step import CALIBRATION_STEPS
from scripts.train_plain import THREADS

IDLE_LIMIT = 1.005
TINY_LIMIT = 1.03
MODEL_LIMIT = 1.02
FLOOR_LIMIT = 1.4
SAVED_LIMIT_US = 2.5
NEVER_BINDS = "100%"
PARTS = ("models", "ops", "saved", "tiny", "plan")
SMALL_ROUNDS = 4
"""Rounds of the other parts for one of part (a): they are short, and noisier."""
SETTLED = CALIBRATION_STEPS + QUIET_STEPS + 1
"""Steps before the first idle one."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result.

    Args:
        part: of which part it is.
        name: what was measured, on what.
        unit: of `spread`; "" for a ratio.
        limit: the most that its median may be; None where nothing is demanded.
    """

    part: str
    name: str
    unit: str
    spread: Spread
    limit: float | None = None

    @property
    def holds(self) -> bool:
        return self.limit is None or self.spread.median <= self.limit


def in_turns(
    contenders: dict[str, Callable[[], float]], rounds: int, warm_up: int = 2
) -> dict[str, list[float]]:
    """Call all contenders once per round, in changing order; return what each returned, by round."""
    names = list(contenders)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warm_up, rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            gc.collect()
            number = contenders[name]()
            if turn >= 0:
                taken[name].append(number)
    return taken


def quotient(a: Sequence[float], b: Sequence[float]) -> Spread:
    """Median of `a` over median of `b`; quartiles by resampling the rounds.

    Unlike the median of quotients it does not run wild where single rounds of `b` come out near zero.
    """
    tops, bottoms = np.asarray(a), np.asarray(b)
    chosen = np.random.default_rng(SEED).integers(0, len(a), (1000, len(a)))
    quotients = np.median(tops[chosen], axis=1) / np.median(bottoms[chosen], axis=1)
    q1, q3 = np.percentile(quotients, (25, 75))
    return Spread(float(np.median(tops) / np.median(bottoms)), float(q1), float(q3), len(a))


def less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Differences, round by round."""
    return [x - y for x, y in zip(a, b)]


# ----------------------------------------------------------------------------------------- (a) models


def bench_model(name: str, rounds: int) -> list[Figure]:
    """Step time under a budget that never binds, over the ordinary steps before and after it."""
    workload = BENCH_WORKLOADS[name]
    state = workload.build(SEED)
    index = 0

    def step(runtime: delta.Runtime | None) -> float:
        nonlocal index
        index += 1
        batch = state.batch(index)
        gc.collect()
        begin = time.perf_counter()
        train_step(state, batch, runtime)
        return time.perf_counter() - begin

    idle, observed = over_ordinary(step, rounds)
    return [
        Figure("models", f"{workload.title}: idle step over ordinary", "", idle, IDLE_LIMIT),
        Figure("models", f"{workload.title}: observed step", "", observed, MODEL_LIMIT),
    ]


def over_ordinary(
    step: Callable[[delta.Runtime | None], float], rounds: int, **options: Any
) -> tuple[Spread, Spread]:
    """Return what idle steps take over the ordinary ones around them, and what observed ones do.

    Args:
        step: runs one, without a runtime or in one; returns its seconds.
        rounds: of both kinds, in turns.
        options: of the runtimes.
    """
    ratios: dict[delta.Runtime, list[float]] = {}
    step(None)
    for idle in (True, False):
        runtime = delta.Runtime(NEVER_BINDS, device="cpu", **options)
        if not idle:
            runtime.steps.idle = IdleSteps(0)  # which no step fits
        for _ in range(SETTLED):
            step(runtime)
            runtime.wait_for_plan()
        ratios[runtime] = []
    before = step(None)
    for _ in range(rounds):
        for runtime, mine in ratios.items():
            managed_s = step(runtime)
            after = step(None)
            mine.append(2 * managed_s / (before + after))
            before = after
    idle_steps = [runtime.report().totals.idle_steps for runtime in ratios]
    if any(runtime.report().totals.drops for runtime in ratios) or idle_steps[0] < rounds / 2:
        raise RuntimeError("the budget was meant never to bind, but something was done")
    for runtime in ratios:
        runtime.close()
    return tuple(Spread.of(each) for each in ratios.values())


# ------------------------------------------------------------------------------------------- (d) tiny


def tiny_step() -> Callable[[delta.Runtime | None], float]:
    """Return what runs a step of a net of tiny ops, without a runtime or in one, and returns its seconds."""
    torch.manual_seed(SEED)
    layers = [each for _ in range(60) for each in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers)
    parameters = list(model.parameters())
    x = torch.randn(32, 64)

    def step(runtime: delta.Runtime | None) -> float:
        for parameter in parameters:
            parameter.grad = None
        begin = time.perf_counter()
        with runtime.step() if runtime else contextlib.nullcontext():
            model(x).sum().backward()
        return time.perf_counter() - begin

    return step


def bench_tiny(rounds: int) -> list[Figure]:
    """Return the same as of the models, of a net of tiny ops."""
    idle, observed = over_ordinary(tiny_step(), rounds, min_bytes=0)
    return [
        Figure("tiny", "726 tiny ops: idle step over ordinary", "", idle, TINY_LIMIT),
        Figure("tiny", "726 tiny ops: observed step", "", observed),
    ]


# ------------------------------------------------------------------------------------------- (e) plan

TIGHT = 0.87  # of the peak: a little above the least budget that the net can be trained in


@contextlib.contextmanager
def bare_observer() -> Iterator[None]:
    """Have PyTorch box each op's inputs and outputs for a callback that does nothing."""
    _C.enter_bare_observer()
    try:
        yield
    finally:
        _C.leave_bare_observer()


def bare_hooks() -> contextlib.AbstractContextManager[None]:
    """Have PyTorch call hooks for each saved tensor that give back another tensor of the same memory."""
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)


@contextlib.contextmanager
def both_bare() -> Iterator[None]:
    """Have PyTorch do both."""
    with bare_observer(), bare_hooks():
        yield


@contextlib.contextmanager
def ops_unseen() -> Iterator[None]:
    """Have PyTorch announce no op. The hooks of a runtime then decline all that is saved: nobody knows who made it."""
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def bench_plan(rounds: int) -> list[Figure]:
    """Return what a step of tiny ops takes that follows a plan, and what seeing it takes at the least."""
    step = tiny_step()
    with contextlib.closing(delta.Runtime(NEVER_BINDS, device="cpu", min_bytes=0)) as roomy:
        step(roomy)
        needed_bytes = roomy.report().totals.peak_bytes
    budget_bytes = int(TIGHT * needed_bytes)
    runtime = delta.Runtime(budget_bytes, policy="recompute", device="cpu", min_bytes=0)
    unseen = delta.Runtime(NEVER_BINDS, device="cpu", min_bytes=0)
    unseen.steps.idle = IdleSteps(0)  # which no step fits: the hooks stay
    with contextlib.closing(runtime), contextlib.closing(unseen):
        return _plan_figures(step, runtime, unseen, rounds)


def _plan_figures(
    step: Callable[[delta.Runtime | None], float],
    runtime: delta.Runtime,
    unseen: delta.Runtime,
    rounds: int,
) -> list[Figure]:
    """Return the figures of a runtime that follows a plan, of one that is told of no op, and of PyTorch alone."""

    def follows() -> float:
        seconds = step(runtime)
        last = runtime.report().last
        assert last is not None
        return seconds - last.rebuild_s

    def declines() -> float:
        with ops_unseen():
            return step(unseen)

    def within(context: Callable[[], contextlib.AbstractContextManager[None]]) -> float:
        with context():
            return step(None)

    for _ in range(SETTLED):
        step(runtime)
        runtime.wait_for_plan()
        declines()
    kinds: dict[str, Callable[[], float]] = {
        "following a plan, beside what runs again": follows,
        "a runtime that sees no op, and declines": declines,
        "an empty RecordFunction callback": lambda: within(bare_observer),
        "saved-tensor hooks that do nothing": lambda: within(bare_hooks),
        "both": lambda: within(both_bare),
    }
    ratios: dict[str, list[float]] = {name: [] for name in kinds}
    before = step(None)
    for _ in range(rounds):
        for name, kind in kinds.items():
            seconds = kind()
            after = step(None)
            ratios[name].append(2 * seconds / (before + after))
            before = after
    followed = runtime.report().last
    if followed is None or not followed.plan_hits or not followed.drops:
        raise RuntimeError("the step was meant to follow a plan that drops")
    declined = unseen.report().last
    if declined is None or not declined.packs or declined.managed_unpacks or declined.idle_steps:
        raise RuntimeError("hooks were meant to be called, and to decline")
    return [
        Figure("plan", f"726 tiny ops over ordinary: {name}", "", Spread.of(each))
        for name, each in ratios.items()
    ]


# -------------------------------------------------------------------------------------------- (b) ops

BLOCKS = 24
WIDTH = 16
ROWS = 8
STEPS_PER_SAMPLE = 10


class TinyBlock(nn.Module):
    """A residual block so small that launching its ops is all that it costs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def bench_ops(rounds: int) -> list[Figure]:
    """Microseconds per atomic op in five ways."""
    torch.manual_seed(SEED)
    model = nn.Sequential(*(TinyBlock() for _ in range(BLOCKS)))
    x = torch.randn(ROWS, WIDTH)

    def steps() -> None:
        for _ in range(STEPS_PER_SAMPLE):
            for parameter in model.parameters():
                parameter.grad = None
            model(x).sum().backward()

    session = _C.Session(device="cpu", budget_bytes=1 << 50, min_bytes=0)
    hooks = (session.pack_hook(), session.unpack_hook())
    # min_bytes=0: everything that this tiny model saves is managed, as a large model's is.
    runtime = delta.Runtime(NEVER_BINDS, device="cpu", min_bytes=0)
    runtime.steps.idle = IdleSteps(0)  # which no step fits: all are observed

    @contextlib.contextmanager
    def observer(hooked: bool) -> Any:
        session.begin_step()
        session.enter()
        if hooked:
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        try:
            yield
        finally:
            if hooked:
                torch._C._autograd._pop_saved_tensors_default_hooks()
            session.leave()
            session.drain_events()

    with observer(hooked=False):  # learn how many ops there are
        first = session.counters().ops
        steps()
        n_ops = (session.counters().ops - first) / STEPS_PER_SAMPLE
    with runtime:  # and calibrate
        for _ in range(CALIBRATION_STEPS + 1):
            with runtime.step():
                model(x).sum().backward()

    def timed(context: Callable[[], Any]) -> Callable[[], float]:
        def run() -> float:
            with context():
                begin = time.perf_counter()
                steps()
                return (time.perf_counter() - begin) / STEPS_PER_SAMPLE / n_ops * 1e6

        return run

    def whole() -> float:
        begin = time.perf_counter()
        for _ in range(STEPS_PER_SAMPLE):
            for parameter in model.parameters():
                parameter.grad = None
            with runtime.step():
                model(x).sum().backward()
        return (time.perf_counter() - begin) / STEPS_PER_SAMPLE / n_ops * 1e6

    taken = in_turns(
        {
            "ordinary": timed(contextlib.nullcontext),
            "bare RecordFunction": timed(bare_observer),
            "our observer": timed(lambda: observer(hooked=False)),
            "our observer and hooks": timed(lambda: observer(hooked=True)),
            "runtime.step()": whole,
        },
        rounds,
    )
    runtime.close()
    plain = taken["ordinary"]
    floors = less(taken["bare RecordFunction"], plain)
    ours = less(taken["our observer"], plain)
    figures = [Figure("ops", "atomic ops per step", "", Spread.of([n_ops]))]
    figures += [Figure("ops", name, "us per op", Spread.of(us)) for name, us in taken.items()]
    figures += [
        Figure("ops", f"{name}, above ordinary", "us per op", Spread.of(less(taken[name], plain)))
        for name in list(taken)[1:]
    ]
    figures.append(Figure("ops", "our observer / bare", "", quotient(ours, floors), FLOOR_LIMIT))
    return figures


# ---------------------------------------------------------------------------------- (c) saved tensors

SAVES = 1000
ELEMENTS = 1024  # 4 KiB: the least that is managed by default


def bench_saved(rounds: int) -> list[Figure]:
    """Microseconds to pack and unpack a managed tensor: within autograd, and the two functions alone."""
    session = _C.Session(device="cpu", budget_bytes=1 << 50)
    pack, unpack = session.pack_hook(), session.unpack_hook()
    x = torch.rand(ELEMENTS, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(SAVES):
            y = torch.relu(y)  # saves its result
        y.sum().backward()
        x.grad = None

    def autograd(hooked: bool) -> Callable[[], float]:
        def run() -> float:
            session.begin_step()
            session.enter()
            if hooked:
                torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
            try:
                begin = time.perf_counter()
                chain()
                return (time.perf_counter() - begin) / SAVES * 1e6
            finally:
                if hooked:
                    torch._C._autograd._pop_saved_tensors_default_hooks()
                session.leave()
                session.drain_events()

        return run

    def direct(do_pack: Callable[[Any], Any], do_unpack: Callable[[Any], Any]) -> float:
        session.begin_step()
        session.enter()
        try:
            with torch.no_grad():
                tensors = [torch.relu(x) for _ in range(SAVES)]
            begin = time.perf_counter()
            tickets = [do_pack(tensor) for tensor in tensors]
            for ticket in tickets:
                do_unpack(ticket)
            del tickets
            return (time.perf_counter() - begin) / SAVES * 1e6
        finally:
            session.leave()
            session.drain_events()

    before = session.counters().packed_bytes
    autograd(hooked=True)()
    managed = (session.counters().packed_bytes - before) // (4 * ELEMENTS)
    if managed < SAVES - 1:  # the first is small change: x itself may be kept
        raise RuntimeError(f"{managed} of {SAVES} saved tensors were managed: not what is asked")
    taken = in_turns(
        {
            "hooks off": autograd(hooked=False),
            "hooks on": autograd(hooked=True),
            "nothing": lambda: direct(lambda t: t, lambda t: t),
            "pack and unpack": lambda: direct(pack, unpack),
        },
        rounds,
    )
    return [
        Figure("saved", "op observed, hooks off", "us per op", Spread.of(taken["hooks off"])),
        Figure("saved", "op observed, hooks on", "us per op", Spread.of(taken["hooks on"])),
        Figure(
            "saved",
            "pack + unpack within autograd (on - off)",
            "us per tensor",
            Spread.of(less(taken["hooks on"], taken["hooks off"])),
            SAVED_LIMIT_US,
        ),
        Figure(
            "saved",
            "pack + unpack + release called from Python",
            "us per tensor",
            Spread.of(less(taken["pack and unpack"], taken["nothing"])),
        ),
    ]


# --------------------------------------------------------------------------------------- what is shown


@dataclass(slots=True)
class Results:
    """All figures, in order."""

    figures: list[Figure] = field(default_factory=list)

    def show(self) -> None:
        """Print the table."""
        table = Table(title="The cost of a runtime that has nothing to do", title_justify="left")
        table.add_column("")
        table.add_column("median [quartiles]", justify="right")
        table.add_column("")
        table.add_column("limit", justify="right")
        part = ""
        for figure in self.figures:
            if figure.part != part and part:
                table.add_section()
            part = figure.part
            limit = "" if figure.limit is None else f"{figure.limit} "
            mark = "" if figure.limit is None else ("ok" if figure.holds else "MISSED")
            digits = 0 if figure.spread.median >= 100 else 3
            table.add_row(figure.name, figure.spread.text(digits), figure.unit, limit + mark)
        Console(highlight=False, width=max(console.width, 120)).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--models", type=lambda text: text.split(","), default=["resnet50", "gpt"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=THREADS, help="of part (a); others have one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"--parts: {part!r} is none of {', '.join(PARTS)}")
    for name in arguments.models:
        if name not in BENCH_WORKLOADS:
            parser.error(f"--models: {name!r} is none of {', '.join(BENCH_WORKLOADS)}")
    if arguments.rounds < 1:
        parser.error("--rounds: at least 1")
    torch.set_num_threads(arguments.threads)
    cpu_pool.install()
    about = machine()

    results = Results()
    if "models" in arguments.parts:
        for name in arguments.models:
            results.figures += bench_model(name, arguments.rounds)
    torch.set_num_threads(1)  # tiny kernels: more threads are only noise
    if "ops" in arguments.parts:
        console.print(f"  ops: {SMALL_ROUNDS * arguments.rounds} rounds")
        results.figures += bench_ops(SMALL_ROUNDS * arguments.rounds)
    if "saved" in arguments.parts:
        console.print(f"  saved tensors: {SMALL_ROUNDS * arguments.rounds} rounds")
        results.figures += bench_saved(SMALL_ROUNDS * arguments.rounds)
    if "tiny" in arguments.parts:
        console.print(f"  tiny ops: {SMALL_ROUNDS * arguments.rounds} rounds")
        results.figures += bench_tiny(SMALL_ROUNDS * arguments.rounds)
    if "plan" in arguments.parts:
        console.print(f"  following a plan: {SMALL_ROUNDS * arguments.rounds} rounds")
        results.figures += bench_plan(SMALL_ROUNDS * arguments.rounds)
    results.show()
    write_json(
        arguments.json,
        {
            "machine": about,
            "rounds": arguments.rounds,
            "figures": [asdict(figure) for figure in results.figures],
        },
    )
    return 0 if all(figure.holds for figure in results.figures) else 1


if __name__ == "__main__":
    sys.exit(main())

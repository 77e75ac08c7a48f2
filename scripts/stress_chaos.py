"""Whatever goes wrong in a step: is it right to the bit, or is there a clear error, and does the next step work?

A stress run, not a benchmark. Each fault of chaos_faults.py strikes a small net in training: at a block of forward, at
one of backward, or between two steps; while saved tensors are dropped, go to host memory, or to disk; in the first step
that a runtime sees, the second, or one that follows a plan. Where is by the seed. The step that was struck must give
the bits of an ordinary one, or raise what the fault raises; then the next step must be right, and nothing may be left:
hooks, soft limits, live bytes, records, threads, file descriptors. A step that hangs for two minutes ends the run with
all stacks. Takes about 15 s a seed on one core; needs no GPU. Exits 1 on a wrong result, a leak, or a cell in which
no strike was delivered. Delivered means that it was seen to be: an allocation that was refused, a write that failed.

    python scripts/stress_chaos.py [--device cpu] [--seeds 5] [--first-seed 0] [--only NAME ...] [--out FILE]

`--device` is `cpu`, `cuda`, or `fake`: the simulated accelerator of the tests. These two have faults of their own
(chaos_accelerator.py). `--out` appends each strike to FILE, a line of JSON each; strikes that
it has already are not run again. tests/scripts/test_chaos.py runs one seed, tests/accelerator/test_chaos.py another.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from scripts.chaos_faults import FAULTS, open_files
from scripts.chaos_strike import Fault, Strike
from scripts.chaos_world import BETWEEN, DEVICES, PHASES, Device, World, device_of
from scripts.stress_interrupts import clear_away, leftovers
from scripts.stress_leaks import Footprint, footprint

BEFORE = (0, 1, 5)
"""Steps that a runtime has seen when it is struck: none, a recorded one, those that a plan is followed behind."""
_LATE_S = 0.05  # an interrupt may arrive when the step is over
_HANGS_S = 120
_ENDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one strike.

    Args:
        device, fault, way, phase, seed: which it was.
        took: whether it was delivered: seen to be.
        right: whether the step that was struck gave the ordinary bits; else an error came up.
        error: its type; empty if there was none.
        rescues: how often room was made where memory had run out.
        wrong: what must not be: other bits, an error that is not the fault's, a next step that fails, leftovers.
    """

    device: str
    fault: str
    way: str
    phase: str
    seed: int
    took: bool
    right: bool
    error: str
    rescues: int
    wrong: tuple[str, ...]

    @property
    def which(self) -> tuple[str, str, str, int]:
        """Tells it from all other strikes on its device."""
        return self.fault, self.way, self.phase, self.seed


Cell = tuple[str, str, str]
"""A fault, a way and a phase."""


def cells(device: Device, only: Sequence[str] = ()) -> Iterator[Cell]:
    """Yield each fault with each way and phase that it makes sense in on that device."""
    for name, fault in FAULTS.items():
        for way in device.ways:
            for phase in PHASES:
                if (not only or name in only) and fault.makes_sense(device.name, way, phase):
                    yield name, way, phase


def one_strike(world: World, name: str, way: str, phase: str, seed: int) -> Outcome:
    """Strike once, and look at what comes of it."""
    fault = FAULTS[name]
    by_chance = random.Random(f"{name} {way} {phase} {seed}")
    before = taken(world)
    told_to, sys.unraisablehook = sys.unraisablehook, _forget
    faulthandler.dump_traceback_later(_HANGS_S, exit=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # disks that fail are warned of
            strike, right, error = _struck(world, fault, way, phase, by_chance)
            wrong = [*strike.wrong, *_judge(fault, strike, error)]
            told = type(error).__name__ if error is not None else ""
            del error
            wrong += _next_step(world, strike)
            took, rescues = strike.took, _rescues(strike)
            del strike
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.unraisablehook = told_to
    wrong += [f"left: {each}" for each in leftovers()]
    if wrong:
        clear_away()
    wrong += grown(world, before)
    return Outcome(
        world.device.name, name, way, phase, seed, took, right, told, rescues, tuple(wrong)
    )


def _rescues(strike: Strike) -> int:
    return int(strike.runtime.session.counters().rescues)


def _forget(_: object) -> None:
    """Say nothing of an error that a policy raised and the runtime told: whoever keeps it keeps all of its frames."""


def _struck(
    world: World, fault: Fault, way: str, phase: str, by_chance: random.Random
) -> tuple[Strike, bool, BaseException | None]:
    blocks = fault.blocks(world.device.name, way, phase)
    strike = Strike(world, way, phase, by_chance.choice(blocks), by_chance)
    settings = dict(world.device.ways[way]) | dict(fault.prepare(strike) if fault.prepare else {})
    files = open_files()
    strike.runtime = world.runtime(**settings)
    strike.files = open_files() - files
    for _ in range(by_chance.choice(BEFORE)):
        if not world.is_right(world.step(strike.runtime)):
            strike.wrong.append("other bits before it was struck")
        strike.runtime.wait_for_plan()

    def moment(at: str, block: int) -> None:
        if at == phase and block == strike.block:
            world.moment = lambda phase, block: None
            fault.strike(strike)

    right, error = False, None
    try:
        if fault.arms or phase == BETWEEN:
            fault.strike(strike)
        else:
            world.moment = moment
        right = world.is_right(world.step(strike.runtime if _is_open(strike) else None))
        if not right:  # whatever comes late
            strike.wrong.append("other bits")
        if fault.must_raise and not strike.took:
            time.sleep(_LATE_S)
    except BaseException as raised:
        error = raised
        traceback.clear_frames(raised.__traceback__)
        raised.__traceback__ = None
    finally:
        strike.end()
        world.rest()
    return strike, right, error


def _is_open(strike: Strike) -> bool:
    return not strike.runtime._closed


def _judge(fault: Fault, strike: Strike, error: BaseException | None) -> list[str]:
    if error is None:
        return ["its error was lost"] * (fault.must_raise and strike.took)
    if isinstance(error, fault.errors) and strike.took:
        return []
    return [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]


def _next_step(world: World, strike: Strike) -> list[str]:
    """Train on: with the same runtime where it is open, and with a new one."""
    wrong = []
    try:
        if _is_open(strike):
            if not world.is_right(world.step(strike.runtime)):
                wrong.append("other bits in the next step")
            strike.runtime.close()
        runtime = world.runtime(**world.device.ways[strike.way])
        if not world.is_right(world.step(runtime)):
            wrong.append("other bits in a new runtime")
        runtime.close()
    except Exception as error:
        wrong.append(f"the next step: {type(error).__name__}: {error}")
        traceback.clear_frames(error.__traceback__)
    world.rest()
    return wrong


def taken(world: World) -> Footprint:
    """Return what the process holds, the device's memory in the place of the pool's."""
    world.device.settle()
    return footprint(world.device.allocated_bytes)


def grown(world: World, before: Footprint) -> list[str]:
    """Return what the process holds more of than before, given a second for threads to end."""
    ends_s = time.monotonic() + _ENDS_S
    while True:
        now = taken(world)
        fields = [each.name for each in dataclasses.fields(Footprint)]
        more = [name for name in fields if getattr(now, name) > getattr(before, name)]
        if not more or time.monotonic() > ends_s:
            return [
                f"{name}: {getattr(before, name):,} before, {getattr(now, name):,} after"
                for name in more
            ]
        time.sleep(_ENDS_S / 20)


def show(world: World, outcomes: Sequence[Outcome], console: Console) -> None:
    """Print the table: strikes that were delivered of all, how many of them right and with an error."""
    device = world.device
    table = Table(
        title="strikes that were delivered: right to the bit + with the fault's error, of all strikes"
    )
    table.add_column("fault")
    for way in device.ways:
        for phase in PHASES:
            table.add_column(f"{way}, {phase}", justify="right")
    struck = {each.fault for each in outcomes}
    for name, fault in FAULTS.items():
        if name not in struck:
            continue
        row = [name]
        for way in device.ways:
            for phase in PHASES:
                if not fault.makes_sense(device.name, way, phase):
                    row.append("")
                    continue
                mine = [o for o in outcomes if (o.fault, o.way, o.phase) == (name, way, phase)]
                took = [o for o in mine if o.took]
                bad = sum(bool(o.wrong) for o in mine)
                right = sum(o.right for o in took)
                text = f"{right}+{len(took) - right}/{len(mine)}" + (f" WRONG {bad}" if bad else "")
                row.append(text)
        table.add_row(*row)
    console.print(table)


def strike_all(
    world: World,
    seeds: Sequence[int],
    only: Sequence[str] = (),
    out: Path | None = None,
    *,
    quiet: bool = False,
) -> list[Outcome]:
    """Strike every cell once with each seed; return what came of it, with what `out` had of this device already."""
    device = world.device
    outcomes: list[Outcome] = []
    if out is not None and out.exists():
        for line in out.read_text().splitlines():
            told = json.loads(line)
            outcomes.append(Outcome(**{**told, "wrong": tuple(told["wrong"])}))
        outcomes = [each for each in outcomes if each.device == device.name]
    known = {each.which for each in outcomes}
    todo = [
        (*cell, seed)
        for seed in seeds
        for cell in cells(device, only)
        if (*cell, seed) not in known
    ]
    warm_up(world)
    gc.collect()
    gc.freeze()  # what is there already need not be looked through behind each strike
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=quiet, transient=True) as bar:
        task = bar.add_task("strikes", total=len(todo))
        for which in todo:
            bar.update(task, description=", ".join(map(str, which)))
            outcomes.append(one_strike(world, *which))
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(outcomes[-1])) + "\n")
            bar.advance(task)
    gc.unfreeze()
    return outcomes


def warm_up(world: World) -> None:
    """Have everything made that is made once in a process: threads, tables, caches."""
    world.device.start()
    world.moment = lambda phase, block: threading.current_thread() and None  # counted from then on
    for way in world.device.ways.values():
        runtime = world.runtime(**way)
        for _ in range(2):
            world.step(runtime)
            runtime.wait_for_plan()
        runtime.close()
    world.rest()


def never_struck(
    device: Device, outcomes: Sequence[Outcome], only: Sequence[str] = ()
) -> list[Cell]:
    """Return the cells in which no strike was delivered."""
    struck = {(each.fault, each.way, each.phase) for each in outcomes if each.took}
    return [cell for cell in cells(device, only) if cell not in struck]


def main() -> int:
    """Parse the command line and strike."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=DEVICES, default=DEVICES[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], choices=list(FAULTS), metavar="NAME")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=180)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    begin_s = time.perf_counter()
    try:
        world = World(0, device_of(options.device))
    except RuntimeError as error:
        parser.exit(2, f"{error}\n")
    outcomes = strike_all(world, seeds, options.only, options.out)
    show(world, outcomes, console)
    for each in outcomes:
        for wrong in each.wrong:
            console.print(f"{each.fault}, {each.way}, {each.phase}, seed {each.seed}: {wrong}")
    missed = never_struck(world.device, outcomes, options.only)
    for cell in missed:
        console.print("never delivered:", ", ".join(cell))
    wrong = sum(bool(each.wrong) for each in outcomes)
    rescues = sum(each.rescues for each in outcomes)
    seconds = time.perf_counter() - begin_s
    console.print(f"{len(outcomes)} strikes, {wrong} wrong, {rescues:,} rescues, {seconds:.0f} s")
    return 1 if wrong or missed else 0


if __name__ == "__main__":
    sys.exit(main())

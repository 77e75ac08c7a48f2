"""One program: ordinary, managed, and ordinary again where these differ; and the verdict.

A program whose ordinary runs differ says nothing and is set aside. What the managed run did differently is *silent* if
it ended and its bits differ, *loud* if it raised where the ordinary run did not; a loud end is legal where faults.py
says that nothing else is possible.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch

from delta_runtime import _C
from scripts.programs import driver, parts
from scripts.programs.coverage import PLACE_OF, Cell, Place, endangered, moment_of
from scripts.programs.driver import Job, Peak, drive, first_difference
from scripts.programs.faults import TERMS, Family, Fault, Moment
from scripts.programs.program import Instruction, Phase, Program
from scripts.programs.render import Marks, render
from scripts.programs.settings import Settings

ORDINARY_RUNS = 3
"""Ordinary runs of a program whose managed run differs, before that counts."""
ALWAYS_AGAIN = 8
"""One in so many programs is run ordinarily again whatever its managed run did."""


class Verdict(enum.Enum):
    """What came of a program."""

    SAME = "same bits"
    SILENT = "silent difference"
    LOUD = "loud"
    LEGALLY_LOUD = "loud, as it may be"
    LOST_SIGNAL = "a signal was lost"
    STUCK = "left a state behind"
    COMPLAINED = "logged an error"
    CRASHED = "crashed"
    HUNG = "hung"
    NOT_REPEATABLE = "ordinary runs differ"
    BROKEN = "the program could not be run"

    @property
    def is_finding(self) -> bool:
        """Whether it is something that must not happen."""
        return self not in (Verdict.SAME, Verdict.LEGALLY_LOUD, Verdict.NOT_REPEATABLE)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a program.

    Args:
        verdict: in a word.
        detail: what differed, or the error.
        raised: whether the ordinary run raised in some step.
        evictions: values that left device memory in the managed run.
        cells: what of the coverage table it has tried.
        seconds: of all runs together.
        loud_steps: steps in which the managed run raised and the ordinary one did not.
    """

    verdict: Verdict
    detail: str = ""
    raised: bool = False
    evictions: int = 0
    cells: frozenset[Cell] = frozenset()
    seconds: float = 0.0
    loud_steps: tuple[int, ...] = ()


def names_of_parts() -> dict[str, Any]:
    """What every program finds among its global names."""
    names = {name: getattr(parts, name) for name in _IMPORTED}
    names |= parts.REGISTRY
    names |= {"Job": driver.Job, "delta": driver.delta, "Interrupted": driver.Interrupted}
    return names


_IMPORTED = (
    *("contextlib", "ctypes", "dist", "io", "itertools", "mmap", "random", "sys", "tempfile"),
    *("threading", "np", "torch", "F", "nn", "checkpoint"),
)


class Prepared:
    """A program that can be run any number of times."""

    def __init__(self, program: Program, rank: int = 0) -> None:
        self.program = program
        self.rank = rank
        self.instructions: list[Instruction] = list(program.instructions())
        self.endangered = endangered(program)
        made = frozenset(n for numbers in self.endangered.values() for n in numbers)
        self.source = render(program, Marks(made, frozenset(self.endangered)))
        self.code: CodeType = compile(self.source, "<program>", "exec")

    def run(self, managed_by: Any = None, watch: Watch | None = None) -> list[tuple[str, Any]]:
        """One run; see driver.drive."""
        names = names_of_parts()
        names["RANK"] = self.rank
        names["_probe"] = watch.probe if watch else _nothing
        names["_made"] = watch.made if watch else _nothing
        names["_look"] = watch.look if watch else _nothing
        if watch:
            watch.names = names
        exec(self.code, names)
        try:
            return drive(names, managed_by)
        finally:
            names.clear()


def _nothing(*_: Any) -> None:
    pass


class Watch:
    """Sees, in a managed run, where the values lie that an attack endangers."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.names: dict[str, Any] = {}
        self.cells: set[Cell] = set()
        if prepared.program.interrupts:  # of no instruction, and of no value
            self.cells.add(Cell(Fault.INTERRUPT, Place.RESIDENT, Phase.FORWARD))
        self.waiting: set[int] = set()
        self.spare: list[Any] = []

    def made(self, number: int, *values: Any) -> None:
        """Marks the new nodes of autograd's graph with the instruction that made them."""
        for value in values:
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                stack = [value.grad_fn]
                while stack:
                    node = stack.pop()
                    if node is None or "instruction" in node.metadata:
                        continue
                    node.metadata["instruction"] = number
                    stack += [following for following, _ in node.next_functions]

    def probe(self, number: int) -> None:
        """The attack with this number is about to happen."""
        attack = self.prepared.instructions[number].attack
        assert attack is not None
        if not attack.targets:
            self.cells.add(Cell(attack.fault, Place.RESIDENT, attack.phase))
        elif moment_of(attack) is Moment.AS_IT_HAPPENS:
            self._take({number})
        else:
            self.waiting.add(number)

    def look(self) -> None:
        """Backward is about to begin."""
        if self.waiting:
            self._take(self.waiting)

    def _take(self, numbers: Iterable[int]) -> None:
        # PyTorch lets nobody look at what a node has saved while another thread's backward lets go of it.
        if any(map(_runs_backward, Job.running)):
            return
        places = self._places()
        for number in numbers:
            attack = self.prepared.instructions[number].attack
            assert attack is not None
            for instruction in self.prepared.endangered[number]:
                for place in places.get(instruction, ()):
                    self.cells.add(Cell(attack.fault, place, attack.phase))

    def _places(self) -> dict[int, set[Place]]:
        """Number of an instruction -> where the tensors lie that the nodes it made have saved."""
        found: dict[int, set[Place]] = {}
        seen: set[Any] = set()
        stack = [
            value.grad_fn
            for value in list(self.names.values())
            if type(value) is torch.Tensor and value.grad_fn is not None
        ]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stack += [following for following, _ in node.next_functions]
            number = node.metadata.get("instruction")
            if number is None:
                continue
            for attribute in _saved_attributes(node):
                try:
                    saved = getattr(node, attribute)
                except RuntimeError:
                    continue  # let go of already
                for each in saved if isinstance(saved, (list, tuple)) else (saved,):
                    ticket = getattr(each, "data", None)
                    if type(ticket) is _C.Ticket:
                        place = PLACE_OF.get(_C.place_of(ticket))
                        if place is not None:
                            found.setdefault(number, set()).add(place)
        return found


def _runs_backward(job: Job) -> bool:
    return job.is_alive() and bool({"backward", "grad"} & set(job.function.__code__.co_names))


_attributes: dict[type, tuple[str, ...]] = {}


def _saved_attributes(node: Any) -> tuple[str, ...]:
    kind = type(node)
    if kind not in _attributes:
        _attributes[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved"))
    return _attributes[kind]


class _Log(logging.Handler):
    """Takes what the runtime logs as an error; nobody else hears it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(self.format(record)[-600:])


@contextlib.contextmanager
def _listening() -> Iterator[_Log]:
    """For one managed run: afterwards the logger is as it was."""
    logger = logging.getLogger("delta_runtime")
    propagated = logger.propagate
    log = _Log()
    logger.addHandler(log)
    logger.propagate = False
    try:
        yield log
    finally:
        logger.removeHandler(log)
        logger.propagate = propagated


# ------------------------------------------------------------------------------------ verdicts


GIVEN_UP = ("imed out", "Connection closed", "Connection reset", "Broken pipe", "pair closure")


def gave_up(message: str) -> bool:
    """Whether an error says no more than that another process had nothing to say."""
    return any(words in message for words in GIVEN_UP)


class Company:
    """The processes that run one program at the same time: here, this one alone."""

    rank = 0
    alone = True

    def any_says(self, flag: bool) -> bool:
        """Whether any of them says yes; called by all of them in the same places."""
        return flag


ALONE = Company()


def judge(program: Program, settings: Settings, company: Company = ALONE) -> Result:
    """Runs a program and says what came of it.

    Args:
        program: the program.
        settings: how it is managed.
        company: who else runs it at the same time.
    """
    begin = time.perf_counter()
    try:
        prepared = Prepared(program, company.rank)
    except Exception:
        return Result(Verdict.BROKEN, traceback.format_exc(limit=-3))
    result = _judge(prepared, settings, company)
    gc.collect(0)
    return replace(result, seconds=time.perf_counter() - begin)


def _judge(prepared: Prepared, settings: Settings, company: Company) -> Result:
    try:
        if prepared.program.family is Family.COMPILED:
            prepared.run()  # what is compiled for the first time may draw and log
        with Peak() as peak:
            expected = prepared.run()
        peak.share = settings.share
        raised = any(isinstance(payload, tuple) for _, payload in expected)
    except Exception:
        return Result(Verdict.BROKEN, traceback.format_exc(limit=-4))
    if company.any_says(
        any(gave_up(payload[1]) for _, payload in expected if isinstance(payload, tuple))
    ):
        return Result(Verdict.NOT_REPEATABLE, "one process raised, the other waited for it", raised)
    # Where the managed run has the same bits nobody needs to know; some are run again all the same.
    if prepared.program.seed % ALWAYS_AGAIN == 0:
        changed = _changes(prepared, expected, 1)
        if company.any_says(bool(changed)):
            return Result(Verdict.NOT_REPEATABLE, changed, raised)
    result = replace(_managed(prepared, settings, peak, expected), raised=raised)
    loud = result.verdict in (Verdict.LOUD, Verdict.LEGALLY_LOUD)
    if company.any_says(loud) and not company.alone:
        return result  # the others wait in vain for what this one had to say: no run is like another now
    doubtful = loud or result.verdict is Verdict.SILENT
    if company.any_says(doubtful):
        changed = _changes(prepared, expected, ORDINARY_RUNS - 1)
        if doubtful and changed:
            return Result(Verdict.NOT_REPEATABLE, changed, raised)
    return result


def _changes(prepared: Prepared, expected: list[tuple[str, Any]], times: int) -> str:
    """What differs between ordinary runs; "" if nothing does."""
    for _ in range(times):
        difference = first_difference(prepared.run(), expected)
        if difference:
            return difference
    return ""


def _managed(
    prepared: Prepared, settings: Settings, peak: Peak, expected: list[tuple[str, Any]]
) -> Result:
    watch = Watch(prepared)
    managements: list[driver.Managed] = []

    def managed_by() -> driver.Managed:
        managements.append(settings.managed(peak.budget_bytes))
        return managements[-1]

    error = ""
    found: list[tuple[str, Any]] = []
    with _listening() as log:
        try:
            found = prepared.run(managed_by, watch)
        except Exception as raised_error:
            names = [each.__name__ for each in type(raised_error).__mro__]
            error = (
                f"{': '.join((names[0], str(raised_error)[:400]))}\n"
                f"{traceback.format_exc(limit=-3)}"
            )
    evictions = sum(_evictions(runtime) for each in managements for runtime in each.runtimes)
    base = Result(Verdict.SAME, "", False, evictions, frozenset(watch.cells))
    left = left_behind()
    complaints = "\n".join(log.records)
    if left:
        return replace(base, verdict=Verdict.STUCK, detail=left + error)
    if error:
        return replace(base, verdict=Verdict.LOUD, detail=error)
    difference = first_difference(found, expected)
    if not difference:
        return replace(base, verdict=Verdict.COMPLAINED, detail=complaints) if complaints else base
    return _different(prepared.program, base, found, expected, difference)


def _different(
    program: Program,
    base: Result,
    found: list[tuple[str, Any]],
    expected: list[tuple[str, Any]],
    difference: str,
) -> Result:
    wanted = {label: payload[0][0] for label, payload in expected if isinstance(payload, tuple)}
    loud = {
        label: payload
        for label, payload in found
        if isinstance(payload, tuple) and wanted.get(label) not in payload[0]
    }
    steps = tuple(sorted(int(label.split()[1].rstrip(":")) for label in loud))
    base = replace(base, detail=difference, loud_steps=steps)
    if "the signal was lost" in difference:
        return replace(base, verdict=Verdict.LOST_SIGNAL)
    # What came before the first error must be equal all the same.
    position = next(
        (
            n
            for n, ((a, x), (b, y)) in enumerate(zip(found, expected))
            if a != b or not _alike(x, y)
        ),
        len(expected),
    )
    label, payload = found[position] if position < len(found) else ("", b"")
    if label not in loud:
        return replace(base, verdict=Verdict.SILENT)
    allowed = {name for fault in program.faults() for name in TERMS[fault].loud}
    legal = bool(allowed & set(payload[0]))
    return replace(base, verdict=Verdict.LEGALLY_LOUD if legal else Verdict.LOUD)


def _alike(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, tuple):
        return isinstance(found, tuple) and wanted[0][0] in found[0]
    return bool(found == wanted)


def _evictions(runtime: Any) -> int:
    counters = runtime.session.counters()
    return int(counters.drops + counters.swap_outs)


def left_behind() -> str:
    """What a managed run has left in the process that it should not have; "" if nothing."""
    left = []
    # Not imported here: what the first use of a runtime does to a process is a question, too.
    module = sys.modules.get("delta_runtime.entered")
    if module is not None and module.entered() is not None:
        left.append("a runtime is still entered")
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        left.append("hooks for saved tensors are still there")
    if _C.cpu_pool.soft_limit_bytes():
        left.append("the pool still has a soft limit")
    return "; ".join(left)


# ------------------------------------------------------------------------------------ whose fault


def culprits(
    program: Program,
    settings: Settings,
    result: Result,
    judge_it: Callable[[Program, Settings], Result],
) -> set[Fault]:
    """The faults that a finding is about: of the attacks without which it does not come up; none: of no attack."""
    from scripts.programs.minimise import remove  # which judges, too

    guilty: set[Fault] = set()
    for group, faults in program.groups().items():
        numbers = {n for n, each in enumerate(program.instructions()) if each.group == group}
        if judge_it(remove(program, numbers), settings).verdict is not result.verdict:
            guilty |= faults
    if not guilty:
        numbers = {n for n, each in enumerate(program.instructions()) if each.group >= 0}
        if judge_it(remove(program, numbers), settings).verdict is not result.verdict:
            return program.faults()
    return guilty

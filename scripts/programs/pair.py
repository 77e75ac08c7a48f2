"""Two processes that run the same programs at the same time, with gloo between them.

The first is a worker like any other; it starts the second, tells it what to run, and puts both results together. They
agree over a pipe, not by collectives, on what to do next: where one of them raised, the other may wait in a collective
until gloo gives up, and after that the group is made anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing
import os
import signal
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from delta_runtime import _C, cpu_pool
from scripts.programs.program import Program
from scripts.programs.runner import Company, Result, Verdict, gave_up, judge
from scripts.programs.serve import settle
from scripts.programs.settings import Settings

COLLECTIVE_LIMIT_S = 6
_PR_SET_PDEATHSIG = 1
_SEVERITY = (
    Verdict.SAME,
    Verdict.NOT_REPEATABLE,
    Verdict.LEGALLY_LOUD,
    Verdict.COMPLAINED,
    Verdict.LOUD,
    Verdict.STUCK,
    Verdict.LOST_SIGNAL,
    Verdict.SILENT,
    Verdict.BROKEN,
)


def _join(rank: int, path: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=COLLECTIVE_LIMIT_S),
    )


def _leave() -> None:
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


class _First(Company):
    """The process that asks."""

    alone = False

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def any_says(self, flag: bool) -> bool:
        either = bool(self.pipe.recv()) or flag
        self.pipe.send(either)
        return either


class _Second(Company):
    """The process that is asked."""

    rank = 1
    alone = False

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def any_says(self, flag: bool) -> bool:
        self.pipe.send(flag)
        return bool(self.pipe.recv())


def _second(pipe: Connection) -> None:
    """The second process's main function."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    cpu_pool.install()
    settle()  # what the first use of a runtime does is a question for the first process

    company = _Second(pipe)
    while True:
        try:
            what, *rest = pipe.recv()
        except EOFError:
            return
        if what == "join":
            _leave()
            _join(1, rest[0])
        elif what == "judge":
            program, settings, sabotage = rest
            _C.set_sabotage(sabotage)
            pipe.send(judge(program, settings, company))


class Pair:
    """This process and a second one."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_second, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.joined = False
        self.store = ""
        self.company = _First(self.pipe)

    def _join(self) -> None:
        path = tempfile.mktemp(prefix="stress-programs-store-")
        self.pipe.send(("join", path))
        _leave()
        _join(0, path)
        if self.store:  # not this one: the other process may still read it
            with contextlib.suppress(OSError):
                os.unlink(self.store)
        self.store = path
        self.joined = True

    def judge(self, program: Program, settings: Settings, sabotage: int) -> Result:
        """What comes of a program in both processes."""
        if not self.joined:
            self._join()
        self.pipe.send(("judge", program, settings, sabotage))
        mine = judge(program, settings, self.company)
        theirs = self.pipe.recv()
        whole = together(mine, theirs)
        if whole.raised or whole.verdict is not Verdict.SAME:
            self.joined = False  # somebody may have waited in vain
        return whole


def together(first: Result, second: Result) -> Result:
    """One result of two: the worse one, and of two errors the one that is not about the other's silence."""
    results: list[tuple[int, Result]] = [(0, first), (1, second)]
    verdicts = {result.verdict for _, result in results}
    echoes = [
        (rank, result)
        for rank, result in results
        if result.verdict in (Verdict.LOUD, Verdict.LEGALLY_LOUD) and gave_up(result.detail)
    ]
    if len(echoes) == 1 and len(verdicts) > 1:
        results.remove(echoes[0])
    rank, worst = max(results, key=lambda each: _SEVERITY.index(each[1].verdict))
    cells: frozenset[Any] = first.cells | second.cells
    return replace(
        worst,
        detail=f"rank {rank}: {worst.detail}" if worst.detail else "",
        raised=first.raised or second.raised,
        evictions=first.evictions + second.evictions,
        cells=cells,
        seconds=max(first.seconds, second.seconds),
    )

"""Processes that run programs, so that one which crashes or hangs is found out, reported, and hurts no other.

A worker gets one request at a time over a pipe: a program by seed and number, or as JSON; it answers with a Result.
Where no answer comes within the limit the worker is ended and the verdict is "hung"; where the process ends by itself
it is "crashed", with the last lines that it wrote. After `RENEW_AFTER` programs, or one that left a state behind, a
worker makes room for a fresh one, since some things happen only once in a process.

Workers start with OMP_NUM_THREADS=2 and then compute on one thread, so that threads which torch has not seen yet are
told from those that it has.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

RENEW_AFTER = 400
START_LIMIT_S = 120.0
TAIL_CHARACTERS = 1500


@dataclass(frozen=True, slots=True)
class Request:
    """What a worker is to run.

    Args:
        number: which program, for the answer.
        seed: of the run; with `number` and `family` it says which program.
        family: value of a Family.
        program: the program as JSON, in place of seed and number.
        settings: how that one is managed.
        sabotage: number to break the runtime with; 0: none.
        settled: what the first use of a runtime does to a process is over before; so it always is for programs
            that come as JSON.
    """

    number: int
    seed: int = 0
    family: str = "eager"
    program: str = ""
    settings: Any = None
    sabotage: int = 0
    settled: bool = False


def _serve(pipe: Connection, log: str) -> None:
    """The worker's main function."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where it hangs
    from scripts.programs.serve import Server

    server = Server()
    pipe.send("ready")
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        if request is None:
            return
        pipe.send(server.answer(request))


class Worker:
    """One process, and what it is doing."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.request: Request | None = None
        self.deadline_s = 0.0
        self.served = 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        with tempfile.NamedTemporaryFile(
            prefix="stress-programs-", suffix=".log", delete=False
        ) as file:
            self.log = file.name
        self.process = context.Process(target=_serve, args=(theirs, self.log), daemon=False)
        self.process.start()
        theirs.close()
        self.served = 0
        self.ready = False
        self.deadline_s = time.monotonic() + START_LIMIT_S

    def wait_until_ready(self) -> None:
        """Blocks until it has imported all that it needs."""
        if self.ready:
            return
        if not self.pipe.poll(START_LIMIT_S):
            self.end()
            raise RuntimeError("a worker did not start")
        try:
            assert self.pipe.recv() == "ready"
        except EOFError:
            tail = self._tail()
            self.end()
            raise RuntimeError(f"a worker did not start: {tail}") from None
        self.ready = True

    def submit(self, request: Request) -> None:
        """Gives it something to run."""
        self.wait_until_ready()
        self.request = request
        self.deadline_s = time.monotonic() + self.limit_s
        with contextlib.suppress(OSError):  # it is gone: the answer will say so
            self.pipe.send(request)

    def take(self) -> tuple[Request, Any]:
        """The answer to its request, when there is one or none will come; see `arrived`."""
        from scripts.programs.runner import Result, Verdict

        request = self.request
        assert request is not None and self.process.pid is not None
        self.request = None
        if not self.pipe.poll(0):
            with contextlib.suppress(OSError):
                os.kill(self.process.pid, signal.SIGUSR1)
                time.sleep(0.5)
            tail = self._tail()
            self.renew()
            return request, Result(Verdict.HUNG, f"no end after {self.limit_s:.0f} s. {tail}")
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            tail, code = self._tail(), self.process.exitcode
            self.renew()
            return request, Result(Verdict.CRASHED, f"exit code {code}. {tail}")
        self.served += 1
        if self.served >= RENEW_AFTER or answer.verdict is Verdict.STUCK:
            self.renew()
        return request, answer

    def _tail(self) -> str:
        try:
            with open(self.log, errors="replace") as file:
                text = file.read()
        except OSError:
            return ""
        text = text.split("\nExtension modules: ")[0]
        for beginning in ("Fatal Python error", "Traceback (most recent call last)"):
            if beginning in text:
                return text[text.rindex(beginning) :][:TAIL_CHARACTERS]
        return text[-TAIL_CHARACTERS:]

    def renew(self) -> None:
        """Ends the process and starts another one."""
        self.end()
        self._start()

    def end(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(0.2 if self.request is None else 0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        with contextlib.suppress(OSError):
            os.unlink(self.log)


def run_all(
    requests: Iterable[Request], jobs: int, limit_s: float
) -> Iterator[tuple[Request, Any]]:
    """Runs requests on some workers; yields each with its result, as they come.

    The iterator may be left early: the workers are ended then.
    """
    waiting = iter(requests)
    workers = [Worker(limit_s) for _ in range(jobs)]
    try:
        busy = [worker for worker in workers if _give(worker, waiting)]
        while busy:
            left_s = min(worker.deadline_s for worker in busy) - time.monotonic()
            arrived = wait([worker.pipe for worker in busy], timeout=max(0.0, left_s))
            now = time.monotonic()
            for worker in list(busy):
                if worker.pipe in arrived or now >= worker.deadline_s:
                    yield worker.take()
                    if not _give(worker, waiting):
                        busy.remove(worker)
    finally:
        for worker in workers:
            worker.end()


def _give(worker: Worker, waiting: Iterator[Request]) -> bool:
    request = next(waiting, None)
    if request is None:
        return False
    worker.submit(request)
    return True


class Bench:
    """One worker for programs that are judged one after the other, such as by the minimiser."""

    def __init__(self, limit_s: float, sabotage: int = 0) -> None:
        self.worker = Worker(limit_s)
        self.sabotage = sabotage

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.worker.end()

    def judge(self, program: Any, settings: Any) -> Any:
        """What comes of a program, whatever it does to the process."""
        from scripts.programs.program import to_json

        self.worker.submit(
            Request(-1, program=to_json(program), settings=settings, sabotage=self.sabotage)
        )
        while not self.worker.pipe.poll(0) and time.monotonic() < self.worker.deadline_s:
            wait([self.worker.pipe], timeout=self.worker.deadline_s - time.monotonic())
        return self.worker.take()[1]


def clean_environment() -> None:
    """What workers inherit: no budget from outside, two threads for threads that torch has not seen."""
    for name in [name for name in os.environ if name.startswith("DELTA_")]:
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "2"
    os.environ["OMP_WAIT_POLICY"] = "passive"  # two threads may have to share a core
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if root not in sys.path:
        sys.path.insert(0, root)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))

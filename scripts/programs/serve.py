"""What runs in a worker: answers requests with results."""

from __future__ import annotations

import os
import random
import sys
import traceback
from typing import TYPE_CHECKING

import torch

import delta_runtime
from delta_runtime import _C, cpu_pool
from scripts.programs.faults import Family
from scripts.programs.generator import make_case
from scripts.programs.program import from_json
from scripts.programs.runner import Result, Verdict, judge
from scripts.programs.workers import Request

if TYPE_CHECKING:
    from scripts.programs.pair import Pair


def settle() -> None:
    """Uses a runtime once, so that what the first use in a process does is over."""
    state = random.getstate()
    runtime = delta_runtime.Runtime("50%", device="cpu")
    str(runtime.report())
    runtime.close()
    random.setstate(state)


class Server:
    """Runs the programs of a worker."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        cpu_pool.install()
        self.pair: Pair | None = None

    def answer(self, request: Request) -> Result:
        """Judges what a request asks for."""
        try:
            return self._answer(request)
        except Exception:
            return Result(Verdict.BROKEN, traceback.format_exc(limit=-5))

    def _answer(self, request: Request) -> Result:
        _C.set_sabotage(request.sabotage)
        if request.settled or request.program:
            settle()
        if request.program:
            program, settings = from_json(request.program), request.settings
        else:
            case = make_case(request.seed, request.number, Family(request.family))
            program, settings = case.program, case.settings
        if program.family is not Family.TWO_PROCESS:
            return judge(program, settings)
        if self.pair is None:
            from scripts.programs.pair import Pair

            self.pair = Pair()
        try:
            return self.pair.judge(program, settings, request.sabotage)
        except (EOFError, OSError):
            # The other process is gone, and with it this worker's use: whoever waits sees a crash.
            self.pair.process.join(5)
            sys.stderr.write(f"the second process ended with {self.pair.process.exitcode}\n")
            sys.stderr.flush()
            os._exit(70)

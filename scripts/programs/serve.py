"""What runs in a worker: answers requests with results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from delta_runtime import _C, cpu_pool
from scripts.programs.faults import Family
from scripts.programs.generator import make_case
from scripts.programs.program import from_json
from scripts.programs.runner import Result, judge
from scripts.programs.workers import Request

if TYPE_CHECKING:
    from scripts.programs.pair import Pair


class Server:
    """Runs the programs of a worker."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        cpu_pool.install()
        self.pair: Pair | None = None

    def answer(self, request: Request) -> Result:
        """Judges what a request asks for."""
        _C.set_sabotage(request.sabotage)
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
        return self.pair.judge(program, settings, request.sabotage)

"""What runs in a worker: answers requests with results."""

from __future__ import annotations

import torch

from delta_runtime import _C, cpu_pool
from scripts.programs.faults import Family
from scripts.programs.generator import make_case
from scripts.programs.program import from_json
from scripts.programs.runner import Result, judge
from scripts.programs.workers import Request


class Server:
    """Runs the programs of a worker."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        cpu_pool.install()

    def answer(self, request: Request) -> Result:
        """Judges what a request asks for."""
        _C.set_sabotage(request.sabotage)
        if request.program:
            return judge(from_json(request.program), request.settings)
        case = make_case(request.seed, request.number, Family(request.family))
        return judge(case.program, case.settings)

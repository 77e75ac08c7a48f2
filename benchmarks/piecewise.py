"""Times a training step piece by piece, for machines whose speed changes while the step runs.

Question: none by itself; a part of the benchmarks. Other programs on a shared machine slow a step down in spells of a
tenth of a second to a few seconds, by a third and more. Of a few whole steps of several seconds none is free of such
spells, so that the least of them is still a matter of luck. But an ordinary step, and one that follows a plan, does the
same work in the same order each time: cut into pieces of some ten milliseconds, each piece meets a quiet spell in one
of the steps, and the sum of the least time of each piece is near to what the step takes on a quiet machine.

What changes from step to step at random is lost in that sum: a wait for a lane that is now here and now there, and is
shorter where something else slowed compute down before it; memory traffic beside another piece than before; an eviction
decided by the clock. Whoever compares by it adds the seconds of waiting, as counted.

Covers: cutting forward and backward at the modules that have no children. What comes after the last gradient of an
output, the optimizer's step too, is one piece.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Pieces = NDArray[np.float64]
"""Seconds of the pieces of one step, in order."""


class PieceTimer:
    """Marks the time whenever a module without children has run, and when its output's gradient is there.

    Where the output is not one tensor, its gradient makes no mark.

    Args:
        model: is given hooks, for good. They hold no tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._marks: list[float] = []
        for module in model.modules():
            if next(module.children(), None) is None:
                module.register_forward_hook(self._after_forward)

    def _mark(self, *_: Any) -> None:
        self._marks.append(time.perf_counter())

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._mark()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self._mark)

    def begin(self) -> None:
        """Begin a step."""
        self._marks.clear()
        self._mark()

    def end(self) -> Pieces:
        """End the step."""
        self._mark()
        return np.diff(self._marks)


def quiet_seconds(steps: Sequence[Pieces]) -> float:
    """Seconds of a step on a quiet machine: the sum over the pieces of the least of each.

    Args:
        steps: of one kind. The more, the less is the sum: compare equal numbers of steps.

    Raises:
        ValueError: the steps differ in their number of pieces.
    """
    numbers = {len(pieces) for pieces in steps}
    if len(numbers) > 1:
        raise ValueError(f"steps of one kind have {sorted(numbers)} pieces")
    return float(np.min(steps, axis=0).sum())

"""Chen's square root of n: outputs of a chain kept at about even distances in bytes.

From Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174): a segment is closed as soon as it
would grow above a limit, and limits around sqrt(all bytes * largest output) are tried. A plain rule to compare others
with; `min_peak` finds the best subset. Covers one chain, as `min_peak` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners import min_peak
from delta_runtime.planners.plan_result import PlanResult, judged, moving_nothing, result_of
from delta_runtime.planners.solution import Solution
from delta_runtime.planners.step_chain import StepChain

_LIMITS = 64


def solve(sizes: Sequence[float]) -> Solution[list[int]]:
    """Return which outputs to keep, as numbers of layers between 1 and n - 1, in order.

    Args:
        sizes: of y_0 (the input) to y_n, in any unit.

    The objective is that of `min_peak`'s A: what is kept, and the largest segment. On n equal layers, n a square, it is
    2 * sqrt(n) - 2 outputs, the least there is.
    """
    y = [float(size) for size in sizes]
    if len(y) < 2 or not all(0 <= size < float("inf") for size in y):
        raise ValueError("sizes must be two or more, finite and not negative")
    inner = y[1:-1]
    # Between a limit under which all is kept, and one under which nothing is.
    root = np.sqrt(max(sum(inner) * max(inner, default=0.0), 0.0))
    tried = {0.0, sum(inner)} | set((root * np.geomspace(0.25, 4.0, _LIMITS - 1)).tolist())
    subsets = [_keep_where_full(y, limit) for limit in sorted(tried)]
    kept = min(subsets, key=lambda subset: (min_peak.peak_a(y, subset), len(subset)))
    peak = min_peak.peak_a(y, kept)
    return Solution(peak, peak, kept)


def plan(graph: StepGraph, budget_bytes: int, tiers: Links | None = None) -> PlanResult:
    """Return the plan of a recorded step with checkpoints at even distances, taken as a chain; see `step_chain`.

    A stage counts by all that it saves. It is the same for every budget below the step's peak.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        tiers: not used; this planner copies nothing.
    """
    begin = time.perf_counter()
    chain = StepChain(graph)
    if graph.peak_bytes <= budget_bytes or chain.length == 0:
        return moving_nothing(graph, budget_bytes, begin)
    found = solve(chain.segment_peaks().saved.tolist())
    return result_of(judged(chain.plan_of_kept(found.schedule), graph), budget_bytes, begin)


def _keep_where_full(y: list[float], limit: float) -> list[int]:
    kept: list[int] = []
    held = 0.0
    for i in range(1, len(y) - 1):
        if held + y[i] > limit:
            kept.append(i)
            held = 0.0
        else:
            held += y[i]
    return kept

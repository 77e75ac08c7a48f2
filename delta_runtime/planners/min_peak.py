"""Least-peak checkpoints: which outputs of a chain to keep so that its training step peaks lowest.

The scheme has one level: a subset of the outputs is kept, every other one is made again once, a segment between two
kept ones at a time, during backward. Seconds do not count. Two objectives, after Wang, Hong et al., "GPU memory usage
optimization for backward propagation in deep network training" (2023; arXiv 2502.12499):

- A: all that is kept, and the largest segment. O(n^3).
- B: what PyTorch holds. When a segment is done, what was kept behind it is gone already; a segment is rebuilt as a
  whole, then backward lets go of it value by value, with two gradients at hand. O(n^2).

The formulas are written from the papers' complexities and abstracts and agree with a search of all subsets.

Covers one chain: y_0 is the input, y_i the output of layer i. Does not cover branches, nor what a layer needs for
itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from delta_runtime.core.step_graph import Floats, StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners.plan_result import PlanResult, judged, moving_nothing, result_of
from delta_runtime.planners.solution import Solution
from delta_runtime.planners.step_chain import SegmentColumns, StepChain

SegmentPeaks = Callable[[int, int, int], Floats]
"""Of `(i, begin, end)`: for k from `begin` to before `end`, the peak inside the segment (i, k), with nothing else
counted. It must not fall as k grows."""

_BLOCK = 512  # ends of a segment that are looked at together


def solve(
    sizes: Sequence[float],
    gradient_sizes: Sequence[float] | None = None,
    objective: str = "B",
    segment_peaks: SegmentPeaks | None = None,
    saved_sizes: Sequence[float] | None = None,
) -> Solution[list[int]]:
    """Return the outputs to keep, as numbers of layers between 1 and n - 1, in order.

    Args:
        sizes: of y_0 to y_n, in any unit.
        gradient_sizes: of their gradients; as large as the outputs where None is given. Objective A reads none.
        objective: "A" or "B"; see above.
        segment_peaks: what a segment holds, for objective B; `within_segments` of the sizes where None is given.
        saved_sizes: all that each layer saves, its output included, for objective A; the outputs alone where None is
            given.

    The objective of the solution is the peak, in the unit of the sizes.
    """
    y = np.asarray(sizes, np.float64)
    g = y if gradient_sizes is None else np.asarray(gradient_sizes, np.float64)
    if y.ndim != 1 or len(y) < 2 or g.shape != y.shape:
        raise ValueError(
            f"sizes {y.shape} and gradient_sizes {g.shape} must be rows of two or more"
        )
    if not (np.isfinite(y).all() and np.isfinite(g).all() and (y >= 0).all() and (g >= 0).all()):
        raise ValueError("sizes must be finite and not negative")
    if objective == "A":
        saved = y if saved_sizes is None else np.asarray(saved_sizes, np.float64)
        if saved.shape != y.shape or not (saved >= y).all():
            raise ValueError("saved_sizes must be a row like sizes, and nowhere smaller")
        kept = _least_kept_and_largest(y, saved)
        peak = peak_a(y, kept, saved)
    elif objective == "B":
        within = within_segments(y, g) if segment_peaks is None else segment_peaks
        kept = _least_while_backward(y, within)
        peak = peak_b(y, kept, within)
    else:
        raise ValueError(f'objective is "A" or "B", not {objective!r}')
    return Solution(peak, peak, kept, bound=peak)


def plan(
    graph: StepGraph, budget_bytes: int, tiers: Links | None = None, *, objective: str = "B"
) -> PlanResult:
    """Return the plan of a recorded step with the least peak, taken as a chain; see `step_chain`.

    It is the same for every budget below the step's peak: this planner knows no seconds. Objective B reckons with what
    the step holds beside saved values at each moment of backward, objective A does not.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        tiers: not used; this planner copies nothing.
        objective: "A" or "B"; see `solve`.
    """
    begin = time.perf_counter()
    chain = StepChain(graph)
    if graph.peak_bytes <= budget_bytes or chain.length == 0:
        return moving_nothing(graph, budget_bytes, begin)
    found = _of_columns(chain.segment_peaks(), objective)
    return result_of(judged(chain.plan_of_kept(found.schedule), graph), budget_bytes, begin)


def expected_peak(columns: SegmentColumns, objective: str) -> float:
    """Return the peak of the device, in bytes, that an objective expects of its own choice.

    Args:
        columns: of a step as a chain.
        objective: "A" or "B". The most that the step holds beside saved values is added to A; B reckons with it.
    """
    beside = float(columns.beside.max(initial=0.0)) if objective == "A" else 0.0
    return _of_columns(columns, objective).objective + beside


def _of_columns(columns: SegmentColumns, objective: str) -> Solution[list[int]]:
    before = np.cumsum(columns.saved)
    held = np.append(-np.inf, (before + columns.beside)[1:])
    return solve(
        columns.kept.tolist(),
        objective=objective,
        segment_peaks=_within(before, held, held),
        saved_sizes=columns.saved.tolist(),
    )


def within_segments(y: Floats, g: Floats) -> SegmentPeaks:
    """Return W(i, k) for a segment that is rebuilt with its last output and then goes value by value.

    W(i, k) = max(P_k + g_k, max over i < j <= k of (P_j + g_j + g_(j-1))) - P_i with P_j = y_0 + ... + y_j.
    """
    before = np.cumsum(y)
    return _within(before, before + g, np.append(-np.inf, before[1:] + g[1:] + g[:-1]))


def _within(before: Floats, rebuilt: Floats, backward: Floats) -> SegmentPeaks:
    """Return W(i, k) = max(rebuilt_k, max over i < j <= k of backward_j) - before_i."""
    most = _most_within(backward)

    def peaks(i: int, begin: int, end: int) -> Floats:
        step = np.maximum.accumulate(backward[begin:end])
        if begin > i + 1:
            step = np.maximum(step, most(i + 1, begin))
        held: Floats = np.maximum(rebuilt[begin:end], step) - before[i]
        return held

    return peaks


def _most_within(row: Floats) -> Callable[[int, int], float]:
    """Return a function that tells the most of a part of the row, from `begin` to before `end`, without a look at all.

    Level h holds the most of each part of 2^h entries; two of them cover any part.
    """
    levels = [row]
    while len(levels[-1]) > 1 << (len(levels) - 1):
        half, last = 1 << (len(levels) - 1), levels[-1]
        levels.append(np.maximum(last[:-half], last[half:]))

    def most(begin: int, end: int) -> float:
        height = (end - begin).bit_length() - 1
        level = levels[height]
        return max(float(level[begin]), float(level[end - (1 << height)]))

    return most


def peak_a(
    y: Sequence[float] | Floats,
    kept: Sequence[int],
    saved: Sequence[float] | Floats | None = None,
) -> float:
    """Return objective A of a subset: what is kept, and the largest of the segments between."""
    breaks = [0, *kept, len(y) - 1]
    all_ = y if saved is None else saved
    largest = max(sum(all_[i + 1 : k + 1]) - y[k] for i, k in zip(breaks, breaks[1:], strict=False))
    return float(sum(y[c] for c in kept) + largest)


def peak_b(y: Sequence[float] | Floats, kept: Sequence[int], within: SegmentPeaks) -> float:
    """Return objective B of a subset: what is kept up to a segment, and the peak inside it, at the worst segment."""
    breaks = [0, *kept, len(y) - 1]
    held, worst = 0.0, -np.inf
    for i, k in zip(breaks, breaks[1:], strict=False):
        held += float(y[i])
        worst = max(worst, held + float(within(i, k, k + 1)[0]))
    return float(worst)


def _least_kept_and_largest(y: Floats, saved: Floats) -> list[int]:
    """Objective A: for each sum that the largest segment can have, the least that must be kept."""
    n = len(y) - 1
    before = np.cumsum(saved)
    inside = (
        before - y
    )  # a segment (i, k) holds inside_k - before_i: all but the output that is kept
    sums = np.unique([inside[k] - before[i] for i in range(n) for k in range(i + 1, n + 1)])
    best, best_sum = np.inf, np.inf
    columns = y.tolist(), before.tolist(), inside.tolist()
    for most in sums.tolist():
        if most >= best:
            break  # what is kept is never less than nothing
        least = _least_kept(*columns, most)[0]
        if least + most < best:
            best, best_sum = least + most, most
    return _least_kept(*columns, best_sum)[1]


def _least_kept(
    y: list[float], before: list[float], inside: list[float], most: float
) -> tuple[float, list[int]]:
    """Return the least to keep so that no segment is larger than `most`, and what that is; inf if one always is.

    f(k) = y_k + min of f(i) over the i from which a segment to k is small enough: a minimum over a window.
    """
    n = len(y) - 1
    least, came_from = [0.0] * (n + 1), [0] * (n + 1)
    window = deque([0])  # of f in rising order
    for k in range(1, n + 1):
        while window and inside[k] - before[window[0]] > most:
            window.popleft()
        if not window:
            return np.inf, []
        came_from[k] = window[0]
        least[k] = least[window[0]] + (y[k] if k < n else 0.0)
        while window and least[window[-1]] >= least[k]:
            window.pop()
        window.append(k)
    kept, k = [], came_from[n]
    while k > 0:
        kept.append(k)
        k = came_from[k]
    return least[n], kept[::-1]


def _least_while_backward(y: Floats, within: SegmentPeaks) -> list[int]:
    """Objective B from the back: G(i) = y_i + min over k > i of max(W(i, k), G(k)), and G(n) = -inf."""
    n = len(y) - 1
    best = np.full(n + 1, -np.inf)
    ends = np.zeros(n + 1, np.int64)
    for i in range(n - 1, -1, -1):
        least = np.inf
        for begin in range(i + 1, n + 1, _BLOCK):
            end = min(begin + _BLOCK, n + 1)
            inside = within(i, begin, end)
            if inside[0] >= least:
                break  # W never falls with k
            peaks = np.maximum(inside, best[begin:end])
            at = int(peaks.argmin())
            if peaks[at] < least:
                least, ends[i] = float(peaks[at]), begin + at
        best[i] = y[i] + least
    kept, k = [], int(ends[0])
    while k < n:
        kept.append(k)
        k = int(ends[k])
    return kept

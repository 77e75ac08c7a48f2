"""Swaps instead of drops, where the lanes have time: improves a choice that only drops.

Moves, each played before it is believed: a dropped value is swapped instead, and a kept one is
swapped so that dropped ones can be kept. The move that saves the most seconds for each second of
lane goes first; stale scores are looked at again before they are believed, as in `cover`.
"""

from __future__ import annotations

import heapq

import numpy as np

from delta_runtime.core.interrupts import unhurried
from delta_runtime.core.step_graph import Mask
from delta_runtime.planners.evaluate import Evaluator
from delta_runtime.planners.repair import Evictions, take_back

_LEAST_S = 1e-9
_SMALL = 100  # a value so many times smaller than the largest is swapped only if it must be


def has_room(evaluator: Evaluator, swapped: Mask) -> bool:
    """Whether the tier below takes all of that at once."""
    assert evaluator.lanes is not None
    return float(evaluator.bytes[swapped].sum()) <= evaluator.lanes.store_bytes


def swap_instead(evaluator: Evaluator, choice: Evictions, *, most_work: int) -> Evictions:
    """Return a choice that is as good or better, by swapping some of what is dropped.

    Args:
        evaluator: of the graph and the budget, with lanes.
        choice: what is dropped; left as it is.
        most_work: units of work after which the search ends.
    """
    assert evaluator.lanes is not None
    last = evaluator.work + most_work
    best = choice
    lane_s = np.array(evaluator.lanes.in_s)

    def moved(row: int) -> Evictions:
        dropped, dropped_twice, swapped = (
            best.dropped.copy(),
            best.dropped_twice.copy(),
            best.swapped.copy(),
        )
        dropped[row] = dropped_twice[row] = False
        swapped[row] = True
        return Evictions(
            dropped, dropped_twice, swapped, evaluator.evaluate(dropped, dropped_twice, swapped)
        )

    def score(other: Evictions, row: int) -> float:
        saved_s = best.evaluation.seconds - other.evaluation.seconds
        if not has_room(evaluator, other.swapped):
            return 0.0
        if other.evaluation.area > best.evaluation.area or saved_s <= _LEAST_S:
            return 0.0
        return saved_s / max(float(lane_s[row]), _LEAST_S)

    heap = [
        (-evaluator.seconds[row] / max(float(lane_s[row]), _LEAST_S), row)
        for row in np.flatnonzero(best.dropped).tolist()
    ]
    heapq.heapify(heap)
    waiting: list[tuple[float, int]] = []  # of no use now; perhaps after another move
    gained = False
    while evaluator.work < last:
        if not heap:
            if not gained:
                break
            heap, waiting, gained = waiting, [], False
            heapq.heapify(heap)
            if not heap:
                break
        stale, row = heapq.heappop(heap)
        other = moved(row)
        now = score(other, row)
        if now <= 0:
            waiting.append((stale, row))
        elif heap and -now > heap[0][0] and -now > stale:
            heapq.heappush(heap, (-now, row))
        else:
            best, gained = other, True
    return best


def swap_more(evaluator: Evaluator, choice: Evictions, *, most_work: int) -> Evictions:
    """Return a choice that is as good or better, by swapping kept values and keeping dropped ones.

    Args:
        evaluator, choice, most_work: as for `swap_instead`.
    """
    last = evaluator.work + most_work
    best = choice
    kept = np.flatnonzero(~best.dropped & ~best.swapped)
    for row in sorted(kept.tolist(), key=lambda each: evaluator.bytes[each], reverse=True):
        if evaluator.work >= last or (best.evaluation.area <= 0 and not best.dropped.any()):
            break
        swapped = best.swapped.copy()
        swapped[row] = True
        if not has_room(evaluator, swapped):
            continue
        other = Evictions(
            best.dropped.copy(),
            best.dropped_twice.copy(),
            swapped,
            evaluator.evaluate(best.dropped, best.dropped_twice, swapped),
        )
        if other.evaluation.area > best.evaluation.area:
            continue
        take_back(evaluator, other, min(last, evaluator.work + most_work // 8))
        if other.better_than(best):
            best = other
    return best


def only_swaps(evaluator: Evaluator, nothing: Evictions) -> Evictions:
    """Choose swaps alone: what was saved first goes first, until the step fits.

    Args:
        evaluator: of the graph and the budget, with lanes.
        nothing: the choice that evicts nothing.

    Returns:
        The choice. Where the lanes are too slow it has more swaps than they have time for: the step
        will wait for them.
    """
    dropped, dropped_twice = nothing.dropped, nothing.dropped_twice
    if nothing.evaluation.area <= 0:
        return nothing
    most_bytes = max(evaluator.bytes, default=0)
    small = np.array(evaluator.bytes) * _SMALL < most_bytes
    order = np.argsort(small, kind="stable")  # the large ones, then the small ones, as saved

    def first(count: int) -> Evictions:
        swapped = np.zeros(len(dropped), dtype=bool)
        swapped[order[:count]] = True
        return Evictions(
            dropped, dropped_twice, swapped, evaluator.evaluate(dropped, dropped_twice, swapped)
        )

    host = np.cumsum(np.array(evaluator.bytes)[order])
    assert evaluator.lanes is not None
    most = int(np.searchsorted(host, evaluator.lanes.store_bytes, side="right"))
    too_few, enough = 0, first(most)
    if enough.evaluation.area <= 0:
        while most - too_few > 1:
            middle = (too_few + most) // 2
            other = first(middle)
            if other.evaluation.area <= 0:
                most, enough = middle, other
            else:
                too_few = middle
        return enough
    # As if the lanes took no time: the step has to wait for them anyway.
    excess = nothing.evaluation.excess.copy()
    swapped = np.zeros(len(dropped), dtype=bool)
    for row in order.tolist():
        span = slice(evaluator.begin[row], evaluator.own_need[row])
        if (excess[span] > 0).any():
            excess[span] -= evaluator.bytes[row]
            swapped[row] = has_room(evaluator, swapped | (np.arange(len(swapped)) == row))
    return Evictions(
        dropped, dropped_twice, swapped, evaluator.evaluate(dropped, dropped_twice, swapped)
    )


def prefetch_ops(evaluator: Evaluator, choice: Evictions) -> dict[int, int]:
    """Return the op before which each swapped value begins to come back.

    As late as the lane allows; where even its earliest moment is too late for that, as soon as there
    is room for it until it is asked for. Room is given out in the order of need.
    """
    spans = evaluator.spans(choice.dropped, choice.swapped)
    need = evaluator.needs(choice.dropped)
    excess = choice.evaluation.excess.copy()
    for row, span in unhurried(spans.items()):
        if span.begin < span.end:
            excess[span.begin : span.end] += evaluator.bytes[row]
        excess[evaluator.begin[row] : need[row]] -= evaluator.bytes[row]
    backward = int(np.argmax(evaluator.graph.op_backward))
    ops: dict[int, int] = {}
    for row in unhurried(sorted(spans, key=lambda each: need[each])):
        begin, end = evaluator.begin[row], need[row]
        full = np.flatnonzero(excess[begin:end] + evaluator.bytes[row] > 0)
        room_from = begin + int(full[-1]) + 1 if len(full) else begin
        op = max(room_from, min(spans[row].end, end), min(backward, end))
        excess[op:end] += evaluator.bytes[row]
        ops[row] = min(op, len(excess) - 1)
    return ops

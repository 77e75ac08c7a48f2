"""Swaps instead of drops, where the lanes have time: improves a choice that only drops.

Moves, each played before it is believed: a dropped value is swapped instead, and a kept one is
swapped so that dropped ones can be kept. The move that saves the most seconds for each second of
lane goes first; stale scores are looked at again before they are believed, as in `cover`.
"""

from __future__ import annotations

import heapq

import numpy as np

from delta_runtime.core.step_graph import Mask
from delta_runtime.planners.evaluate import Rehearsal
from delta_runtime.planners.repair import Choice, take_back

_LEAST_S = 1e-9
_SMALL = 100  # a value so many times smaller than the largest is swapped only if it must be


def _has_room(rehearsal: Rehearsal, swapped: Mask) -> bool:
    """Whether the tier below takes all of that at once."""
    assert rehearsal.lanes is not None
    return float(rehearsal.bytes[swapped].sum()) <= rehearsal.lanes.store_bytes


def swap_instead(rehearsal: Rehearsal, choice: Choice, *, most_work: int) -> Choice:
    """Return a choice that is as good or better, by swapping some of what is dropped.

    Args:
        rehearsal: of the graph and the budget, with lanes.
        choice: what is dropped; left as it is.
        most_work: units of work after which the search ends.
    """
    assert rehearsal.lanes is not None
    last = rehearsal.work + most_work
    best = choice
    lane_s = np.array(rehearsal.lanes.in_s)

    def moved(page: int) -> Choice:
        dropped, again, swapped = best.dropped.copy(), best.again.copy(), best.swapped.copy()
        dropped[page] = again[page] = False
        swapped[page] = True
        return Choice(dropped, again, swapped, rehearsal.play(dropped, again, swapped))

    def score(other: Choice, page: int) -> float:
        saved_s = best.outcome.seconds - other.outcome.seconds
        if not _has_room(rehearsal, other.swapped):
            return 0.0
        if other.outcome.area > best.outcome.area or saved_s <= _LEAST_S:
            return 0.0
        return saved_s / max(float(lane_s[page]), _LEAST_S)

    heap = [
        (-rehearsal.seconds[page] / max(float(lane_s[page]), _LEAST_S), page)
        for page in np.flatnonzero(best.dropped).tolist()
    ]
    heapq.heapify(heap)
    waiting: list[tuple[float, int]] = []  # of no use now; perhaps after another move
    gained = False
    while rehearsal.work < last:
        if not heap:
            if not gained:
                break
            heap, waiting, gained = waiting, [], False
            heapq.heapify(heap)
            if not heap:
                break
        stale, page = heapq.heappop(heap)
        other = moved(page)
        now = score(other, page)
        if now <= 0:
            waiting.append((stale, page))
        elif heap and -now > heap[0][0] and -now > stale:
            heapq.heappush(heap, (-now, page))
        else:
            best, gained = other, True
    return best


def swap_more(rehearsal: Rehearsal, choice: Choice, *, most_work: int) -> Choice:
    """Return a choice that is as good or better, by swapping kept values and keeping dropped ones.

    Args:
        rehearsal, choice, most_work: as for `swap_instead`.
    """
    last = rehearsal.work + most_work
    best = choice
    kept = np.flatnonzero(~best.dropped & ~best.swapped)
    for page in sorted(kept.tolist(), key=lambda each: rehearsal.bytes[each], reverse=True):
        if rehearsal.work >= last or (best.outcome.area <= 0 and not best.dropped.any()):
            break
        swapped = best.swapped.copy()
        swapped[page] = True
        if not _has_room(rehearsal, swapped):
            continue
        other = Choice(
            best.dropped.copy(),
            best.again.copy(),
            swapped,
            rehearsal.play(best.dropped, best.again, swapped),
        )
        if other.outcome.area > best.outcome.area:
            continue
        take_back(rehearsal, other, min(last, rehearsal.work + most_work // 8))
        if other.better_than(best):
            best = other
    return best


def only_swaps(rehearsal: Rehearsal, nothing: Choice) -> Choice:
    """Choose swaps alone: what was saved first goes first, until the step fits.

    Args:
        rehearsal: of the graph and the budget, with lanes.
        nothing: the choice that evicts nothing.

    Returns:
        The choice. Where the lanes are too slow it has more swaps than they have time for: the step
        will wait for them.
    """
    dropped, again = nothing.dropped, nothing.again
    if nothing.outcome.area <= 0:
        return nothing
    most_bytes = max(rehearsal.bytes, default=0)
    small = np.array(rehearsal.bytes) * _SMALL < most_bytes
    order = np.argsort(small, kind="stable")  # the large ones, then the small ones, as saved

    def first(count: int) -> Choice:
        swapped = np.zeros(len(dropped), dtype=bool)
        swapped[order[:count]] = True
        return Choice(dropped, again, swapped, rehearsal.play(dropped, again, swapped))

    host = np.cumsum(np.array(rehearsal.bytes)[order])
    assert rehearsal.lanes is not None
    most = int(np.searchsorted(host, rehearsal.lanes.store_bytes, side="right"))
    too_few, enough = 0, first(most)
    if enough.outcome.area <= 0:
        while most - too_few > 1:
            middle = (too_few + most) // 2
            other = first(middle)
            if other.outcome.area <= 0:
                most, enough = middle, other
            else:
                too_few = middle
        return enough
    # As if the lanes took no time: the step has to wait for them anyway.
    excess = nothing.outcome.excess.copy()
    swapped = np.zeros(len(dropped), dtype=bool)
    for page in order.tolist():
        span = slice(rehearsal.begin[page], rehearsal.own_need[page])
        if (excess[span] > 0).any():
            excess[span] -= rehearsal.bytes[page]
            swapped[page] = _has_room(rehearsal, swapped | (np.arange(len(swapped)) == page))
    return Choice(dropped, again, swapped, rehearsal.play(dropped, again, swapped))


def prefetch_ops(rehearsal: Rehearsal, choice: Choice) -> dict[int, int]:
    """Return the op before which each swapped value begins to come back.

    As late as the lane allows; where even its earliest moment is too late for that, as soon as there
    is room for it until it is asked for. Room is given out in the order of need.
    """
    spans = rehearsal.spans(choice.dropped, choice.swapped)
    need = rehearsal.needs(choice.dropped)
    excess = choice.outcome.excess.copy()
    for page, span in spans.items():
        if span.begin < span.end:
            excess[span.begin : span.end] += rehearsal.bytes[page]
        excess[rehearsal.begin[page] : need[page]] -= rehearsal.bytes[page]
    backward = int(np.argmax(rehearsal.graph.op_backward))
    ops: dict[int, int] = {}
    for page in sorted(spans, key=lambda each: need[each]):
        begin, end = rehearsal.begin[page], need[page]
        full = np.flatnonzero(excess[begin:end] + rehearsal.bytes[page] > 0)
        room_from = begin + int(full[-1]) + 1 if len(full) else begin
        op = max(room_from, min(spans[page].end, end), min(backward, end))
        excess[op:end] += rehearsal.bytes[page]
        ops[page] = min(op, len(excess) - 1)
    return ops

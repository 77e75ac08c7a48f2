"""Revolve: a chain of equal steps, reversed with a fixed number of places for what it went through.

From Griewank and Walther, "Algorithm 799: revolve" (ACM TOMS 26(1), 2000). Reversing l steps with s places, the first
of which holds the start, takes at the least t(l, s) = r * l - C(s + r, s + 1) further steps forward, with r the least
number for which C(s + r, s) >= l. Covers equal steps and equal sizes alone; `rotor` takes unequal ones.
"""

from __future__ import annotations

from enum import IntEnum
from math import comb
from typing import NamedTuple

from delta_runtime.planners.solution import Solution


class Kind(IntEnum):
    """What a schedule does."""

    STORE = 0
    """Put the state before step i, at which it is, into a free place."""
    ADVANCE = 1
    """Run one step forward, from before step i; keep nothing."""
    REVERSE = 2
    """Run step i forward with all that its reversal needs, and reverse it."""
    LOAD = 3
    """Go back to the state before step i, which is in a place."""
    FREE = 4
    """Give back the place of the state before step i."""


class Action(NamedTuple):
    """One line of a schedule."""

    kind: Kind
    step: int


def extra_forwards(steps: int, places: int) -> int:
    """Return t(l, s): steps forward beyond those that each reversal takes itself."""
    if steps < 1 or places < 1:
        raise ValueError(f"steps and places must be at least 1, not {steps} and {places}")
    r = _repetitions(steps, places)
    return r * steps - comb(places + r, places + 1)


def solve(steps: int, places: int) -> Solution[list[Action]]:
    """Return the schedule with the fewest steps forward, which is its objective; its peak is in places.

    Args:
        steps: l, how many to reverse, at least 1.
        places: s, states that can be held at once with that of the start, at least 1.
    """
    fewest = extra_forwards(steps, places)
    actions = [Action(Kind.STORE, 0)]
    held = peak = 1
    # What is to do, last first: (first step, end, places left, with its start's own).
    to_do: list[tuple[int, int, int] | Action] = [(0, steps, places)]
    while to_do:
        item = to_do.pop()
        if isinstance(item, Action):
            actions.append(item)
            held -= item.kind is Kind.FREE
            continue
        begin, end, left = item
        if end - begin == 1:
            actions += (Action(Kind.LOAD, begin), Action(Kind.REVERSE, begin))
            continue
        middle = begin + _advance(end - begin, left)
        actions.append(Action(Kind.LOAD, begin))
        actions += (Action(Kind.ADVANCE, step) for step in range(begin, middle))
        if left == 1:
            actions.append(Action(Kind.REVERSE, middle))
        else:
            actions.append(Action(Kind.STORE, middle))
            held += 1
            peak = max(peak, held)
        to_do.append((begin, middle, left))
        if left > 1:
            to_do += [Action(Kind.FREE, middle), (middle, end, left - 1)]
    actions.append(Action(Kind.FREE, 0))
    return Solution(fewest, peak, actions, bound=fewest)


def _repetitions(steps: int, places: int) -> int:
    r = 0
    while comb(places + r, places) < steps:
        r += 1
    return r


def _advance(steps: int, places: int) -> int:
    """How far to go to the next state that is stored: t(l, s) = min over m of m + t(l - m, s - 1) + t(m, s)."""
    if places == 1:
        return steps - 1
    r = _repetitions(steps, places)
    # Any m from C(s+r-2, s) to C(s+r-1, s) with a rest from C(s+r-2, s-1) to C(s+r-1, s-1) is best (section 2).
    low = max(comb(places + r - 2, places), steps - comb(places + r - 1, places - 1), 1)
    return min(low, steps - 1)

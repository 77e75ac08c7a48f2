"""Turns a choice of drops into one that fits the budget: adds what is missing, takes back what is not needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_runtime.core.step_graph import Mask
from delta_runtime.planners.evaluate import Outcome, Rehearsal
from delta_runtime.planners.greedy_drops import EPSILON_S, Cover


@dataclass(eq=False)
class Choice:
    """Which saved values are dropped, which of them twice, and what that leads to.

    Args:
        dropped: rows of `graph.saved` that are to be dropped.
        again: which of them are to be dropped once more when they were rebuilt early.
        swapped: rows that are to be swapped.
        outcome: of `Rehearsal.play`.
    """

    dropped: Mask
    again: Mask
    swapped: Mask
    outcome: Outcome

    def better_than(self, other: Choice) -> bool:
        """Fits better or, where both fit equally well, takes less time."""
        mine, its = self.outcome, other.outcome
        return (mine.area, mine.seconds) < (its.area, its.seconds)


def mend(
    rehearsal: Rehearsal,
    cover: Cover,
    swapped: Mask,
    *,
    most_work: int,
    most_seconds: float = float("inf"),
) -> Choice | None:
    """Turn the cover's choice into one that fits, as far as one is found.

    Args:
        rehearsal: of the cover's graph and budget.
        cover: what is chosen so far, and what may be dropped.
        swapped: what is swapped, and stays so.
        most_work: after so much of it in either direction, the choice is taken as it is.
        most_seconds: of rebuilding; a choice that takes longer is not looked for.

    Returns:
        The choice; None where it would take longer than `most_seconds`.
    """
    dropped = cover.planned.copy()
    again = np.zeros(len(dropped), dtype=bool)
    choice = Choice(dropped, again, swapped, rehearsal.play(dropped, again, swapped))
    _add_until_it_fits(rehearsal, cover, choice, rehearsal.work + most_work, most_seconds)
    if choice.outcome.seconds > most_seconds:
        return None
    take_back(rehearsal, choice, rehearsal.work + most_work)
    return choice


def _add_until_it_fits(
    rehearsal: Rehearsal, cover: Cover, choice: Choice, most_work: int, most_seconds: float
) -> None:
    """Adds drops, and second drops, where the rehearsal is still over the budget."""
    dropped, again = choice.dropped, choice.again
    tried_in_vain = beyond_help(cover, dropped, again)
    while rehearsal.work < most_work and choice.outcome.seconds <= most_seconds:
        rehearsal.work += len(tried_in_vain) // 8 + 20
        best = choice.outcome
        open_excess = np.where(tried_in_vain, 0, best.excess)
        worst = int(np.argmax(open_excess))
        if open_excess[worst] <= 0:
            break
        spanning = (cover.begin <= worst) & (cover.own_need > worst) & cover.droppable
        moves = [(page, False) for page in np.flatnonzero(spanning & ~dropped).tolist()]
        moves += [(page, True) for page in np.flatnonzero(spanning & dropped & ~again).tolist()]
        found: tuple[float, int, bool, Outcome] | None = None
        for page, second in moves:
            if rehearsal.work >= most_work:
                break
            mask = again if second else dropped
            mask[page] = True
            outcome = rehearsal.play(dropped, again, choice.swapped)
            mask[page] = False
            gained = best.area - outcome.area
            if gained > 0:
                score = (max(outcome.seconds - best.seconds, 0) + EPSILON_S) / gained
                if found is None or score < found[0]:
                    found = (score, page, second, outcome)
        if found is None:
            tried_in_vain[worst] = True
            continue
        (again if found[2] else dropped)[found[1]] = True
        choice.outcome = found[3]
        tried_in_vain = beyond_help(cover, dropped, again)


def beyond_help(cover: Cover, dropped: Mask, again: Mask) -> Mask:
    """The ops at which no further drop makes room; below the lower bound that can be nearly all of a long step."""
    movable = cover.droppable & ~(dropped & again)
    n_ops = cover.graph.n_ops
    opened = np.bincount(cover.begin[movable], minlength=n_ops + 1)
    closed = np.bincount(cover.own_need[movable], minlength=n_ops + 1)
    return np.asarray(np.cumsum(opened - closed)[:n_ops] == 0)


def take_back(rehearsal: Rehearsal, choice: Choice, most_work: int) -> None:
    """Takes back, dearest first, what is not needed for the excess to be as small as it is."""
    dropped, again = choice.dropped, choice.again
    order = np.argsort([-seconds for seconds in rehearsal.seconds])
    for mask in (again, dropped):
        for page in order.tolist():
            if rehearsal.work >= most_work:
                return
            if not mask[page] or (mask is dropped and again[page]):
                continue
            mask[page] = False
            outcome = rehearsal.play(dropped, again, choice.swapped)
            best = choice.outcome
            if outcome.area <= best.area and outcome.seconds <= best.seconds:
                choice.outcome = outcome
            else:
                mask[page] = True

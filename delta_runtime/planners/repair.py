"""Turns a choice of drops into one that fits the budget: adds what is missing, takes back what is not needed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_runtime.core.step_graph import Mask
from delta_runtime.planners.evaluate import Evaluation, Evaluator
from delta_runtime.planners.greedy_drops import EPSILON_S, GreedyCover


@dataclass(eq=False)
class Evictions:
    """Which saved values are dropped, which of them twice, and what that leads to.

    Args:
        dropped: rows of `graph.saved` that are to be dropped.
        dropped_twice: which of them are to be dropped once more when they were rebuilt early.
        swapped: rows that are to be swapped.
        evaluation: of `Evaluator.play`.
    """

    dropped: Mask
    dropped_twice: Mask
    swapped: Mask
    evaluation: Evaluation

    def better_than(self, other: Evictions) -> bool:
        """Return whether it fits better or, where both fit equally well, takes less time."""
        mine, its = self.evaluation, other.evaluation
        return (mine.area, mine.seconds) < (its.area, its.seconds)


def repair(
    evaluator: Evaluator,
    cover: GreedyCover,
    swapped: Mask,
    *,
    most_work: int,
    most_seconds: float = float("inf"),
) -> Evictions | None:
    """Turn the cover's choice into one that fits, as far as one is found.

    Args:
        evaluator: of the cover's graph and budget.
        cover: what is chosen so far, and what may be dropped.
        swapped: what is swapped, and stays so.
        most_work: after so much of it in either direction, the choice is taken as it is.
        most_seconds: of rebuilding; a choice that takes longer is not looked for.

    Returns:
        The choice; None where it would take longer than `most_seconds`.
    """
    dropped = cover.dropped.copy()
    dropped_twice = np.zeros(len(dropped), dtype=bool)
    choice = Evictions(
        dropped, dropped_twice, swapped, evaluator.evaluate(dropped, dropped_twice, swapped)
    )
    _add_until_it_fits(evaluator, cover, choice, evaluator.work + most_work, most_seconds)
    if choice.evaluation.seconds > most_seconds:
        return None
    take_back(evaluator, choice, evaluator.work + most_work)
    return choice


def _add_until_it_fits(
    evaluator: Evaluator, cover: GreedyCover, choice: Evictions, most_work: int, most_seconds: float
) -> None:
    """Add drops, and second drops, where the evaluator is still over the budget."""
    dropped, dropped_twice = choice.dropped, choice.dropped_twice
    tried_in_vain = beyond_help(cover, dropped, dropped_twice)
    while evaluator.work < most_work and choice.evaluation.seconds <= most_seconds:
        evaluator.work += len(tried_in_vain) // 8 + 20
        best = choice.evaluation
        open_excess = np.where(tried_in_vain, 0, best.excess)
        worst = int(np.argmax(open_excess))
        if open_excess[worst] <= 0:
            break
        spanning = (cover.begin <= worst) & (cover.own_need > worst) & cover.droppable
        moves = [(row, False) for row in np.flatnonzero(spanning & ~dropped).tolist()]
        moves += [
            (row, True) for row in np.flatnonzero(spanning & dropped & ~dropped_twice).tolist()
        ]
        found: tuple[float, int, bool, Evaluation] | None = None
        for row, second in moves:
            if evaluator.work >= most_work:
                break
            mask = dropped_twice if second else dropped
            mask[row] = True
            evaluation = evaluator.evaluate(dropped, dropped_twice, choice.swapped)
            mask[row] = False
            gained = best.area - evaluation.area
            if gained > 0:
                score = (max(evaluation.seconds - best.seconds, 0) + EPSILON_S) / gained
                if found is None or score < found[0]:
                    found = (score, row, second, evaluation)
        if found is None:
            tried_in_vain[worst] = True
            continue
        (dropped_twice if found[2] else dropped)[found[1]] = True
        choice.evaluation = found[3]
        tried_in_vain = beyond_help(cover, dropped, dropped_twice)


def beyond_help(cover: GreedyCover, dropped: Mask, dropped_twice: Mask) -> Mask:
    """Return the ops at which no further drop makes room; below the lower bound that can be nearly all of a step."""
    movable = cover.droppable & ~(dropped & dropped_twice)
    n_ops = cover.graph.n_ops
    opened = np.bincount(cover.begin[movable], minlength=n_ops + 1)
    closed = np.bincount(cover.own_need[movable], minlength=n_ops + 1)
    return np.asarray(np.cumsum(opened - closed)[:n_ops] == 0)


def take_back(evaluator: Evaluator, choice: Evictions, most_work: int) -> None:
    """Take back, dearest first, what is not needed for the excess to be as small as it is."""
    dropped, dropped_twice = choice.dropped, choice.dropped_twice
    order = np.argsort([-seconds for seconds in evaluator.seconds])
    for mask in (dropped_twice, dropped):
        for row in order.tolist():
            if evaluator.work >= most_work:
                return
            if not mask[row] or (mask is dropped and dropped_twice[row]):
                continue
            mask[row] = False
            evaluation = evaluator.evaluate(dropped, dropped_twice, choice.swapped)
            best = choice.evaluation
            if evaluation.area <= best.area and evaluation.seconds <= best.seconds:
                choice.evaluation = evaluation
            else:
                mask[row] = True

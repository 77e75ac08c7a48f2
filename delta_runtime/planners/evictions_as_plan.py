"""Tells a choice of drops and swaps as a `Plan`: when each value leaves, and when it is back.

Covers the form alone: what is chosen, and what it leads to, is known by then.
"""

from __future__ import annotations

import numpy as np

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Interval, Plan
from delta_runtime.planners.evaluate import Evaluator
from delta_runtime.planners.greedy_drops import GreedyCover
from delta_runtime.planners.repair import Evictions
from delta_runtime.planners.swap_search import prefetch_ops


def plan_of(
    cover: GreedyCover, evaluator: Evaluator, choice: Evictions, *, by_next_use: bool = False
) -> Plan:
    """Turn a choice of drops and swaps into a plan.

    Args:
        cover: of the graph and the budget.
        evaluator: of the same.
        choice: with what it leads to, by that evaluator.
        by_next_use: whether the farthest next use goes first, rather than the fewest seconds a byte.
    """
    graph, budget_bytes = cover.graph, cover.budget_bytes
    ratio = np.array(evaluator.seconds) / np.maximum(graph.saved_bytes, 1)
    weights = np.full(graph.n_values, np.inf)
    weights[graph.saved] = 1.0 if by_next_use else ratio
    dropped_twice = np.zeros(graph.n_values, bool)
    dropped_twice[graph.saved] = choice.dropped_twice
    copy_back = prefetch_ops(evaluator, choice) if choice.swapped.any() else {}
    need = evaluator.needs(choice.dropped)
    spans = evaluator.spans(choice.dropped, choice.swapped) if copy_back else {}
    tick = [*graph.op_tick.tolist(), graph.ticks]
    made_at = graph.op_tick[graph.value_op].tolist()
    intervals: list[list[Interval]] = [[] for _ in range(graph.n_values)]
    for row, value in enumerate(graph.saved.tolist()):
        there = Interval(made_at[value], graph.ticks)
        intervals[value].append(there)
        if choice.dropped[row]:
            leaves, back = tick[cover.begin[row]], int(choice.evaluation.back[row])
            intervals[value] = [there._replace(end=leaves, exit=Exit.DROP)]
            if back >= 0:
                intervals[value].append(Interval(tick[back], graph.ticks))
        elif choice.swapped[row]:
            copies_back = tick[copy_back[row]]
            leaves = min(tick[min(spans[row].begin, graph.n_ops)], copies_back)
            intervals[value] = [
                Interval(made_at[value], leaves, Exit.SWAP, copies_back),
                # What is rebuilt from it may need it before it has left at all.
                Interval(max(tick[need[row]], copies_back), graph.ticks),
            ]
    return Plan.of(
        intervals,
        weights=weights,
        dropped_twice=dropped_twice,
        predicted_seconds=choice.evaluation.seconds,
        predicted_peak_bytes=int(
            budget_bytes + choice.evaluation.excess.max(initial=-budget_bytes)
        ),
    )

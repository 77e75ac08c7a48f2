"""Tells a choice of drops and swaps as a `Plan`: when each value leaves, and when it is back.

Covers the form alone: what is chosen, and what it leads to, is known by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from delta_runtime.core.events import Exit
from delta_runtime.core.interrupts import unhurried
from delta_runtime.core.plan import NEVER, Plan
from delta_runtime.core.step_graph import Ints
from delta_runtime.planners.evaluate import Evaluator
from delta_runtime.planners.greedy_drops import GreedyCover
from delta_runtime.planners.repair import Evictions
from delta_runtime.planners.swap_search import prefetch_ops
from delta_runtime.planners.transfer_schedule import Span


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
    columns = _columns(cover, choice, copy_back, need, spans)
    return Plan(
        interval_offsets=columns.interval_offsets,
        begins=columns.begins,
        ends=columns.ends,
        exits=columns.exits,
        copy_back_at=columns.copy_back_at,
        weights=weights,
        dropped_twice=dropped_twice,
        predicted_seconds=choice.evaluation.seconds,
        predicted_peak_bytes=int(
            budget_bytes + choice.evaluation.excess.max(initial=-budget_bytes)
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Intervals of all values; see `Plan`."""

    interval_offsets: Ints
    begins: Ints
    ends: Ints
    exits: Ints
    copy_back_at: Ints


def _columns(
    cover: GreedyCover,
    choice: Evictions,
    copy_back: Mapping[int, int],
    need: Sequence[int],
    spans: Mapping[int, Span],
) -> _Columns:
    """Return the intervals of all values: two at the most, one from when it is made, and one from when it is back.

    In columns from the beginning: objects for each would have Python look through all objects of the program.
    """
    graph = cover.graph
    tick = np.append(graph.op_tick, graph.ticks)
    n = len(graph.saved)
    ends, back = np.full(n, graph.ticks), np.full(n, NEVER)
    exits, copies = np.full(n, int(Exit.STAYS)), np.full(n, NEVER)
    drops = choice.dropped
    ends[drops], exits[drops] = tick[cover.begin[drops]], Exit.DROP
    asked = drops & (choice.evaluation.back >= 0)
    back[asked] = tick[choice.evaluation.back[asked]]
    for row in unhurried(np.flatnonzero(choice.swapped & ~drops).tolist()):
        copies[row], exits[row] = tick[copy_back[row]], Exit.SWAP
        ends[row] = min(tick[min(spans[row].begin, graph.n_ops)], copies[row])
        # What is rebuilt from it may need it before it has left at all.
        back[row] = max(tick[need[row]], copies[row])
    there = np.stack([np.ones(n, bool), back != NEVER], axis=1)[np.argsort(graph.saved)]

    def column(first: Ints, second: Ints | int) -> Ints:
        both = np.stack(np.broadcast_arrays(first, second), axis=1)[np.argsort(graph.saved)]
        return np.ascontiguousarray(both[there], np.int64)

    counts = np.zeros(graph.n_values, np.int64)
    counts[graph.saved] = 1 + (back != NEVER)
    return _Columns(
        interval_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        begins=column(graph.op_tick[graph.value_op[graph.saved]], back),
        ends=column(ends, graph.ticks),
        exits=column(exits, int(Exit.STAYS)),
        copy_back_at=column(copies, NEVER),
    )

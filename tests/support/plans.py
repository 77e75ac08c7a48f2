"""Plans for recorded steps: such as keep all but what is named, and random ones that the judge accepts."""

from __future__ import annotations

import contextlib

import numpy as np

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import NEVER, Interval, Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.plan_cache import PlanCache
from delta_runtime.planners.validate import InvalidPlan, Verdict, validate

Intervals = list[Interval]


def record_again(cache: PlanCache) -> None:
    """Have the next step of the latest graph logged, and its plan made anew, as where it came to wait for lanes."""
    next(reversed(cache._known.values())).record_again()


def planned(graph: StepGraph, changes: dict[int, Intervals], *, as_written: bool = True) -> Plan:
    """The plan that keeps all of a graph, but for these values."""
    kept = Plan.moving_nothing(graph)
    every = [changes.get(value, each) for value, each in enumerate(kept.intervals())]
    return Plan.of(
        every,
        weights=kept.weights,
        predicted_seconds=0.0,
        predicted_peak_bytes=0,
        as_written=as_written,
    )


def moved(graph: StepGraph, row: int, way: Exit, rng: np.random.Generator) -> Intervals:
    """Intervals of one of `graph.saved`: it leaves at random ticks, and is back when autograd asks for it."""
    value = int(graph.saved[row])
    ticks = np.append(np.unique(graph.op_tick), graph.ticks)
    uses = graph.uses[graph.use_offsets[row] : graph.use_offsets[row + 1]]
    readers = [op for op in range(graph.n_ops) if value in graph.inputs_of(op)]
    held_until = max(
        int(graph.saved_at[row]) + 1,
        int(graph.alone_at[row]),
        *(int(graph.op_tick[op]) + 1 for op in readers if not graph.op_backward[op]),
    )
    found: Intervals = []
    begin, least = int(graph.op_tick[graph.value_op[value]]), held_until
    while len(found) < 3 and rng.random() < 0.8:
        end = int(rng.choice(ticks[ticks >= least])) if (ticks >= least).any() else graph.ticks
        later = uses[uses >= end]
        if not len(later):
            break
        back = int(rng.choice(ticks[(ticks >= end) & (ticks <= later[0])]))
        at = int(rng.choice(ticks[(ticks >= end) & (ticks <= back)])) if way is Exit.SWAP else NEVER
        found.append(Interval(begin, end, way, at))
        begin, least = back, back + 1
    return [*found, Interval(begin, graph.ticks)]


def any_plan(graph: StepGraph, seed: int, links: Links | None) -> tuple[Plan, Verdict]:
    """A random plan that the judge accepts, and what the judge says of it."""
    rng = np.random.default_rng(seed)
    changes: dict[int, Intervals] = {}
    accepted = planned(graph, changes)
    for row in rng.permutation(len(graph.saved)).tolist():
        way = Exit.SWAP if links is not None and rng.random() < 0.5 else Exit.DROP
        more = changes | {int(graph.saved[row]): moved(graph, row, way, rng)}
        tried = planned(graph, more)
        with contextlib.suppress(InvalidPlan):
            validate(tried, graph, links)
            changes, accepted = more, tried
    return accepted, validate(accepted, graph, links)

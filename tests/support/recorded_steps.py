"""The step graphs of real models that lie in tests/planners/recorded, and what the planners choose for them."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path
from typing import Any

from delta_runtime.core.events import Exit
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint_heuristic

FOLDER = Path(__file__).resolve().parent.parent / "planners" / "recorded"
WORKLOADS = ("resnet50", "gpt", "vit")
SHARES = (0.4, 0.55, 0.7)
"""Of the bytes between what persists and the ordinary peak: the budgets."""
LINKS = {
    "drops": (True, None),
    "drops and swaps": (True, Links(2e8, 2e8, store_bytes=1 << 40)),
    "swaps": (False, Links(4e9, 4e9, store_bytes=1 << 40)),
}


def recorded(name: str) -> StepGraph:
    """The record of one workload."""
    return StepGraph.from_json(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()).decode())


def plans_file(name: str) -> Path:
    """Where the plans of one workload lie."""
    return FOLDER / f"{name}_plans.json"


def choices_of(name: str) -> dict[str, Any]:
    """What the joint heuristic chooses for a record: at each budget and with each set of ways out.

    Of each row of `graph.saved` that is dropped: the ops from which it is away and there again, by turns, -1 where it
    is away for good; of each that is swapped: the tick at which its copy back starts.
    """
    graph = recorded(name)
    row = {value: row for row, value in enumerate(graph.saved.tolist())}
    op = {tick: op for op, tick in enumerate(graph.op_tick.tolist())}
    chosen: dict[str, Any] = {}
    for share in SHARES:
        budget_bytes = graph.persistent_bytes + int(
            share * (graph.peak_bytes - graph.persistent_bytes)
        )
        for ways, (drops, links) in LINKS.items():
            plan = joint_heuristic.plan(
                graph, budget_bytes, effort=1.0, drops=drops, links=links, most_work=1_000_000
            )
            dropped, swapped = {}, {}
            for value, intervals in enumerate(plan.intervals()):
                if not intervals:
                    continue
                first, *then = intervals
                if first.exit == Exit.DROP:
                    back = [op[each.begin] for each in then]
                    away = [op[each.end] for each in intervals if each.exit == Exit.DROP]
                    away_and_back = itertools.zip_longest(away, back, fillvalue=-1)
                    dropped[str(row[value])] = [*itertools.chain(*away_and_back)]
                elif first.exit == Exit.SWAP:
                    swapped[str(row[value])] = first.copy_back_at
            chosen[f"{share:.0%}, {ways}"] = {
                "dropped": dropped,
                "swapped": swapped,
                "seconds": float(
                    f"{plan.predicted_seconds:.9g}"
                ),  # sums differ by a bit among processors
                "peak bytes": plan.predicted_peak_bytes,
            }
    return chosen

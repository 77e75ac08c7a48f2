"""The step graphs of real models that lie in tests/planners/recorded, and what the planners choose for them."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from delta_runtime.core.events import Exit
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners.evaluate import Rehearsal
from delta_runtime.planners.greedy_drops import Cover
from delta_runtime.planners.joint_heuristic import foresee
from delta_runtime.planners.transfer_schedule import LaneTimes

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

    Of each row of `graph.saved` that is dropped: the ops from which it is away and there again; of each that is
    swapped: the tick at which its copy back starts.
    """
    graph = recorded(name)
    recipes = recipes_of(graph)
    chosen: dict[str, Any] = {}
    for share in SHARES:
        budget_bytes = graph.persistent_bytes + int(
            share * (graph.peak_bytes - graph.persistent_bytes)
        )
        cover = Cover(graph, budget_bytes, recipes)
        for ways, (drops, links) in LINKS.items():
            plan = foresee(
                graph, budget_bytes, effort=1.0, drops=drops, links=links, most_work=1_000_000
            )
            swapped = plan.exits[graph.saved] == Exit.SWAP
            rehearsal = Rehearsal(cover, LaneTimes(cover, links) if links else None)
            outcome = rehearsal.play(plan.planned, plan.again, swapped)
            chosen[f"{share:.0%}, {ways}"] = {
                "dropped": {
                    str(row): [int(cover.begin[row]), int(outcome.back.get(row, -1))]
                    for row in np.flatnonzero(plan.planned).tolist()
                },
                "swapped": {
                    str(row): int(plan.prefetch_at[graph.saved[row]])
                    for row in np.flatnonzero(swapped).tolist()
                },
                "seconds": float(f"{plan.predicted_seconds:.9g}"),  # sums differ by a bit among processors
                "peak bytes": plan.predicted_peak_bytes,
            }
    return chosen

"""What the plots of the verbs `plan` and `simulate` share: budgets, and what no plan can do better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy is imported where it is needed
    from delta_runtime.core.step_graph import StepGraph
    from delta_runtime.core.transfer import Links
    from delta_runtime.report.plan_plot import Line

_POINTS = 9
BOUNDS = (("drops", False, True), ("copies", True, False), ("drops and copies", True, True))
"""Kinds of plans that a bound is told of: its words, whether it copies, whether it drops."""


def budgets_to_plot(graph: StepGraph) -> list[int]:
    """Return budgets from the least that any plan can hold to the ordinary peak."""
    from delta_runtime.planners.bounds import bounds_of

    low, high = bounds_of(graph).lower_bytes, graph.peak_bytes
    return [low + (high - low) * point // (_POINTS - 1) for point in range(_POINTS)]


def bound_lines(graph: StepGraph, budgets: Sequence[int], links: Links | None) -> list[Line]:
    """Return a line for each kind of plans: below it none of them comes. Points without a solver are left out."""
    from delta_runtime.planners.least_seconds import least_seconds
    from delta_runtime.planners.linear_program import SolverFailed
    from delta_runtime.report.plan_plot import Line

    lines = []
    for name, lanes, drops in BOUNDS:
        if lanes and links is None:
            continue
        points: list[tuple[int, float]] = []
        for budget in budgets:
            try:
                least_s = least_seconds(graph, budget, drops=drops, links=links if lanes else None)
            except (ImportError, SolverFailed):
                continue
            if least_s is not None:
                points.append((budget, 1 + least_s / max(graph.seconds, 1e-12)))
        lines.append(
            Line(
                f"bound: {name}",
                [budget for budget, _ in points],
                [ratio for _, ratio in points],
                bound=True,
            )
        )
    return lines

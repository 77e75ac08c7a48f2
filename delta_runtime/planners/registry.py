"""Every planner by name, with one signature.

Covers what `plan` on the command line, policies and benchmarks choose from. Does not cover what a planner does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.planners import checkmate, chen, joint, joint_heuristic, min_peak, rotor
from delta_runtime.planners.plan_result import PlanResult, judged, result_of
from delta_runtime.planners.presence import Presence


class PlanFunction(Protocol):
    """The signature that all planners share."""

    def __call__(
        self, graph: StepGraph, budget_bytes: int, tiers: Links | None = None, /
    ) -> PlanResult:
        """Return a plan for a recorded step under a budget.

        Args:
            graph: the recorded step.
            budget_bytes: what may be live at any moment.
            tiers: speed of the lanes; None where nothing may be copied.
        """
        ...


@dataclass(frozen=True, slots=True)
class Planner:
    """A planner and what is to be known of it.

    Args:
        plan: the planner itself.
        text: what it does, in a few words.
        copies: whether it does nothing without a lane.
    """

    plan: PlanFunction
    text: str
    copies: bool = False


def _keep(graph: StepGraph, budget_bytes: int, tiers: Links | None = None, /) -> PlanResult:
    begin = time.perf_counter()
    return result_of(judged(Plan.moving_nothing(graph), graph), budget_bytes, begin)


def _drop_all(graph: StepGraph, budget_bytes: int, tiers: Links | None = None, /) -> PlanResult:
    begin = time.perf_counter()
    never = np.zeros((graph.n_ops, len(graph.saved)), bool)
    return result_of(judged(Presence(graph).plan(never), graph), budget_bytes, begin)


def _recompute(graph: StepGraph, budget_bytes: int, tiers: Links | None = None, /) -> PlanResult:
    return joint.plan(graph, budget_bytes)


def _swap(graph: StepGraph, budget_bytes: int, tiers: Links | None = None, /) -> PlanResult:
    begin = time.perf_counter()
    plan = joint_heuristic.plan(graph, budget_bytes, drops=False, links=tiers)
    return result_of(judged(plan, graph, tiers), budget_bytes, begin)


def _min_peak_a(graph: StepGraph, budget_bytes: int, tiers: Links | None = None, /) -> PlanResult:
    return min_peak.plan(graph, budget_bytes, objective="A")


PLANNERS: Mapping[str, Planner] = MappingProxyType(
    {
        "keep": Planner(_keep, "nothing leaves"),
        "drop_all": Planner(_drop_all, "everything leaves whenever nobody asks for it"),
        "recompute": Planner(_recompute, "joint without copies"),
        "swap": Planner(_swap, "copies alone", copies=True),
        "joint": Planner(joint.plan, "drops, and copies where there are lanes"),
        "rotor": Planner(rotor.plan, "the fastest schedule of a chain"),
        "checkmate": Planner(checkmate.plan, "exact on a contracted step"),
        "min_peak": Planner(min_peak.plan, "least-peak checkpoints, objective B"),
        "min_peak_a": Planner(_min_peak_a, "least-peak checkpoints, objective A"),
        "chen": Planner(chen.plan, "checkpoints at even distances"),
    }
)
"""Every planner, by name."""

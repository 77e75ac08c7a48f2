"""Hands the plans of known steps to the session, which carries them out.

Does not cover which plan is handed over (plan_cache), in which form (core/plan_columns), nor how it is carried out
(csrc/walk/plan.h).
"""

from __future__ import annotations

from collections.abc import Iterable

from delta_runtime.core.plan import Plan
from delta_runtime.core.plan_columns import columns_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.extension import _C


def follow(session: _C.Session, plans: Iterable[tuple[StepGraph, Plan]]) -> None:
    """Have the coming steps carried out by these plans, in place of those before.

    Args:
        session: of the runtime.
        plans: a plan for each known graph, latest first. A step follows the first one that begins as it does.

    Raises:
        ValueError: a plan that is not carried out as written moves a value more than once, or a plan does
            not fit its graph; the plans before stay.
    """
    session.set_plans([_C.Plan(**columns_of(graph, plan)) for graph, plan in plans])

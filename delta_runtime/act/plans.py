"""Hands the plans of known steps to the session, which carries them out.

Covers the form that crosses to the extension. Does not cover which plan is handed over (plan_cache), nor how it is
carried out (csrc/walk/plan.h).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from delta_runtime.core.plan import Plan
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
    session.set_plans([_crossing(graph, plan) for graph, plan in plans])


def _crossing(graph: StepGraph, plan: Plan) -> _C.Plan:
    by_value = np.argsort(graph.saved, kind="stable")
    counts = np.zeros(graph.n_values + 1, np.int64)
    counts[graph.saved + 1] = np.diff(graph.use_offsets)
    uses = [graph.uses[graph.use_offsets[row] : graph.use_offsets[row + 1]] for row in by_value]
    return _C.Plan(
        fingerprints=np.ascontiguousarray(graph.value_fingerprint),
        weights=plan.weights,
        use_offsets=np.cumsum(counts),
        uses=np.concatenate([np.empty(0, np.int64), *uses]),
        dropped_twice=plan.dropped_twice.astype(np.int8),
        interval_offsets=plan.interval_offsets,
        begins=plan.begins,
        ends=plan.ends,
        exits=plan.exits,
        copy_back_at=plan.copy_back_at,
        as_written=plan.as_written,
    )

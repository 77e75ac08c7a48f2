"""A plan in the form that crosses to the extension: columns over all values of its graph, with their uses.

Covers the form alone. The runtime hands it to its session (act/plans), the simulator to its virtual device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph


def columns_of(graph: StepGraph, plan: Plan) -> dict[str, Any]:
    """Return the arguments of the extension's `Plan`; csrc/walk/plan.h says what they mean.

    Args:
        graph: the recorded step.
        plan: for it.
    """
    by_value = np.argsort(graph.saved, kind="stable")
    counts = np.zeros(graph.n_values + 1, np.int64)
    counts[graph.saved + 1] = np.diff(graph.use_offsets)
    uses = [graph.uses[graph.use_offsets[row] : graph.use_offsets[row + 1]] for row in by_value]
    op_names, maker_of_op = np.unique(np.array(graph.op_name, object), return_inverse=True)
    return {
        "fingerprints": np.ascontiguousarray(graph.value_fingerprint),
        "op_names": op_names.tolist(),
        "makers": maker_of_op.astype(np.int64)[graph.value_op],
        "bytes": graph.value_bytes,
        "weights": plan.weights,
        "use_offsets": np.cumsum(counts),
        "uses": np.concatenate([np.empty(0, np.int64), *uses]),
        "dropped_twice": plan.dropped_twice.astype(np.int8),
        "interval_offsets": plan.interval_offsets,
        "begins": plan.begins,
        "ends": plan.ends,
        "exits": plan.exits,
        "copy_back_at": plan.copy_back_at,
        "as_written": plan.as_written,
    }

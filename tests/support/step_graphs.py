"""Made-up step graphs, for planners to work on without a model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from delta_runtime.core.step_graph import StepGraph


def chain(
    value_bytes: Sequence[int],
    seconds: Sequence[float],
    *,
    names: Sequence[str] | None = None,
    replay_seconds: Sequence[float] | None = None,
    persistent_bytes: int = 0,
) -> StepGraph:
    """A chain of ops, each of which reads the value of the one before; backward asks in the opposite order.

    Args:
        value_bytes: of what each op makes; all of it is saved.
        seconds: of each op in forward.
        names: of the ops; all "op" if not given.
        replay_seconds: measured when the ops ran again; nan where they did not.
        persistent_bytes: live all the time.
    """
    n = len(value_bytes)
    sizes = np.array(value_bytes, dtype=np.int64)
    ticks = 2 * n + 1
    before = np.concatenate([[0], np.cumsum(sizes)])
    forward_live = before[:n]
    backward_live = before[n:0:-1]
    uses_in_order = np.arange(2 * n - 2, n - 2, -1)  # one tick before the op that asks begins
    return StepGraph(
        fingerprint=n,
        op_name=(*(names or ["op"] * n), *["backward"] * n),
        op_tick=np.arange(2 * n, dtype=np.int64),
        op_seconds=np.concatenate([seconds, np.full(n, 1e-3)]).astype(np.float64),
        op_replay_seconds=np.concatenate(
            [np.full(n, np.nan) if replay_seconds is None else replay_seconds, np.full(n, np.nan)]
        ).astype(np.float64),
        op_watermark_bytes=np.concatenate([sizes, np.zeros(n, np.int64)]),
        op_ordinary_bytes=persistent_bytes + np.concatenate([forward_live, backward_live]),
        op_backward=np.arange(2 * n) >= n,
        op_managed_input_bytes=np.zeros(2 * n, np.int64),
        input_offsets=np.concatenate([[0], np.arange(n), np.full(n, n - 1)]).astype(np.int64),
        inputs=np.arange(n - 1, dtype=np.int64),
        value_op=np.arange(n, dtype=np.int64),
        value_bytes=sizes,
        value_fingerprint=np.arange(n, dtype=np.uint64),
        value_repeats=np.ones(n, dtype=bool),
        saved=np.arange(n, dtype=np.int64),
        saved_at=np.arange(n, dtype=np.int64),
        alone_at=np.arange(2, n + 2, dtype=np.int64),
        released_at=uses_in_order + 1,
        use_offsets=np.arange(n + 1, dtype=np.int64),
        uses=uses_in_order.astype(np.int64),
        ticks=ticks,
        persistent_bytes=persistent_bytes,
    )

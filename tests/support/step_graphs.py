"""Made-up step graphs, for planners to work on without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True)
class Op:
    """An op of a made-up forward.

    Args:
        reads: values that it reads, by number; values are numbered in the order in which they are made.
        makes: bytes of each value that it makes.
        saves: values that autograd saves for its backward.
        seconds: that it takes.
        workspace_bytes: that it holds while it runs, beside what it makes.
        in_place: whether what it makes lies where the first value was that it reads.
        repeats: whether it makes the same again.
        asked: whether backward comes to it; else what it saved goes when forward ends.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    saves: tuple[int, ...]
    seconds: float = 1e-2
    workspace_bytes: int = 0
    in_place: bool = False
    repeats: bool = True
    asked: bool = True


def step_graph(ops: Sequence[Op], *, persistent_bytes: int = 0) -> StepGraph:
    """The record of these ops, and of one backward op for each that saved something, in the opposite order.

    A value lives until forward has read it last, or, where it is saved, until backward has.
    """
    n = len(ops)
    value_op = [index for index, op in enumerate(ops) for _ in op.makes]
    sizes = [size for op in ops for size in op.makes]
    nodes = [
        index for index in reversed(range(n)) if ops[index].saves and ops[index].asked
    ]  # backward ops n, n + 1, ...
    total = n + len(nodes)
    saved = sorted({value for op in ops for value in op.saves})
    saved_at = [min(i for i, op in enumerate(ops) if value in op.saves) for value in saved]
    uses = [
        [n + k - 1 for k, index in enumerate(nodes) if value in ops[index].saves] for value in saved
    ]
    last_read = [
        max([value_op[v], *(i for i, op in enumerate(ops) if v in op.reads)])
        for v in range(len(sizes))
    ]
    last = list(last_read)
    for value, asked in zip(saved, uses, strict=True):
        last[value] = max([*asked, n - 2]) + 1
    overwritten = {op.reads[0]: index for index, op in enumerate(ops) if op.in_place}
    live = np.full(total, persistent_bytes, np.int64)
    for value, size in enumerate(sizes):
        live[value_op[value] + 1 : min(last[value], overwritten.get(value, total)) + 1] += size
    made = [0 if op.in_place else sum(op.makes) for op in ops]
    workspace = [op.workspace_bytes for op in ops]
    reads = [list(op.reads) for op in ops] + [[] for _ in nodes]
    return StepGraph(
        fingerprint=n,
        op_name=(*["op"] * n, *["backward"] * len(nodes)),
        op_tick=np.arange(total, dtype=np.int64),
        op_seconds=np.array([op.seconds for op in ops] + [1e-2] * len(nodes)),
        op_replay_seconds=np.full(total, np.nan),
        op_watermark_bytes=np.array(
            [a + b for a, b in zip(made, workspace, strict=True)] + [0] * len(nodes), np.int64
        ),
        op_ordinary_bytes=live,
        op_backward=np.arange(total) >= n,
        op_managed_input_bytes=np.zeros(total, np.int64),
        input_offsets=np.cumsum([0, *(len(each) for each in reads)]).astype(np.int64),
        inputs=np.array([value for each in reads for value in each], np.int64),
        value_op=np.array(value_op, np.int64),
        value_bytes=np.array(sizes, np.int64),
        value_fingerprint=np.arange(len(sizes), dtype=np.uint64),
        value_repeats=np.array([ops[index].repeats for index in value_op], bool),
        saved=np.array(saved, np.int64),
        saved_at=np.array(saved_at, np.int64),
        alone_at=np.array([last_read[value] + 1 for value in saved], np.int64),
        released_at=np.array([last[value] for value in saved], np.int64),
        use_offsets=np.cumsum([0, *(len(asked) for asked in uses)]).astype(np.int64),
        uses=np.array([tick for asked in uses for tick in asked], np.int64),
        ticks=total + 1,
        persistent_bytes=persistent_bytes,
    )


MIB = 1024**2


def asked_for_again(graph: StepGraph, row: int, tick: int) -> StepGraph:
    """Return a graph in which a row of `saved` is asked for at one more tick, before all others."""
    begin = int(graph.use_offsets[row])
    later = np.arange(len(graph.use_offsets)) > row
    return replace(
        graph,
        uses=np.insert(graph.uses, begin, tick),
        use_offsets=graph.use_offsets + later.astype(np.int64),
    )


TINY = {
    "chain": step_graph(
        [Op((), (8 * MIB,), (0,))] + [Op((i - 1,), (8 * MIB,), (i,)) for i in range(1, 8)]
    ),
    "diamond": step_graph(
        [
            Op((), (8 * MIB,), (0,)),
            Op((0,), (8 * MIB,), (1,)),
            Op((0,), (8 * MIB,), (2,)),
            Op((1, 2), (8 * MIB,), (3,)),
            Op((3,), (8 * MIB,), (4,)),
        ]
    ),
    "residual": step_graph(
        [
            Op((), (8 * MIB,), (0,)),
            Op((0,), (16 * MIB,), (1,), workspace_bytes=4 * MIB),
            Op((1,), (8 * MIB,), ()),
            Op((0, 2), (8 * MIB,), (3,)),
            Op((3,), (16 * MIB,), (4,)),
            Op((4,), (8 * MIB,), ()),
            Op((3, 5), (8 * MIB,), (6,)),
        ]
    ),
    "shared storage": step_graph(  # two ops save views of one value
        [
            Op((), (16 * MIB,), (0,)),
            Op((0,), (8 * MIB,), (0, 1)),
            Op((1,), (8 * MIB,), (1, 2)),
            Op((2,), (8 * MIB,), (2, 3)),
        ]
    ),
    "in place": step_graph(
        [
            Op((), (8 * MIB,), (0,)),
            Op((0,), (8 * MIB,), ()),
            Op((1,), (8 * MIB,), (2,), in_place=True),
            Op((2,), (8 * MIB,), ()),
            Op((3,), (8 * MIB,), (4,), in_place=True),
            Op((4,), (8 * MIB,), (5,)),
        ]
    ),
    "multi-output": step_graph(
        [
            Op((), (8 * MIB,), (0,)),
            Op((0,), (8 * MIB, 4 * MIB, 1 * MIB), (1, 2, 3)),
            Op((1, 2), (8 * MIB,), (4,)),
            Op((4,), (8 * MIB, 2 * MIB), (5, 6)),
            Op((5,), (8 * MIB,), (7,)),
        ]
    ),
    "one giant": step_graph(
        [
            Op((), (2 * MIB,), (0,)),
            Op((0,), (64 * MIB,), (1,)),
            Op((1,), (2 * MIB,), (2,)),
            Op((2,), (2 * MIB,), (3,)),
            Op((3,), (2 * MIB,), (4,)),
        ]
    ),
    "what does not repeat": step_graph(
        [
            Op((), (8 * MIB,), (0,)),
            Op((0,), (8 * MIB,), (1,), repeats=False),
            Op((1,), (8 * MIB,), (2,)),
            Op((2,), (8 * MIB,), (3,)),
        ]
    ),
}
"""Graphs of a few ops, each with one thing that planners trip over."""

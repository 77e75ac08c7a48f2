"""Reads the log of a step from the extension and makes a `StepGraph` of it.

The row layouts are those of `LoggedOp` and `LoggedValue` in csrc/state/session.h.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from delta_runtime.core.events import EVENT_DTYPE, EventKind, Events
from delta_runtime.core.step_graph import StepGraph

LOGGED_OP_DTYPE = np.dtype(
    [
        ("fingerprint", "<u8"),
        ("name_hash", "<u8"),
        ("tick", "<i8"),
        ("live_bytes", "<i8"),
        ("dropped_bytes", "<i8"),
        ("watermark_bytes", "<i8"),
        ("input_bytes", "<i8"),
        ("seconds", "<f8"),
        ("phase", "<i8"),
        ("first_input", "<i4"),
        ("n_inputs", "<i4"),
        ("first_output", "<i4"),
        ("n_outputs", "<i4"),
    ]
)
LOGGED_VALUE_DTYPE = np.dtype([("key", "<i8"), ("bytes", "<i8"), ("repeats", "<i8")])

_OF_A_VALUE = (
    EventKind.PACKED,
    EventKind.DROPPED,
    EventKind.USED,
    EventKind.RELEASED,
    EventKind.ALONE,
)  # the kinds whose key is that of what the page holds


def drain_events(session: Any) -> Events:
    """Take the events that piled up since the last call out of the session."""
    return np.frombuffer(session.drain_events(), dtype=EVENT_DTYPE)


def read_step_graph(session: Any, events: Events) -> StepGraph | None:
    """Make the graph of the step that the session logged last.

    Args:
        session: the extension's session; logging was on from the step's begin to its end.
        events: all events of the step, in order.

    Returns:
        The graph; None where the log is not whole (no op, or values missing).
    """
    ops = np.frombuffer(session.logged_ops(), dtype=LOGGED_OP_DTYPE)
    inputs = np.frombuffer(session.logged_inputs(), dtype=np.int64)
    values = np.frombuffer(session.logged_outputs(), dtype=LOGGED_VALUE_DTYPE)
    if len(ops) == 0 or not np.array_equal(values["key"], np.arange(len(values))):
        return None
    names = session.logged_names()
    begin = session.step_begin_tick()
    ticks = int(session.tick()) - begin + 1

    value_op = np.zeros(len(values), dtype=np.int64)
    for op in np.flatnonzero(ops["n_outputs"]):
        first = ops["first_output"][op]
        value_op[first : first + ops["n_outputs"][op]] = op

    kinds = events["kind"]
    packed = events[(kinds == EventKind.PACKED) & (events["tick"] >= begin)]
    packed = packed[(packed["key"] >= 0) & (packed["key"] < len(values))]
    # What was written in place after it was saved (another part of its storage) is a later value by
    # the time it is used.
    page, page_row = np.unique(packed["page"], return_index=True)
    page_key = packed["key"][page_row]
    known = events[np.isin(kinds, _OF_A_VALUE) & np.isin(events["page"], page)]
    known = known[(known["key"] >= 0) & (known["key"] < len(values)) & (known["tick"] >= begin)]
    page_key[np.searchsorted(page, known["page"])] = known["key"]  # the last of a page wins
    packed_key = page_key[np.searchsorted(page, packed["page"])]
    # A value whose tickets all went and that was saved again has two pages; the first stands for both.
    saved, first_rows = np.unique(packed_key, return_index=True)
    order = np.argsort(first_rows, kind="stable")
    saved, first_rows = saved[order], first_rows[order]
    place = np.full(len(values), -1, dtype=np.int64)
    place[saved] = np.arange(len(saved))

    def ticks_of(kind: EventKind) -> tuple[Any, Any]:
        rows = events[(kinds == kind) & (events["tick"] >= begin) & np.isin(events["page"], page)]
        return place[page_key[np.searchsorted(page, rows["page"])]], rows["tick"] - begin

    value_fingerprint = ops["fingerprint"][value_op]
    replayed = events[(kinds == EventKind.REPLAYED) & (events["tick"] >= begin)]
    replayed = replayed[(replayed["key"] >= 0) & (replayed["key"] < len(values))]
    replay_seconds = np.full(len(ops), np.inf)
    np.minimum.at(replay_seconds, value_op[replayed["key"]], replayed["seconds"])
    replay_seconds[np.isinf(replay_seconds)] = np.nan

    alone_at = np.full(len(saved), ticks, dtype=np.int64)
    at, when = ticks_of(EventKind.ALONE)
    alone_at[at] = when
    released_at = np.full(len(saved), ticks, dtype=np.int64)
    at, when = ticks_of(EventKind.RELEASED)
    released_at[at] = when
    at, when = ticks_of(EventKind.USED)
    by_page = np.lexsort((when, at))
    use_offsets = np.zeros(len(saved) + 1, dtype=np.int64)
    np.cumsum(np.bincount(at, minlength=len(saved)), out=use_offsets[1:])

    return StepGraph(
        fingerprint=int(session.fingerprint()),
        op_name=tuple(names.get(int(h), "?") for h in ops["name_hash"]),
        op_tick=ops["tick"] - begin,
        op_seconds=ops["seconds"].copy(),
        op_replay_seconds=replay_seconds,
        op_watermark_bytes=ops["watermark_bytes"].copy(),
        op_ordinary_bytes=ops["live_bytes"] + ops["dropped_bytes"],
        op_backward=ops["phase"] == 1,
        op_managed_input_bytes=ops["input_bytes"].copy(),
        input_offsets=np.append(ops["first_input"], len(inputs)).astype(np.int64),
        inputs=inputs.copy(),
        value_op=value_op,
        value_bytes=values["bytes"].copy(),
        value_fingerprint=value_fingerprint,
        value_repeats=values["repeats"] != 0,
        saved=saved.astype(np.int64),
        saved_at=(packed["tick"][first_rows] - begin).astype(np.int64),
        alone_at=alone_at,
        released_at=released_at,
        use_offsets=use_offsets,
        uses=when[by_page].astype(np.int64),
        ticks=ticks,
        persistent_bytes=int(ops["live_bytes"][0]),
        cloned_bytes=int(session.cloned_bytes()),
    )

"""Reads the log of a step from the extension and makes a `StepGraph` of it.

The row layouts are those of `LoggedOp` and `LoggedValue` in csrc/util/rows.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from delta_runtime.core.events import EVENT_DTYPE, EventKind, Events
from delta_runtime.core.step_graph import Floats, Ints, OpWork, StepGraph

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
        ("flops", "<f8"),
        ("moved_bytes", "<i8"),
        ("dtype", "<i4"),
        ("phase", "<i4"),
        ("first_input", "<i4"),
        ("n_inputs", "<i4"),
        ("first_output", "<i4"),
        ("n_outputs", "<i4"),
    ]
)
LOGGED_VALUE_DTYPE = np.dtype([("key", "<i8"), ("bytes", "<i8"), ("repeats", "<i8")])

_DTYPES: Mapping[int, str] = MappingProxyType(
    {
        **dict(enumerate(("uint8", "int8", "int16", "int32", "int64"))),
        **dict(enumerate(("float16", "float32", "float64"), start=5)),
        **dict(enumerate(("complex32", "complex64", "complex128", "bool"), start=8)),
        15: "bfloat16",
    }
)
"""Names of dtypes, by the numbers that C++ has for them; of others there is no name here."""

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
    saved = _Saved.of(events[events["tick"] >= begin], begin, len(values))
    use_offsets, uses = saved.uses()
    return StepGraph(
        fingerprint=int(session.fingerprint()),
        op_name=tuple(names.get(int(h), "?") for h in ops["name_hash"]),
        op_tick=ops["tick"] - begin,
        op_seconds=ops["seconds"].copy(),
        op_replay_seconds=_replay_seconds(saved.events, value_op, len(ops)),
        op_watermark_bytes=ops["watermark_bytes"].copy(),
        op_ordinary_bytes=ops["live_bytes"] + ops["dropped_bytes"],
        op_backward=ops["phase"] == 1,
        op_managed_input_bytes=ops["input_bytes"].copy(),
        input_offsets=np.append(ops["first_input"], len(inputs)).astype(np.int64),
        inputs=inputs.copy(),
        value_op=value_op,
        value_bytes=values["bytes"].copy(),
        value_fingerprint=ops["fingerprint"][value_op],
        value_repeats=values["repeats"] != 0,
        saved=saved.values,
        saved_at=saved.saved_at,
        alone_at=saved.last_tick(EventKind.ALONE, ticks),
        released_at=saved.released_at(ticks),
        use_offsets=use_offsets,
        uses=uses,
        ticks=ticks,
        persistent_bytes=int(ops["live_bytes"][0]),
        cloned_bytes=int(session.cloned_bytes()),
        work=OpWork(
            flops=ops["flops"].copy(),
            moved_bytes=ops["moved_bytes"].copy(),
            dtype=tuple(_DTYPES.get(code, "") for code in ops["dtype"].tolist()),
        ),
    )


def _replay_seconds(events: Events, value_op: Ints, n_ops: int) -> Floats:
    """For each op the least seconds in which it ran again; nan where it did not."""
    replayed = events[events["kind"] == EventKind.REPLAYED]
    replayed = replayed[(replayed["key"] >= 0) & (replayed["key"] < len(value_op))]
    seconds = np.full(n_ops, np.inf)
    np.minimum.at(seconds, value_op[replayed["key"]], replayed["seconds"])
    seconds[np.isinf(seconds)] = np.nan
    return seconds


@dataclass(frozen=True, eq=False)
class _Saved:
    """What events say of the values that a step saved.

    Args:
        events: of the step.
        begin: its first tick.
        values: their numbers, in the order in which they were saved.
        saved_at: tick at which each was.
        pages: the pages that they lay in, in order.
        rows: the value of each page, as an index into `values`.
    """

    events: Events
    begin: int
    values: Ints
    saved_at: Ints
    pages: Ints
    rows: Ints

    @classmethod
    def of(cls, events: Events, begin: int, n_values: int) -> _Saved:
        kinds = events["kind"]
        packed = events[kinds == EventKind.PACKED]
        packed = packed[(packed["key"] >= 0) & (packed["key"] < n_values)]
        # What was written in place after it was saved (another part of its storage) is a later value by
        # the time it is used.
        pages, page_row = np.unique(packed["page"], return_index=True)
        page_key = packed["key"][page_row]
        known = events[np.isin(kinds, _OF_A_VALUE) & np.isin(events["page"], pages)]
        known = known[(known["key"] >= 0) & (known["key"] < n_values)]
        page_key[np.searchsorted(pages, known["page"])] = known["key"]  # the last of a page wins
        packed_key = page_key[np.searchsorted(pages, packed["page"])]
        # A value whose tickets all went and that was saved again has two pages; the first stands for both.
        keys, first_rows = np.unique(packed_key, return_index=True)
        order = np.argsort(first_rows, kind="stable")
        keys, first_rows = keys[order], first_rows[order]
        place = np.full(n_values, -1, dtype=np.int64)
        place[keys] = np.arange(len(keys))
        return cls(
            events=events,
            begin=begin,
            values=keys.astype(np.int64),
            saved_at=(packed["tick"][first_rows] - begin).astype(np.int64),
            pages=pages,
            rows=place[page_key],
        )

    def _ticks_of(self, kind: EventKind) -> tuple[Ints, Ints]:
        """Return the value, and the tick within the step, of each event of a kind."""
        is_one = (self.events["kind"] == kind) & np.isin(self.events["page"], self.pages)
        rows = self.events[is_one]
        ticks: Ints = rows["tick"] - self.begin
        return self.rows[np.searchsorted(self.pages, rows["page"])], ticks

    def last_tick(self, kind: EventKind, otherwise: int) -> Ints:
        """For each value when an event of a kind came last; `otherwise` where none did."""
        ticks = np.full(len(self.values), otherwise, dtype=np.int64)
        at, when = self._ticks_of(kind)
        ticks[at] = when
        return ticks

    def released_at(self, otherwise: int) -> Ints:
        """For each value when the last of its pages was released; `otherwise` where one was not."""
        n = len(self.values)
        released = np.bincount(self._ticks_of(EventKind.RELEASED)[0], minlength=n)
        is_held = released < np.bincount(self.rows, minlength=n)
        return np.where(is_held, otherwise, self.last_tick(EventKind.RELEASED, otherwise))

    def uses(self) -> tuple[Ints, Ints]:
        """Return the ticks at which autograd asked for each value: CSR offsets, and the ticks."""
        at, when = self._ticks_of(EventKind.USED)
        offsets = np.zeros(len(self.values) + 1, dtype=np.int64)
        np.cumsum(np.bincount(at, minlength=len(self.values)), out=offsets[1:])
        return offsets, when[np.lexsort((when, at))].astype(np.int64)

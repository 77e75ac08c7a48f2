"""The trace of a run: ops, rebuilds and copies on a clock, with what is live, dropped and swapped out.

In the format of Chrome's tracing (JSON), which Perfetto (https://ui.perfetto.dev) and chrome://tracing
show: one track each for compute, recomputation, the lane out and the lane in, and counters of memory.
"""

from __future__ import annotations

import enum
import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_runtime.core.errors import UsageError
from delta_runtime.core.events import TRACE_DTYPE

MOST_STEPS = 20
"""Steps that a trace holds: the last ones."""


class TraceKind(enum.IntEnum):
    """What took time."""

    OP = 0
    REBUILD = 1
    COPY_OUT = 2
    COPY_IN = 3


_TRACKS: Mapping[TraceKind, str] = {
    TraceKind.OP: "compute",
    TraceKind.REBUILD: "recompute",
    TraceKind.COPY_OUT: "lane out",
    TraceKind.COPY_IN: "lane in",
}


class Trace:
    """Collects the rows of the last steps and writes them to a file.

    Args:
        path: of the file. Its folder must be there; an older file is overwritten, when `write` runs.

    Raises:
        UsageError: there is no such folder.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        if not self._path.resolve().parent.is_dir():
            raise UsageError(
                "trace: there is no such folder.",
                asked=str(self._path),
                change=f"Make {self._path.resolve().parent} first.",
            )
        self._steps: deque[npt.NDArray[Any]] = deque(maxlen=MOST_STEPS)

    def add_step(self, rows: npt.NDArray[Any]) -> None:
        """Take the rows of one step in, of TRACE_DTYPE; the oldest step goes when there are too many."""
        self._steps.append(rows)

    def write(self, names: Mapping[int, str]) -> None:
        """Write the file.

        Args:
            names: of ops, by the hash in their rows.
        """
        rows = np.concatenate([np.empty(0, TRACE_DTYPE), *self._steps])
        self._path.write_text(json.dumps(chrome_trace(rows, names)))


def chrome_trace(rows: npt.NDArray[Any], names: Mapping[int, str]) -> dict[str, Any]:
    """Return rows of TRACE_DTYPE as a trace that Chrome and Perfetto read.

    Args:
        rows: in any order.
        names: of ops, by the hash in their rows.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": int(kind), "name": "thread_name", "args": {"name": track}}
        for kind, track in _TRACKS.items()
    ]
    start_s = float(rows["begin_s"].min()) if len(rows) else 0.0
    for row in rows:
        kind = TraceKind(int(row["kind"]))
        begin_us = (float(row["begin_s"]) - start_s) * 1e6
        length_us = (float(row["end_s"]) - float(row["begin_s"])) * 1e6
        if kind is TraceKind.OP:
            name = names.get(int(row["name"]), "?")
            counted = {
                "live": int(row["bytes"]),
                "dropped": int(row["dropped_bytes"]),
                "swapped out": int(row["swapped_bytes"]),
            }
            events.append(
                {"ph": "C", "pid": 1, "ts": begin_us + length_us, "name": "bytes", "args": counted}
            )
            args: dict[str, Any] = {}
        else:
            name = f"{_TRACKS[kind]} {np.int64(row['name'])}"
            args = {"bytes": int(row["bytes"])}
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": int(kind),
                "ts": begin_us,
                "dur": length_us,
                "name": name,
                "args": args,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}

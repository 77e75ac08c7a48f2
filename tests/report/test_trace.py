"""The trace: what a file holds, and that it shows copies under compute."""

from __future__ import annotations

import json

import numpy as np
import pytest

from delta_runtime.core.errors import UsageError
from delta_runtime.core.events import TRACE_DTYPE
from delta_runtime.report.trace import MOST_STEPS, Trace, TraceKind, chrome_trace


def rows(*each: tuple) -> np.ndarray:
    return np.array(list(each), dtype=TRACE_DTYPE)


def test_events_and_counters():
    trace = chrome_trace(
        rows(
            (TraceKind.OP, 7, 100, 20, 30, 5.0, 5.5),
            (TraceKind.COPY_IN, 3, 64, 0, 0, 5.1, 5.2),
            (TraceKind.REBUILD, np.uint64(2**64 - 1), 64, 0, 0, 5.5, 5.75),
        ),
        {7: "aten::mm"},
    )
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == ["aten::mm", "lane in 3", "recompute -1"]
    assert [event["ts"] for event in events] == pytest.approx([0, 1e5, 5e5])
    assert [event["dur"] for event in events] == pytest.approx([5e5, 1e5, 2.5e5])
    (counter,) = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert counter["args"] == {"live": 100, "dropped": 20, "swapped out": 30}
    tracks = [event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"]
    assert tracks == ["compute", "recompute", "lane out", "lane in"]


def test_an_empty_trace_is_a_trace():
    assert json.loads(json.dumps(chrome_trace(rows(), {})))["traceEvents"]


def test_the_last_steps_are_kept(tmp_path):
    trace = Trace(str(tmp_path / "trace.json"))
    for step in range(MOST_STEPS + 5):
        trace.add_step(rows((TraceKind.OP, step, 0, 0, 0, step, step + 0.5)))
    trace.write({step: f"op {step}" for step in range(MOST_STEPS + 5)})
    found = json.loads((tmp_path / "trace.json").read_text())
    names = [event["name"] for event in found["traceEvents"] if event["ph"] == "X"]
    assert names == [f"op {step}" for step in range(5, MOST_STEPS + 5)]


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        Trace(str(tmp_path / "nowhere" / "trace.json"))

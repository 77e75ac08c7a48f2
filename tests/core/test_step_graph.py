"""The JSON of step graphs: read back exactly, and refused where it is not what it says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delta_runtime.core.errors import UsageError
from delta_runtime.core.step_graph import RecordedOn, StepGraph
from tests.support.recorded_steps import WORKLOADS, recorded
from tests.support.step_graphs import TINY


@pytest.mark.parametrize("graph", TINY.values(), ids=TINY)
def test_json_is_read_back_exactly(graph):
    text = graph.to_json()
    assert StepGraph.from_json(text).to_json() == text


@pytest.mark.parametrize("name", WORKLOADS)
def test_json_of_a_real_step_is_read_back_exactly(name):
    text = recorded(name).to_json()
    assert StepGraph.from_json(text).to_json() == text


def _plain() -> dict[str, Any]:
    return json.loads(TINY["diamond"].to_json())


def test_the_machine_is_read_back():
    on = RecordedOn("cuda:0", 4, "2.13.0", 12e9, 11e9)
    plain = {**_plain(), "recorded_on": {**_as_dict(on)}}
    assert StepGraph.from_json(json.dumps(plain)).recorded_on == on


def _as_dict(on: RecordedOn) -> dict[str, Any]:
    names = ("device", "threads", "torch", "out_bytes_per_s", "in_bytes_per_s")
    return {name: getattr(on, name) for name in names}


def test_an_op_within_another_has_its_tick():
    """Autograd clones what an op in place is about to write, and saves the clone; see tests/test_runtime.py."""
    ticks = _plain()["op_tick"]
    text = json.dumps({**_plain(), "op_tick": [*ticks[:4], *ticks[3:-1]]})
    assert StepGraph.from_json(text).op_tick.tolist() == [0, 1, 2, 3, 3, 4, 5, 6, 7, 8]


def test_another_version_is_refused_by_name():
    with pytest.raises(UsageError, match="version 4"):
        StepGraph.from_json(json.dumps({**_plain(), "version": 4}))


@pytest.mark.parametrize(
    "change",
    [
        {"saved": [0, 1]},
        {"saved": [0, 1, 2, 3, 99]},
        {"saved": [0, 0, 1, 2, 3]},
        {"op_seconds": [-1.0] * 10},
        {"op_replay_seconds": [-1.0] * 10},
        {"op_seconds": [None] * 10},
        {"input_offsets": [1] * 11},
        {"inputs": [0, 0, 4, 2, 3]},
        {"value_op": [4, 3, 2, 1, 0]},
        {"value_bytes": ["many"] * 5},
        {"use_offsets": []},
        {"op_tick": [9, *range(9)]},
        {"more": 1},
        {"recorded_on": {"device": "cpu"}},
        {"ticks": None, "op_name": None},
    ],
    ids=lambda change: ", ".join(change),
)
def test_columns_that_do_not_fit_are_refused(change):
    with pytest.raises(UsageError, match="damaged"):
        StepGraph.from_json(json.dumps({**_plain(), **change}))


@pytest.mark.parametrize("column", ["saved", "op_tick", "value_op", "op_name", "recorded_on"])
def test_a_column_that_is_missing_is_named(column):
    plain = _plain()
    del plain[column]
    with pytest.raises(UsageError, match=column):
        StepGraph.from_json(json.dumps(plain))

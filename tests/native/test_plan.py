"""Plans as the session carries them out: what it obeys, and what it refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

from delta_runtime.act.plans import follow
from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Interval, Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.extension import _C
from tests.support.step_graphs import TINY

CHAIN = TINY["chain"]


OF_SHAPES = {
    "op_names": ["aten::tanh"],
    "makers": np.zeros(CHAIN.n_values, np.int64),
    "bytes": CHAIN.value_bytes,
}
"""By which a plan serves steps of the same ops on other shapes."""


class Session:
    """Takes the plans that cross to the extension."""

    def __init__(self) -> None:
        self.plans: list[_C.Plan] = []

    def set_plans(self, plans: list[_C.Plan]) -> None:
        self.plans = plans


def crossing(
    intervals: list[Interval], graph: StepGraph = CHAIN, *, as_written: bool = False
) -> list[_C.Plan]:
    """A plan that moves one value of the graph, in the extension's form."""
    plan = Plan.moving_nothing(graph)
    every = [intervals if value == 1 else kept for value, kept in enumerate(plan.intervals())]
    session = Session()
    moved = Plan.of(
        every,
        weights=plan.weights,
        predicted_seconds=0.0,
        predicted_peak_bytes=0,
        as_written=as_written,
    )
    assert Plan.from_json(moved.to_json()).as_written == as_written
    follow(session, [(graph, moved)])
    return session.plans


@pytest.mark.parametrize(
    "intervals",
    [
        [Interval(1, 17)],
        [Interval(1, 3, Exit.DROP)],
        [Interval(1, 3, Exit.DROP), Interval(13, 17)],
        [Interval(1, 4, Exit.SWAP, 9), Interval(13, 17)],
    ],
)
def test_a_plan_that_moves_each_value_once_is_taken(intervals):
    (plan,) = crossing(intervals)
    assert isinstance(plan, _C.Plan)


@pytest.mark.parametrize(
    ("intervals", "told"),
    [
        (
            [Interval(1, 3, Exit.DROP), Interval(9, 11, Exit.DROP), Interval(13, 17)],
            "moves value 1 out of device memory 2 times",
        ),
        (
            [Interval(1, 3, Exit.DROP), Interval(9, 11, Exit.SWAP)],
            "moves value 1 once more after it came back",
        ),
        ([Interval(1, 3, 5), Interval(9, 17)], "has the exit 5 for value 1"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(intervals, told):
    with pytest.raises(ValueError, match=told):
        crossing(intervals)


@pytest.mark.parametrize(
    "intervals",
    [
        [Interval(1, 17)],
        [Interval(1, 3, Exit.DROP)],
        [Interval(1, 3, Exit.DROP), Interval(9, 11, Exit.DROP), Interval(13, 17)],
        [Interval(1, 4, Exit.SWAP, 9), Interval(9, 11, Exit.SWAP, 11), Interval(13, 17)],
        [Interval(1, 4, Exit.SWAP, 4), Interval(4, 11, Exit.DROP), Interval(11, 12, Exit.SWAP)],
    ],
)
def test_as_written_a_value_has_any_number_of_gaps(intervals):
    (plan,) = crossing(intervals, as_written=True)
    assert isinstance(plan, _C.Plan)


@pytest.mark.parametrize(
    ("intervals", "told"),
    [
        ([Interval(1, 3, 5), Interval(9, 17)], "has the exit 5 for value 1"),
        ([Interval(-1, 17)], r"interval \[-1, 17\) of value 1 out of order"),
        ([Interval(3, 1)], r"interval \[3, 1\) of value 1 out of order"),
        (
            [Interval(1, 9, Exit.DROP), Interval(8, 17)],
            r"interval \[8, 17\) of value 1 out of order",
        ),
        ([Interval(1, 3), Interval(9, 17)], "gap of value 1 behind tick 3 without a way out"),
        ([Interval(1, 3, Exit.SWAP), Interval(9, 17)], "copies value 1 back at tick -1"),
        ([Interval(1, 3, Exit.SWAP, 2), Interval(9, 17)], "copies value 1 back at tick 2, outside"),
        ([Interval(1, 3, Exit.SWAP, 10), Interval(9, 17)], "copies value 1 back at tick 10"),
        ([Interval(1, 3, Exit.DROP, 4), Interval(9, 17)], "copies value 1 back at tick 4"),
        ([Interval(1, 3, Exit.SWAP, 4)], "copies value 1 back at tick 4"),
    ],
)
def test_a_malformed_plan_is_not_carried_out_as_written(intervals, told):
    with pytest.raises(ValueError, match=told):
        crossing(intervals, as_written=True)


def test_a_text_that_does_not_say_so_is_of_a_plan_that_is_not_carried_out_as_written():
    plan = Plan.moving_nothing(CHAIN)
    assert not plan.as_written
    columns = json.loads(plan.to_json())
    del columns["as_written"]
    assert not Plan.from_json(json.dumps(columns)).as_written


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ("weights", "weights for 8 values"),
        ("makers", "makers and 8 sizes"),
        ("bytes", "makers and 7 sizes"),
        ("use_offsets", "uses do not fit"),
        ("uses", "uses do not fit"),
        ("interval_offsets", "intervals do not fit"),
        ("dropped_twice", "different lengths"),
        ("begins", "different lengths"),
        ("ends", "different lengths"),
        ("exits", "intervals do not fit"),
        ("copy_back_at", "different lengths"),
    ],
)
def test_columns_that_do_not_fit_each_other_are_refused(column, told):
    plan = Plan.moving_nothing(CHAIN)
    columns = {
        "fingerprints": CHAIN.value_fingerprint,
        **OF_SHAPES,
        "weights": plan.weights,
        "use_offsets": CHAIN.use_offsets,
        "uses": CHAIN.uses,
        "interval_offsets": plan.interval_offsets,
        "dropped_twice": plan.dropped_twice.astype(np.int8),
        "begins": plan.begins,
        "ends": plan.ends,
        "exits": plan.exits,
        "copy_back_at": plan.copy_back_at,
    }
    _C.Plan(**columns)
    with pytest.raises(ValueError, match=told):
        _C.Plan(**{**columns, column: columns[column][:-1]})


@pytest.mark.parametrize("weights", [np.ones(8, np.float32), np.ones((8, 1)), np.ones(16)[::2]])
def test_a_column_of_another_layout_is_refused(weights):
    plan = Plan.moving_nothing(CHAIN)
    with pytest.raises(ValueError, match="one contiguous row of numbers of 8 bytes"):
        _C.Plan(
            fingerprints=CHAIN.value_fingerprint,
            **OF_SHAPES,
            weights=weights,
            use_offsets=CHAIN.use_offsets,
            uses=CHAIN.uses,
            interval_offsets=plan.interval_offsets,
            dropped_twice=plan.dropped_twice.astype(np.int8),
            begins=plan.begins,
            ends=plan.ends,
            exits=plan.exits,
            copy_back_at=plan.copy_back_at,
        )


def test_offsets_that_go_down_are_refused():
    plan = Plan.moving_nothing(CHAIN)
    offsets = plan.interval_offsets.copy()
    offsets[3], offsets[4] = offsets[4], offsets[3]
    with pytest.raises(ValueError, match="go down at value 3"):
        _C.Plan(
            fingerprints=CHAIN.value_fingerprint,
            **OF_SHAPES,
            weights=plan.weights,
            use_offsets=CHAIN.use_offsets,
            uses=CHAIN.uses,
            interval_offsets=offsets,
            dropped_twice=plan.dropped_twice.astype(np.int8),
            begins=plan.begins,
            ends=plan.ends,
            exits=plan.exits,
            copy_back_at=plan.copy_back_at,
        )


def test_a_plan_takes_its_columns_by_name_alone():
    with pytest.raises(TypeError):
        _C.Plan(*[np.zeros(1, np.int64)] * 10)

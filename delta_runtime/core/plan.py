"""A plan: when each value of a step graph is on the device, and how it crosses the gaps between.

Covers what every planner says of a step, in one form, and its JSON. Does not cover how a plan is found
(planners), whether it is right (planners/validate.py), nor how it is carried out (csrc/evict,
csrc/rebuild/plan_actions.h).

Note: how a plan is read
  1. A value is on the device in its *intervals*. An interval begins at a tick and ends before another.
     What lies between two intervals of one value is a *gap*.
  2. How a value leaves at the end of an interval says how it comes back: dropped, it is rebuilt; swapped,
     it is copied back. An interval that ends with the step ends as soon as the program lets go of the value.
  3. Before the op whose tick begins an interval the value is there. Where it is copied, room for it is
     taken when the copy back starts: at a tick that the plan names.
  4. A rebuild runs from the saved values that are there. What is rebuilt on the way and has no interval
     at that tick goes at once.
  5. A gap may be empty: the value leaves, and is back before anything else happens.
  6. A plan may be carried out *as written*. Then values leave and come back between two ops, at the ticks
     of their intervals, whether room is needed or not, and may have any number of gaps. Else the plan says
     what goes first when room is needed: a value leaves then, in the order of the weights, is back when it
     is asked for, and has one gap at most. In either case more is moved where room is short all the same,
     and a step that goes another way than the recorded one goes on without its plan.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from delta_runtime.core.events import Exit
from delta_runtime.core.step_graph import Floats, Ints, Mask, StepGraph

NEVER = -1
"""The tick of a copy back that there is none of."""


class Interval(NamedTuple):
    """Ticks during which a value is on the device.

    Args:
        begin, end: the first tick, and the one after the last.
        exit: an `Exit`: how the value leaves at the end. STAYS where it does not, before the step ends.
        copy_back_at: the tick at which the copy back starts from the gap behind; NEVER where it is no copy,
            or no interval follows.
    """

    begin: int
    end: int
    exit: int = Exit.STAYS
    copy_back_at: int = NEVER


@dataclass(frozen=True, eq=False)
class Plan:
    """Intervals of residency for the values of one step graph; see the Note above.

    Columns over intervals are in the order of the values, and of time within each; see `Interval`.

    Args:
        interval_offsets: the intervals of each value (CSR over the graph's values). A value without one is
            not for the plan to move: the program lets go of it by itself.
        begins, ends, exits, copy_back_at: of each interval.
        weights: of each value, for what is short of room all the same: the smallest leaves first; inf where
            the plan does not know the value.
        dropped_twice: for each value whether it is in passing only when it is rebuilt before its next interval
            begins, and is dropped again (rule 4): what the intervals say with the recipes beside them, for whoever
            has no recipes.
        predicted_seconds: seconds that rebuilding and waiting are expected to take.
        predicted_peak_bytes: highest live bytes expected; above the budget where none was found that fits.
        as_written: whether the intervals are carried out at the ops that they name (rule 6); else they say what
            leaves first when room is needed.
    """

    interval_offsets: Ints
    begins: Ints
    ends: Ints
    exits: Ints
    copy_back_at: Ints
    weights: Floats
    dropped_twice: Mask
    predicted_seconds: float
    predicted_peak_bytes: int
    as_written: bool = False

    @classmethod
    def of(
        cls,
        intervals: Sequence[Sequence[Interval]],
        *,
        weights: Floats,
        predicted_seconds: float,
        predicted_peak_bytes: int,
        dropped_twice: Mask | None = None,
        as_written: bool = False,
    ) -> Plan:
        """Return a plan with these intervals of each value, in order of the values.

        Args:
            intervals: one sequence for each value of the graph.
            weights, predicted_seconds, predicted_peak_bytes, as_written: see the class.
            dropped_twice: see the class; None where nothing is.
        """
        # One by one: a long call of numpy would keep Python's lock from training.
        numbers = (number for each in intervals for row in each for number in row)
        rows = np.fromiter(numbers, np.int64).reshape(-1, 4)
        counts = [0, *(len(each) for each in intervals)]
        begins, ends, exits, copy_back_at = np.ascontiguousarray(rows.T)
        return cls(
            interval_offsets=np.cumsum(counts, dtype=np.int64),
            begins=begins,
            ends=ends,
            exits=exits,
            copy_back_at=copy_back_at,
            weights=weights,
            dropped_twice=np.zeros(len(weights), bool) if dropped_twice is None else dropped_twice,
            predicted_seconds=predicted_seconds,
            predicted_peak_bytes=predicted_peak_bytes,
            as_written=as_written,
        )

    @classmethod
    def moving_nothing(cls, graph: StepGraph) -> Plan:
        """Return the plan under which all that is saved stays."""
        intervals: list[list[Interval]] = [[] for _ in range(graph.n_values)]
        for value in graph.saved.tolist():
            begin = int(graph.op_tick[graph.value_op[value]])
            intervals[value].append(Interval(begin, graph.ticks))
        return cls.of(
            intervals,
            weights=np.ones(graph.n_values),
            predicted_seconds=0.0,
            predicted_peak_bytes=graph.peak_bytes,
        )

    def intervals(self) -> list[list[Interval]]:
        """Return the intervals of each value."""
        columns = (self.begins, self.ends, self.exits, self.copy_back_at)
        rows = [Interval(*row) for row in zip(*(each.tolist() for each in columns), strict=True)]
        offsets = self.interval_offsets.tolist()
        return [rows[begin:end] for begin, end in zip(offsets, offsets[1:], strict=False)]

    @property
    def n_values(self) -> int:
        """Number of values of the graph that the plan is for."""
        return len(self.interval_offsets) - 1

    def first_exits(self) -> Ints:
        """Return an `Exit` for each value: how it leaves the first time; STAYS where it does not."""
        has_one = np.diff(self.interval_offsets) > 0
        exits = np.full(self.n_values, int(Exit.STAYS), np.int64)
        exits[has_one] = self.exits[self.interval_offsets[:-1][has_one]]
        return exits

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` reads it back exactly."""
        plain: dict[str, Any] = {}
        for field in fields(self):
            content = getattr(self, field.name)
            if isinstance(content, np.ndarray):
                content = [None if each == np.inf else each for each in content.tolist()]
            plain[field.name] = content
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote."""
        columns: dict[str, Any] = json.loads(text)
        for name in ("interval_offsets", "begins", "ends", "exits", "copy_back_at"):
            columns[name] = np.array(columns[name], np.int64)
        columns["dropped_twice"] = np.array(columns["dropped_twice"], bool)
        weights = [np.inf if each is None else each for each in columns["weights"]]
        return cls(**{**columns, "weights": np.array(weights, np.float64)})

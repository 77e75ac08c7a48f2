"""What making dropped values again takes: the seconds of the ops that run, and what they hold for a moment.

Covers one rerun, of a value and of all that it is made from and is not there. Which values these are is said by whoever
asks.

csrc/planners/reruns.cpp does the same.

Note: a rerun (csrc/rebuild/replay.h)
  1. Ops run in the order of the forward, each once, though several of the values need it. Where the plan wants another
     output of an op there too, the runtime keeps it; here the op counts once more when that output is asked for.
  2. What an op makes is held until the last op of the rerun that reads it has run; a saved value that is there, and is
     made again on the way, goes at once.
  3. What stays on the device takes its bytes from when it is made. The caller's level includes all that stays, so
     what is not made yet is taken off. Behind one op there may be several reruns: first of what autograd asks for, in
     an order that nobody knows, then of what is made early, in the order of the values. While one of the first kind
     runs, nothing of the second is there; while one of the second runs, what the next ones make is not there. What an
     op made that ran before, behind the same op of the step, may be there already (rule 1), and is not taken
     off. In a contracted step nothing is: its ops stand for several.
  4. An op holds more while it runs: what its watermark has beyond the bytes that it made. An op that writes in place
     made none: of its workspace as much is missing. The version that it wrote over is counted beside the new one, which
     makes up for that unless it is there already.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from delta_runtime.core import compiled
from delta_runtime.core.interrupts import unhurried
from delta_runtime.core.recipes import Lists, Recipes
from delta_runtime.core.step_graph import Floats, Ints, StepGraph


class Taken(NamedTuple):
    """What a rerun takes.

    Args:
        seconds: of its ops.
        held: the most bytes on the device, beyond those that are there when it has ended.
        kept: bytes of what it leaves there, and reruns before it do not hold; 0 in a contracted step.
        ops: how many run.
    """

    seconds: float
    held: float
    kept: float
    ops: int


class Reruns:
    """The ops of all recipes of a graph, and the values that they make.

    Args:
        graph: the recorded or contracted step.
        recipes: of it.

    Attributes:
        seconds, workspace: of each of these ops, of running again and beyond what it makes.
        makes, reads: for each op values, numbered anew; what no recipe makes is not among them.
        ops: for each saved value the ops of its recipe, numbered anew.
        bytes, row: of each value, and its row in `graph.saved`; -1 where it is not saved.
        takes_off: whether what is not made yet is taken off (rule 3).
    """

    def __init__(self, graph: StepGraph, recipes: Recipes) -> None:
        known = np.unique(np.concatenate([np.empty(0, np.int64), *recipes.ops]))
        made = np.flatnonzero(np.isin(graph.value_op, known))
        number = np.full(graph.n_values, -1)
        number[made] = np.arange(len(made))
        made_bytes = np.bincount(graph.value_op, weights=graph.value_bytes, minlength=graph.n_ops)
        inputs = [number[graph.inputs_of(op)] for op in unhurried(known.tolist())]
        offsets = np.searchsorted(graph.value_op[made], [*known.tolist(), graph.n_ops])
        self.seconds: Floats = graph.rerun_seconds[known]
        self.workspace: Floats = np.maximum(graph.op_watermark_bytes - made_bytes, 0.0)[known]
        self.makes = Lists(offsets.astype(np.int64), np.arange(len(made), dtype=np.int64))
        self.reads = Lists.of([np.unique(each[each >= 0]) for each in unhurried(inputs)])
        self.ops = Lists.of(
            [np.searchsorted(known, np.unique(each)) for each in unhurried(recipes.ops)]
        )
        self.bytes: Floats = graph.value_bytes[made].astype(np.float64)
        row = np.full(graph.n_values, -1, np.int64)
        row[graph.saved] = np.arange(len(graph.saved))
        self.row: Ints = row[made]
        self.takes_off = not graph.contracted
        self._seconds, self._workspace = self.seconds.tolist(), self.workspace.tolist()
        self._makes, self._reads = self.makes.as_lists(), self.reads.as_lists()
        self._ops = self.ops.as_lists()
        self._bytes, self._row = self.bytes.tolist(), self.row.tolist()

    def run(
        self, rows: Sequence[int], stays: Callable[[int], bool], ran: set[int] | None = None
    ) -> Taken:
        """Return what making values again takes.

        Args:
            rows: of `graph.saved`.
            stays: whether one of them stays on the device.
            ran: ops that ran before, behind the same op of the step; those that run now are added.
        """
        ops = sorted({op for row in rows for op in self._ops[row]})
        staying = {row for row in rows if stays(row)}
        passing = self._held(ops, set(rows), staying)
        ran = set() if ran is None else ran
        arrives = [0.0 if op in ran else self._kept_bytes(op, staying) for op in ops]
        ran.update(ops)
        kept = later = sum(arrives)
        most = 0.0
        for held, here in zip(passing, arrives, strict=True):
            later -= here
            most = max(most, held - later)
        return Taken(sum(self._seconds[op] for op in ops), most, kept, len(ops))

    def _kept_bytes(self, op: int, staying: set[int]) -> float:
        if not self.takes_off:
            return 0.0
        made = self._makes[op]
        return float(sum(self._bytes[value] for value in made if self._row[value] in staying))

    def _held(self, ops: Sequence[int], chain: set[int], staying: set[int]) -> list[float]:
        """Return what each of the ops of a rerun holds for a moment, beside what stays.

        Args:
            ops: in order.
            chain: rows of the values that are made.
            staying: those that stay on the device.
        """
        last: dict[int, int] = {}
        for op in ops:
            for value in self._reads[op]:
                if value in last and (self._row[value] < 0 or self._row[value] in chain):
                    last[value] = op
            for value in self._makes[op]:
                last[value] = op
        ends: dict[int, float] = {}
        found = []
        held = 0.0
        for op in ops:
            for value in self._makes[op]:
                if self._row[value] not in staying:
                    held += self._bytes[value]
                    ends[last[value]] = ends.get(last[value], 0.0) + self._bytes[value]
            found.append(held + self._workspace[op])
            held -= ends.pop(op, 0.0)
        return found

    def most_held(self, rows: Sequence[int], stays: Callable[[int], bool]) -> list[float]:
        """Return what the ops of each saved value hold in any rerun, whichever of some values are there already.

        Args:
            rows: of `graph.saved`: what such a rerun may make.
            stays: whether one of them stays on the device.

        Returns:
            For each saved value the most bytes that one of its ops holds for a moment, beside all that stays; 0 where
            no such rerun runs it.
        """
        staying = {row for row in rows if stays(row)}
        needed_by: dict[int, list[int]] = {}
        for row in rows:
            for op in self._ops[row]:
                needed_by.setdefault(op, []).append(row)
        ops = sorted(needed_by)
        held = dict(zip(ops, self._held(ops, set(rows), staying), strict=True))
        for op in ops:
            # What stays and is there is made again beside the one that is not.
            sizes = {self._row[value]: self._bytes[value] for value in self._makes[op]}
            again = {row: size for row, size in sizes.items() if row in staying}
            held[op] += sum(again.values()) - min(again.get(row, 0.0) for row in needed_by[op])
        return [max((held.get(op, 0.0) for op in ops), default=0.0) for ops in self._ops]

    def held_alone(self) -> list[float]:
        """Return what making each saved value again, from what it is rebuilt from, holds beside it."""
        return [
            max(self._held(sorted(ops), {row}, {row}), default=0.0)
            for row, ops in enumerate(self._ops)
        ]

    def in_order_of(self, rows: Ints) -> Reruns:
        """Return the same with other numbers for saved values: their places in `rows`, which holds each once."""
        other = copy.copy(self)
        place = np.argsort(rows)
        other.row = np.where(self.row >= 0, place[self.row], -1)
        other._ops = [self._ops[row] for row in rows.tolist()]
        other.ops, other._row = Lists.of(other._ops), other.row.tolist()
        return other

    def compiled(self) -> Any:
        """Return the same for C++, where the extension was loaded."""
        assert compiled.planners is not None
        return compiled.planners.RerunColumns(
            seconds=self.seconds,
            workspace=self.workspace,
            bytes=self.bytes,
            row=self.row,
            make_offsets=self.makes.offsets,
            makes=self.makes.items,
            read_offsets=self.reads.offsets,
            reads=self.reads.items,
            op_offsets=self.ops.offsets,
            ops=self.ops.items,
            takes_off=self.takes_off,
        )

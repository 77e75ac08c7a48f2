"""Plays a backward pass with a choice of drops and swaps, and mends the choice where it does not fit.

A value that was rebuilt early may be dropped once more until its own use (`dropped_twice`), at the cost of a
second rebuild.

csrc/planners/evaluation.cpp plays alike, faster; it is used where the extension was loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from delta_runtime.core import compiled
from delta_runtime.core.interrupts import give_way
from delta_runtime.core.recipes import rebuild_seconds
from delta_runtime.core.reruns import Reruns
from delta_runtime.core.step_graph import Floats, Ints, Mask
from delta_runtime.planners.greedy_drops import GreedyCover
from delta_runtime.planners.presence import spare_behind
from delta_runtime.planners.transfer_schedule import LaneTimes, Span

WORK_PER_SECOND = 15_000_000
"""Units of work that a slow core does in a second: a use that is played, or a value looked at.

With the extension; without it, it takes ten times as long and more.
"""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What a choice leads to: seconds of rebuilding, and bytes too much at each op.

    Args:
        back: the op from which each dropped value that is asked for is there again; -1 for all others.
    """

    seconds: float
    excess: Floats
    back: Ints

    @cached_property
    def area(self) -> float:
        """Bytes too much, summed over all ops."""
        return float(np.maximum(self.excess, 0).sum())


class Evaluator:
    """Plays backward with a choice, as the runtime would without any further pressure.

    Args:
        cover: of the graph and the budget, with nothing chosen.
        lanes: of the same graph; None where nothing can be swapped.
    """

    def __init__(self, cover: GreedyCover, lanes: LaneTimes | None = None) -> None:
        graph = cover.graph
        self.graph = graph
        self.work = 0  # done in all calls of `play`
        self.bytes = cover.bytes
        self.base = (cover.original_excess).copy()
        self.begin: list[int] = cover.begin.tolist()
        self.made_at = graph.saved.tolist()
        self.own_need = cover.own_need.tolist()
        self.seconds = rebuild_seconds(graph, cover.recipes)
        self.reruns = Reruns(graph, cover.recipes)
        self.spare = spare_behind(graph)
        self.parents = [parents.tolist() for parents in cover.recipes.parents]
        self.made_last_first = np.argsort(graph.saved, kind="stable")[::-1].tolist()
        self.gone: list[int] = np.searchsorted(
            graph.op_tick, graph.released_at, side="right"
        ).tolist()
        use_row = np.repeat(np.arange(len(graph.saved)), np.diff(graph.use_offsets))
        use_op = np.maximum(np.searchsorted(graph.op_tick, graph.uses, side="right") - 1, 0)
        in_order = np.lexsort((use_row, use_op))
        self.use_op, self.use_row = use_op[in_order], use_row[in_order]
        self.work_of_a_rerun = self.reruns.ops.counts()
        self.work_of_a_play = len(self.use_op) + len(self.made_at) + len(self.base) // 8 + 20
        self.lanes = lanes
        self._compiled = self._compile(cover)

    def _compile(self, cover: GreedyCover) -> Any | None:
        if compiled.planners is None:
            return None
        parents = cover.recipes.parent_lists
        return compiled.planners.Evaluation(
            bytes=cover.bytes,
            begin=cover.begin,
            own_need=cover.own_need,
            parent_offsets=parents.offsets,
            parents=parents.items,
            base=self.base,
            spare=self.spare,
            made_at=self.graph.saved,
            reruns=self.reruns.compiled(),
            gone=self.gone,
            use_op=self.use_op,
            use_row=self.use_row,
            lanes=self.lanes.columns() if self.lanes is not None else [],
            by_begin=np.argsort(cover.begin, kind="stable"),
        )

    def needs(self, dropped: Mask) -> list[int]:
        """Return the op behind which each saved value is asked for: by itself, or by what is rebuilt from it."""
        need: list[int] = list(self.own_need)
        after: dict[int, set[int]] = {}  # when a value is asked for that nobody holds any more
        for child in self.made_last_first:
            times = after.get(child, set()) | ({need[child]} if dropped[child] else set())
            for at in times:
                for parent in self.parents[child]:
                    if self.gone[parent] > at:
                        need[parent] = min(need[parent], at)
                    else:
                        after.setdefault(parent, set()).add(at)
        return need

    def spans(self, dropped: Mask, swapped: Mask) -> dict[int, Span]:
        """When each of the swapped values is away."""
        assert self.lanes is not None
        return self.lanes.spans(np.flatnonzero(swapped).tolist(), self.needs(dropped))

    def evaluate(
        self, dropped: Mask, dropped_twice: Mask, swapped: Mask | None = None
    ) -> Evaluation:
        """Return what happens with a choice.

        Args:
            dropped: what is dropped.
            dropped_twice: which of them once more when rebuilt early.
            swapped: what is swapped; none of it is dropped.
        """
        give_way()
        self.work += self.work_of_a_play + int(self.work_of_a_rerun[dropped].sum())
        if swapped is not None and (self.lanes is None or not swapped.any()):
            swapped = None
        if swapped is not None:
            self.work += 2 * int(swapped.sum()) + int(dropped.sum())
        if self._compiled is not None:
            return Evaluation(*self._compiled.play(dropped, dropped_twice, swapped))
        return self._play(dropped, dropped_twice, swapped)

    def _play(self, dropped: Mask, dropped_twice: Mask, swapped: Mask | None) -> Evaluation:
        n_ops = len(self.base)
        away = np.zeros(n_ops + 1)
        extra: dict[int, float] = {}
        back = np.full(len(dropped), -1)
        resident: list[bool] = (~dropped).tolist()
        once_more = dropped_twice.tolist()
        for row in np.flatnonzero(dropped).tolist():
            away[self.begin[row]] += self.bytes[row]
        seconds = 0.0
        if swapped is not None and self.lanes is not None:
            for row, span in self.spans(dropped, swapped).items():
                seconds += self.lanes.price_s[row]
                if span.begin < span.end:
                    away[span.begin] += self.bytes[row]
                    away[span.end] -= self.bytes[row]

        behind, ran = -1, set[int]()

        def is_there(row: int, at: int) -> bool:
            return (resident[row] or at < self.begin[row]) and self.gone[row] > at

        for at, row in zip(self.use_op.tolist(), self.use_row.tolist(), strict=True):
            if is_there(row, at):
                continue
            todo, stack = {row}, [row]
            while stack:
                for parent in self.parents[stack.pop()]:
                    if parent not in todo and not is_there(parent, at):
                        todo.add(parent)
                        stack.append(parent)
            staying = {
                made
                for made in todo
                if made == row
                or not ((once_more[made] and self.own_need[made] > at) or self.gone[made] <= at)
            }
            if at != behind:
                behind, ran = at, set()
            taken = self.reruns.run([*todo], staying.__contains__, ran)
            seconds += taken.seconds
            extra[at] = max(extra.get(at, 0.0), taken.held)
            for made in staying:
                if not resident[made]:
                    resident[made] = True
                    back[made] = at
                    away[at] -= self.bytes[made]
        for row in np.flatnonzero(dropped).tolist():
            if back[row] < 0:  # away until the program lets go of it
                away[max(self.gone[row], self.begin[row])] -= self.bytes[row]
        excess = self.base - np.cumsum(away)[:-1]
        if extra:
            # Rebuilding happens behind the op: beside what is live then, but not beside the op's own needs.
            at_ops = np.fromiter(extra, dtype=np.int64)
            need = np.fromiter(extra.values(), dtype=np.float64)
            excess[at_ops] += np.maximum(need - self.spare[at_ops], 0)
        return Evaluation(seconds, excess, back)

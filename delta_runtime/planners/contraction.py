"""Contraction: a recorded step as one of few ops, so that exact planners can work on it.

Saved values are put together in groups; a group leaves and comes back as a whole. Ops run together from one moment
that matters to the next: where a group is complete, and where backward asks for one first. Views are no ops of a
record, and unsaved values are part of the op that makes the next group; both vanish.

Covers the contracted `StepGraph`, two ways to group, and the way back: a plan of the contracted graph as one of the
whole. Does not cover what is planned on it.

Note: nothing is made to look smaller than it is
  1. An op of the contracted graph holds at its worst what the worst of its ops holds.
  2. A member of a group counts until the whole group is let go of, even where it went before.
  3. A group may leave when all of it may, and has to be there from the first to the last moment of an op that asks
     for any of it.
  4. A group is rebuilt member by member: an op that two members need runs for each of them.
  5. What an op asks for above what is live at its begin is chosen for what the judge of plans reads in it, its worst
     being the same: in forward, so much that rebuilding any member of its group fits; in backward, no more than what a
     rebuild in front of it may count on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_runtime.core.plan import NEVER, Interval, Plan
from delta_runtime.core.recipes import Recipes, recipes_of
from delta_runtime.core.step_graph import Floats, Ints, StepGraph
from delta_runtime.planners.greedy_drops import GreedyCover

MOST_OPS = 45
"""Ops of a contracted graph for which an exact solver proves its plan within a minute."""
LEAST_SHARE = 1e-3
"""Of all saved bytes: what is smaller is cheap to keep, and stays."""

_ACROSS_A_CUT = 2.0  # how much dearer it is to merge what a single value separates


@dataclass(frozen=True, slots=True)
class MergedOp:
    """What one op of a contracted graph stands for.

    Args:
        name: of the op in it that takes the longest.
        first, last: ops of the whole graph, `last` included.
        saved: number of saved values in the group that it makes; 0 where it makes none.
        saved_bytes: of these together.
        seconds: of all its ops.
        backward: whether it is part of backward.
    """

    name: str
    first: int
    last: int
    saved: int
    saved_bytes: int
    seconds: float
    backward: bool


@dataclass(frozen=True, eq=False)
class Contraction:
    """A step graph with few ops, and how it belongs to the whole one.

    Args:
        whole: the recorded step.
        graph: the contracted one; its saved values are the groups, its ticks number its ops.
        groups: rows of `whole.saved` in each of `graph.saved`.
        op_begin: first op of `whole` in each op of `graph`, and `whole.n_ops` at the end.
        leaves: op of `whole` before which each row of `whole.saved` may leave first.
        asked: ops of `whole` behind which each row is asked for.
    """

    whole: StepGraph
    graph: StepGraph
    groups: list[Ints]
    op_begin: Ints
    leaves: Ints
    asked: list[Ints]

    def expand(self, plan: Plan) -> Plan:
        """Return the same plan for the whole graph; its seconds and its peak are those of the contracted one."""
        whole, tick = self.whole, [*self.whole.op_tick.tolist(), self.whole.ticks]
        made_at = whole.op_tick[whole.value_op].tolist()
        intervals: list[list[Interval]] = [[] for _ in range(whole.n_values)]
        for value in whole.saved.tolist():
            intervals[value] = [Interval(made_at[value], whole.ticks)]
        of_groups = plan.intervals()
        begins = self._begin_ops(of_groups)
        for group, rows in enumerate(self.groups):
            for row in rows.tolist():
                value = int(whole.saved[row])
                intervals[value] = [
                    Interval(
                        made_at[value] if number == 0 else tick[begins[each.begin]],
                        tick[self._end_op(each.end, row)],
                        each.exit,
                        each.copy_back_at
                        if each.copy_back_at == NEVER
                        else tick[self.op_begin[each.copy_back_at]],
                    )
                    for number, each in enumerate(of_groups[group])
                ]
        weights = np.full(whole.n_values, np.inf)
        weights[whole.saved] = _seconds_per_byte(whole)
        return Plan.of(
            intervals,
            weights=weights,
            predicted_seconds=plan.predicted_seconds,
            predicted_peak_bytes=plan.predicted_peak_bytes,
            as_written=True,
        )

    def _begin_ops(self, of_groups: Sequence[Sequence[Interval]]) -> dict[int, int]:
        """Return for each op in which a group comes back the op of the whole graph where that begins.

        What comes back in one op comes together, so that nothing on the way is rebuilt twice.
        """
        begins: dict[int, int] = {}
        for group, intervals in enumerate(of_groups):
            for each in intervals[1:]:
                low, high = (int(op) for op in self.op_begin[each.begin : each.begin + 2])
                uses = [
                    op
                    for row in self.groups[group].tolist()
                    for op in self.asked[row].tolist()
                    if low <= op < high
                ]
                begins[each.begin] = min([begins.get(each.begin, high), *(uses or [low])])
        return begins

    def _end_op(self, end: int, row: int) -> int:
        """Return the op of the whole graph before which a row of a group leaves that leaves before an op."""
        if end >= self.graph.n_ops:
            return self.whole.n_ops
        first = int(self.leaves[row])
        earliest = max(int(self.leaves[each]) for each in self._group_of(row))
        # In forward each leaves as soon as it may, if its group does.
        as_soon = end == int(np.searchsorted(self.op_begin, earliest, side="left"))
        return first if as_soon else max(int(self.op_begin[end]), first)

    def _group_of(self, row: int) -> list[int]:
        return next(rows.tolist() for rows in self.groups if row in rows)

    def merged(self) -> list[MergedOp]:
        """Return what each op of the contracted graph stands for."""
        whole, graph = self.whole, self.graph
        made = {int(graph.value_op[group]): rows for group, rows in enumerate(self.groups)}
        found = []
        for op in range(graph.n_ops):
            first, last = (int(each) for each in self.op_begin[op : op + 2])
            rows = made.get(op, np.empty(0, np.int64))
            found.append(
                MergedOp(
                    name=graph.op_name[op],
                    first=first,
                    last=last - 1,
                    saved=len(rows),
                    saved_bytes=int(whole.saved_bytes[rows].sum()),
                    seconds=float(graph.op_seconds[op]),
                    backward=bool(graph.op_backward[op]),
                )
            )
        return found


def _seconds_per_byte(graph: StepGraph) -> Floats:
    recipes = recipes_of(graph)
    seconds = np.array([float(graph.rerun_seconds[ops].sum()) for ops in recipes.ops])
    return np.asarray(seconds / np.maximum(graph.saved_bytes, 1), np.float64)


def movable_rows(graph: StepGraph, recipes: Recipes) -> Ints:
    """Return the rows of `graph.saved` that may be dropped and are worth it, in the order in which they were made."""
    cover = GreedyCover(graph, 0, recipes)
    large = graph.saved_bytes >= LEAST_SHARE * max(graph.activation_bytes, 1)
    rows = np.flatnonzero(cover.droppable & large)
    return rows[np.argsort(graph.saved[rows], kind="stable")]


def cuts_of(rows: Ints, recipes: Recipes) -> list[int]:
    """Return the places in `rows` behind which all that follows is rebuilt from the last row before it alone.

    These are the articulation points of the graph of recipes: there a step is a chain.
    """
    place = {row: number for number, row in enumerate(rows.tolist())}
    needed_until = list(range(len(rows)))
    for number, row in enumerate(rows.tolist()):
        for parent in recipes.parents[row].tolist():
            if parent in place:
                needed_until[place[parent]] = max(needed_until[place[parent]], number)
    cuts, furthest = [], -1
    for number in range(len(rows) - 1):
        if furthest <= number < needed_until[number]:
            cuts.append(number)
        furthest = max(furthest, needed_until[number])
    return cuts


def by_size(graph: StepGraph, most_ops: int = MOST_OPS) -> Contraction:
    """Contract a step to at most so many ops, into groups of about equal bytes and seconds.

    Neighbours are merged, the smallest pair first. The fewest groups are one: a graph may come out with more ops than
    `most_ops` only if that is less than about five.
    """
    recipes = recipes_of(graph)
    rows = movable_rows(graph, recipes)
    count = max(1, min(len(rows), most_ops // 2))
    while True:
        found = contract(graph, _merged_by_size(graph, rows, recipes, count), recipes)
        if found.graph.n_ops <= most_ops or count == 1:
            return found
        count -= max(1, (found.graph.n_ops - most_ops) // 2)
        count = max(count, 1)


def _merged_by_size(graph: StepGraph, rows: Ints, recipes: Recipes, count: int) -> list[Ints]:
    """Merge neighbours until `count` groups are left."""
    seconds = np.array([float(graph.rerun_seconds[recipes.ops[row]].sum()) for row in rows])
    bytes_ = graph.saved_bytes[rows].astype(np.float64)
    size = bytes_ / max(bytes_.sum(), 1.0) + seconds / max(seconds.sum(), 1e-12)
    cuts = set(cuts_of(rows, recipes))
    groups = [[number] for number in range(len(rows))]
    sizes = size.tolist()
    while len(groups) > count:
        costs = [
            (sizes[at] + sizes[at + 1]) * (_ACROSS_A_CUT if groups[at][-1] in cuts else 1.0)
            for at in range(len(groups) - 1)
        ]
        at = int(np.argmin(costs))
        groups[at] += groups.pop(at + 1)
        sizes[at] += sizes.pop(at + 1)
    return [rows[each] for each in groups]


def contract(graph: StepGraph, groups: Sequence[Ints], recipes: Recipes) -> Contraction:
    """Contract a step whose saved values go in groups.

    Args:
        graph: the recorded step.
        groups: rows of `graph.saved`; what is in none stays on the device. A group must not be rebuilt from one
            that is complete only after it.
        recipes: of `graph`.
    """
    cover = GreedyCover(graph, 0, recipes)
    asked = _asked_ops(graph)
    groups = sorted(
        (np.sort(each) for each in groups if len(each)), key=lambda rows: _made(graph, rows)
    )
    ends = [_made(graph, rows) + 1 for rows in groups]
    firsts = [min((int(op) for row in rows for op in asked[row]), default=0) for rows in groups]
    turns = np.flatnonzero(np.diff(graph.op_backward.astype(np.int8))) + 1
    op_begin = np.unique([0, *ends, *firsts, *turns.tolist(), graph.n_ops])
    op_begin = op_begin[op_begin <= graph.n_ops]
    frame = _Frame(graph, groups, op_begin, cover.begin, asked)
    return Contraction(graph, frame.contracted(recipes), groups, op_begin, cover.begin, asked)


def _made(graph: StepGraph, rows: Ints) -> int:
    return int(graph.value_op[graph.saved[rows]].max())


def _asked_ops(graph: StepGraph) -> list[Ints]:
    op = np.maximum(np.searchsorted(graph.op_tick, graph.uses, side="right") - 1, 0)
    return [
        op[begin:end]
        for begin, end in zip(graph.use_offsets[:-1], graph.use_offsets[1:], strict=True)
    ]


@dataclass(frozen=True, eq=False)
class _Frame:
    """Where the ops of a contracted graph begin, and the columns that follow from it."""

    whole: StepGraph
    groups: list[Ints]
    op_begin: Ints
    leaves: Ints
    asked: list[Ints]

    def contracted(self, recipes: Recipes) -> StepGraph:
        whole, n = self.whole, len(self.op_begin) - 1
        gone = [self._gone(rows) for rows in self.groups]
        made = np.array([self._op_of(_made(whole, rows)) for rows in self.groups], np.int64)
        ordinary = self._ordinary(gone)
        begins, ends = self.op_begin[:-1], self.op_begin[1:]
        most = np.maximum.reduceat(ordinary + whole.op_watermark_bytes, begins)
        watermark = self._watermarks(most, ordinary, recipes)
        uses = [
            sorted({self._op_of(int(op)) for row in rows for op in self.asked[row]})
            for rows in self.groups
        ]
        replay, reads = self._recipes(recipes, made, n)
        return StepGraph(
            fingerprint=whole.fingerprint,
            op_name=tuple(
                whole.op_name[low + int(np.argmax(whole.op_seconds[low:high]))]
                for low, high in zip(begins.tolist(), ends.tolist(), strict=True)
            ),
            op_tick=np.arange(n, dtype=np.int64),
            op_seconds=np.add.reduceat(whole.op_seconds, begins),
            op_replay_seconds=replay,
            op_watermark_bytes=watermark,
            op_ordinary_bytes=most - watermark,
            op_backward=whole.op_backward[begins],
            op_managed_input_bytes=np.maximum.reduceat(whole.op_managed_input_bytes, begins),
            input_offsets=np.cumsum([0, *(len(each) for each in reads)], dtype=np.int64),
            inputs=np.array([value for each in reads for value in each], np.int64),
            value_op=made,
            value_bytes=np.array(
                [int(whole.saved_bytes[rows].sum()) for rows in self.groups], np.int64
            ),
            value_fingerprint=np.array(
                [whole.value_fingerprint[whole.saved[rows[0]]] for rows in self.groups], np.uint64
            ),
            value_repeats=np.ones(len(self.groups), bool),
            saved=np.arange(len(self.groups), dtype=np.int64),
            saved_at=made.copy(),
            alone_at=np.array(
                [
                    np.searchsorted(self.op_begin, self.leaves[rows].max(), side="left")
                    for rows in self.groups
                ],
                np.int64,
            ),
            released_at=np.array(gone, np.int64) - 1,
            use_offsets=np.cumsum([0, *(len(each) for each in uses)], dtype=np.int64),
            uses=np.array([use for each in uses for use in each], np.int64),
            ticks=n,
            persistent_bytes=whole.persistent_bytes,
            recorded_on=whole.recorded_on,
        )

    def _op_of(self, op: int) -> int:
        return int(np.searchsorted(self.op_begin, op, side="right")) - 1

    def _gone(self, rows: Ints) -> int:
        """Return the first contracted op at whose begin no member of a group is held any more."""
        gone = np.searchsorted(self.whole.op_tick, self.whole.released_at[rows], side="right")
        return int(np.searchsorted(self.op_begin, gone.max(), side="left"))

    def _ordinary(self, gone: Sequence[int]) -> Ints:
        """Return ordinary bytes at each op of the whole, with every member counted until its group is gone (rule 2)."""
        whole = self.whole
        more = np.zeros(whole.n_ops + 1, np.int64)
        for rows, until in zip(self.groups, gone, strict=True):
            end = int(self.op_begin[min(until, len(self.op_begin) - 1)])
            for row in rows.tolist():
                begin = int(np.searchsorted(whole.op_tick, whole.released_at[row], side="right"))
                if begin < end:
                    more[begin] += whole.saved_bytes[row]
                    more[end] -= whole.saved_bytes[row]
        return np.asarray(whole.op_ordinary_bytes + np.cumsum(more)[:-1], np.int64)

    def _watermarks(self, most: Ints, ordinary: Ints, recipes: Recipes) -> Ints:
        """Return what each contracted op asks for above what is live at its begin (rule 5).

        Args:
            most: live bytes of each contracted op at its worst.
            ordinary: live bytes at the begin of each op of the whole.
            recipes: of the whole.
        """
        whole = self.whole
        watermark = most - ordinary[self.op_begin[:-1]]
        workspaces = workspaces_of(whole, recipes)
        for rows in self.groups:
            op = self._op_of(_made(whole, rows))
            needs = int(whole.saved_bytes[rows].sum()) + int(max(workspaces[row] for row in rows))
            watermark[op] = max(int(watermark[op]), needs)
        asked = np.unique(np.concatenate([np.empty(0, np.int64), *self.asked]))
        for op in range(1, len(most)):
            if not whole.op_backward[self.op_begin[op]]:
                continue
            low, high = self.op_begin[op - 1 : op + 1]
            rebuilt = np.append(asked[(asked >= low) & (asked < high)], low)
            behind = np.minimum(rebuilt + 1, whole.n_ops - 1)
            charged = ordinary[rebuilt] + whole.op_watermark_bytes[rebuilt]
            spare = most[op - 1] - charged + whole.op_watermark_bytes[behind]
            watermark[op] = int(spare.min())
        return watermark

    def _recipes(self, recipes: Recipes, made: Ints, n: int) -> tuple[Floats, list[list[int]]]:
        """Return what each contracted op takes to run again, and the groups that it reads (rule 4)."""
        group_of = {int(row): number for number, rows in enumerate(self.groups) for row in rows}
        replay = np.full(n, np.nan)
        reads: list[set[int]] = [set() for _ in range(n)]
        for group, rows in enumerate(self.groups):
            at = int(made[group])
            for row in rows.tolist():
                again_s = float(self.whole.rerun_seconds[recipes.ops[row]].sum())
                replay[at] = again_s + (0.0 if np.isnan(replay[at]) else replay[at])
                reads[at].update(
                    group_of[parent]
                    for parent in recipes.parents[row].tolist()
                    if parent in group_of and made[group_of[parent]] != at
                )
        for at in range(n):
            if any(made[group] > at for group in reads[at]):
                raise ValueError("a group is rebuilt from one that is complete only after it")
        return replay, [sorted(each) for each in reads]


def workspaces_of(graph: StepGraph, recipes: Recipes) -> list[float]:
    """Return what making each saved value again holds beside it, by the account of the judge of plans.

    All else that the ops of its recipe make, and the largest workspace among them.
    """
    made = np.bincount(graph.value_op, weights=graph.value_bytes, minlength=graph.n_ops)
    spare = np.maximum(graph.op_watermark_bytes - made, 0)
    return [
        float(made[ops].sum() - graph.saved_bytes[row] + spare[ops].max(initial=0))
        for row, ops in enumerate(recipes.ops)
    ]

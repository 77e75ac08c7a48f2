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
     for any of it, or in which a node may hold what it asked for; and behind the last time until it is let go of.
     There the judge of plans looks at these ops alone.
  4. A group is rebuilt member by member: an op that two members need runs for each of them.
  5. What is live when an op asks for something is the most that is live at one of these moments. What rebuilding
     members of a group holds for a moment is a value of its own, which nobody saves: the most that it can be,
     whatever is rebuilt with them and whichever members are there already.
  6. What the program lets go of while it is still read for a rebuild is made again each time, as part of that: an op
     that both need runs for each.
  With these a plan of the contracted graph holds and takes no less than the same plan of the whole, as long as a group
  is rebuilt from groups that are there. Of what is rebuilt in passing, each member that is read runs for each that
  reads it, and a group of several holds some of its members while the last is made: planners have the expanded plan
  judged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from delta_runtime.core.plan import NEVER, Interval, Plan
from delta_runtime.core.recipes import Recipes, rebuild_seconds, recipes_of
from delta_runtime.core.reruns import Reruns
from delta_runtime.core.step_graph import Floats, Ints, Mask, StepGraph
from delta_runtime.planners.greedy_drops import GreedyCover
from delta_runtime.planners.presence import (
    asked_ops,
    behind_ops,
    gone_ops,
    needed_ops,
    weights_of,
)

MOST_OPS = 45
"""Ops of a contracted graph for which an exact solver proves its plan within a minute."""
LEAST_SHARE = 1e-3
"""Of all saved bytes: what is smaller is cheap to keep, and stays."""

_NO_GROUP = -1
_ACROSS_A_CUT = 2.0  # how much dearer it is to merge what a single value separates


@dataclass(frozen=True, slots=True)
class MergedOp:
    """What one op of a contracted graph stands for.

    Args:
        name: of the op in it that takes the longest.
        first, last: ops of the whole graph, `last` included.
        saved: number of saved values in the groups that it makes.
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
        graph: the contracted one; its saved values are the groups in order, its ticks number its ops.
        groups: rows of `whole.saved` in each of `graph.saved`.
        op_begin: first op of `whole` in each op of `graph`, and `whole.n_ops` at the end.
        leaves: op of `whole` before which each row of `whole.saved` may leave first.
        asked: ops of `whole` behind which each row is asked for.
        weights: of the values of `whole`, for plans; see `Plan`.
    """

    whole: StepGraph
    graph: StepGraph
    groups: list[Ints]
    op_begin: Ints
    leaves: Ints
    asked: list[Ints]
    weights: Floats

    def expand(self, plan: Plan) -> Plan:
        """Return the same plan for the whole graph; its seconds and its peak are to be judged."""
        whole, tick = self.whole, [*self.whole.op_tick.tolist(), self.whole.ticks]
        made_at = whole.op_tick[whole.value_op].tolist()
        gone = gone_ops(whole).tolist()
        intervals: list[list[Interval]] = [[] for _ in range(whole.n_values)]
        for value in whole.saved.tolist():
            intervals[value] = [Interval(made_at[value], whole.ticks)]
        of_values = plan.intervals()
        of_groups = [of_values[value] for value in self.graph.saved.tolist()]
        begins = self._begin_ops(of_groups)
        needed = needed_ops(whole, [each.tolist() for each in self.asked])

        def may(row: int, end: int) -> int:
            """Return the op before which a member may leave first whose group leaves before an op."""
            before = int(self.op_begin[end])
            return max([int(self.leaves[row]), *(op + 1 for op in needed[row] if op < before)])

        for group, rows in enumerate(self.groups):
            all_may = int(self.leaves[rows].max())
            for row in rows.tolist():
                value = int(whole.saved[row])
                intervals[value] = [
                    Interval(
                        made_at[value] if number == 0 else tick[begins[each.begin]],
                        tick[self._end_op(each.end, may(row, each.end), all_may, begins)],
                        each.exit,
                        each.copy_back_at
                        if each.copy_back_at == NEVER
                        else tick[self.op_begin[each.copy_back_at]],
                    )
                    for number, each in enumerate(of_groups[group])
                    if number == 0 or begins[each.begin] < gone[row]
                ]
        return Plan.of(
            intervals,
            weights=self.weights,
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

    def _end_op(self, end: int, may: int, all_may: int, begins: Mapping[int, int]) -> int:
        """Return the op of the whole graph before which a member leaves whose group leaves before an op.

        Args:
            end: the op of the contracted graph.
            may, all_may: ops of the whole before which the member, and all of its group, may leave first.
            begins: see `_begin_ops`.
        """
        if end >= self.graph.n_ops:
            return self.whole.n_ops
        last = int(self.op_begin[end])
        # In forward each leaves as soon as it may, if its group does and nobody is rebuilt from it before.
        as_soon = end == int(np.searchsorted(self.op_begin, all_may, side="left"))
        if as_soon and not any(may <= op < last for op in begins.values()):
            return may
        return max(last, may)

    def merged(self) -> list[MergedOp]:
        """Return what each op of the contracted graph stands for."""
        whole, graph = self.whole, self.graph
        made: dict[int, list[int]] = {}
        for value, rows in zip(graph.saved.tolist(), self.groups, strict=True):
            made.setdefault(int(graph.value_op[value]), []).extend(rows.tolist())
        found = []
        for op in range(graph.n_ops):
            first, last = (int(each) for each in self.op_begin[op : op + 2])
            members = made.get(op, [])
            found.append(
                MergedOp(
                    name=graph.op_name[op],
                    first=first,
                    last=last - 1,
                    saved=len(members),
                    saved_bytes=int(whole.saved_bytes[members].sum()),
                    seconds=float(graph.op_seconds[op]),
                    backward=bool(graph.op_backward[op]),
                )
            )
        return found


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


def by_size(graph: StepGraph, most_ops: int = MOST_OPS, *, timed: bool = True) -> Contraction:
    """Contract a step to at most so many ops, into groups of about equal bytes and seconds.

    Neighbours are merged, the smallest pair first. The fewest groups are one: a graph may come out with more ops than
    `most_ops` only if that is less than about five.

    Args:
        graph: the recorded step.
        most_ops: that the step is contracted to.
        timed: whether seconds count; without them each record of a step comes out the same.
    """
    recipes = recipes_of(graph)
    rows = movable_rows(graph, recipes)
    count = max(1, min(len(rows), most_ops // 2))
    while True:
        found = contract(graph, _merged(graph, rows, recipes, count, timed=timed), recipes)
        if found.graph.n_ops <= most_ops or count == 1:
            return found
        count -= max(1, (found.graph.n_ops - most_ops) // 2)
        count = max(count, 1)


def _merged(
    graph: StepGraph, rows: Ints, recipes: Recipes, count: int, *, timed: bool
) -> list[Ints]:
    """Merge neighbours until `count` groups are left."""
    bytes_ = graph.saved_bytes[rows].astype(np.float64)
    size = bytes_ / max(bytes_.sum(), 1.0)
    if timed:
        seconds = np.array(rebuild_seconds(graph, recipes))[rows]
        size += seconds / max(seconds.sum(), 1e-12)
    cuts = set(cuts_of(rows, recipes))
    # What one op makes is rebuilt together in any case.
    begins = np.flatnonzero(np.diff(graph.value_op[graph.saved[rows]], prepend=-1))
    groups = [each.tolist() for each in np.split(np.arange(len(rows)), begins[1:])]
    sizes = np.add.reduceat(size, begins).tolist() if len(rows) else []
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
    asked = [np.array(sorted(each), np.int64) for each in asked_ops(graph)]
    groups = sorted(
        (np.sort(each) for each in groups if len(each)), key=lambda rows: _made(graph, rows)
    )
    ends = [_made(graph, rows) + 1 for rows in groups]
    firsts = [min((int(op) for row in rows for op in asked[row]), default=0) for rows in groups]
    turns = np.flatnonzero(np.diff(graph.op_backward.astype(np.int8))) + 1
    op_begin = np.unique([0, *ends, *firsts, *turns.tolist(), graph.n_ops])
    op_begin = op_begin[op_begin <= graph.n_ops]
    frame = _Contracting(graph, groups, op_begin, cover.begin, asked)
    small = frame.contracted(recipes)
    weights = weights_of(graph, recipes)
    return Contraction(graph, small, groups, op_begin, cover.begin, asked, weights)


def _made(graph: StepGraph, rows: Ints) -> int:
    return int(graph.value_op[graph.saved[rows]].max())


class _Value(NamedTuple):
    """A value of a contracted graph: a group, or no group."""

    op: int
    group: int
    bytes_: int


@dataclass(frozen=True, eq=False)
class _Contracting:
    """Where the ops of a contracted graph begin, and the columns that follow from it."""

    whole: StepGraph
    groups: list[Ints]
    op_begin: Ints
    leaves: Ints
    asked: list[Ints]

    def contracted(self, recipes: Recipes) -> StepGraph:
        whole, n = self.whole, len(self.op_begin) - 1
        reruns = Reruns(whole, recipes)
        recipes, again = self._outlasting(recipes)
        needs = self._needs(reruns, again)
        gone = [self._gone(rows) for rows in self.groups]
        made = [self._op_of(_made(whole, rows)) for rows in self.groups]
        ordinary = self._ordinary(gone)
        begins, ends = self.op_begin[:-1], self.op_begin[1:]
        values = self._values(made, needs)
        saved = np.flatnonzero([group >= 0 for _, group, _ in values])
        most, when_asked = self._live(ordinary, values, gone)
        needed = needed_ops(whole, [each.tolist() for each in self.asked])
        uses = [self._uses(rows, needed) for rows in self.groups]
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
            op_watermark_bytes=most - when_asked,
            op_ordinary_bytes=when_asked,
            op_backward=whole.op_backward[begins],
            op_managed_input_bytes=np.maximum.reduceat(whole.op_managed_input_bytes, begins),
            input_offsets=np.cumsum([0, *(len(each) for each in reads)], dtype=np.int64),
            inputs=np.array([saved[group] for each in reads for group in each], np.int64),
            value_op=np.array([op for op, _, _ in values], np.int64),
            value_bytes=np.array([size for _, _, size in values], np.int64),
            value_fingerprint=np.array(
                [
                    whole.value_fingerprint[whole.saved[self.groups[group][0]]] if group >= 0 else 0
                    for _, group, _ in values
                ],
                np.uint64,
            ),
            value_repeats=np.ones(len(values), bool),
            saved=saved,
            saved_at=np.array(made, np.int64),
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
            contracted=True,
        )

    def _needs(self, reruns: Reruns, again: Sequence[Sequence[int]]) -> list[float]:
        """Return the most bytes that the ops of each group hold in any rerun, beside groups (rule 5).

        Args:
            reruns: of the whole graph.
            again: for each row the rows that it is rebuilt through, itself included.
        """
        members = {row for rows in self.groups for row in rows.tolist()}
        passing = {each for row in members for each in again[row] if each != row}
        most = reruns.most_held(sorted(members | passing), (members - passing).__contains__)
        return [
            max(most[each] for row in rows.tolist() for each in again[row]) for rows in self.groups
        ]

    def _values(self, made: Sequence[int], needs: Sequence[float]) -> list[_Value]:
        """Return groups, and behind those of one op what rebuilding them holds for a moment (rule 5).

        Args:
            made: op that makes each group.
            needs: what rebuilding each group holds beside it.
        """
        whole = self.whole
        values: list[_Value] = []
        momentary: dict[int, int] = {}
        for group, (rows, op) in enumerate(zip(self.groups, made, strict=True)):
            values.append(_Value(op, group, int(whole.saved_bytes[rows].sum())))
            momentary[op] = max(momentary.get(op, 0), int(needs[group]))
        values += [_Value(op, _NO_GROUP, most) for op, most in momentary.items() if most > 0]
        return sorted(values, key=lambda value: value.op)

    def _op_of(self, op: int) -> int:
        return int(self._ops_of(np.array(op)))

    def _ops_of(self, ops: Ints) -> Ints:
        return np.asarray(np.searchsorted(self.op_begin, ops, side="right") - 1, np.int64)

    def _gone(self, rows: Ints) -> int:
        """Return the first contracted op at whose begin no member of a group is held any more."""
        return int(np.searchsorted(self.op_begin, gone_ops(self.whole)[rows].max(), side="left"))

    def _uses(self, rows: Ints, needed: Sequence[Collection[int]]) -> list[int]:
        """Return the contracted ops in which any of a group has to be there (rule 3)."""
        gone_op = gone_ops(self.whole)
        ops: set[int] = set()
        for row in rows.tolist():
            ops.update(needed[row])
            ops.update(range(max(needed[row], default=int(gone_op[row])), int(gone_op[row])))
        return sorted({self._op_of(op) for op in ops})

    def _outlasting(self, recipes: Recipes) -> tuple[Recipes, list[list[int]]]:
        """Return recipes in which what goes while it is still read is made again each time (rule 6).

        And for each row the rows that it is rebuilt through, itself included.
        """
        gone_op = gone_ops(self.whole)
        group_of = {int(row): number for number, rows in enumerate(self.groups) for row in rows}
        ops, parents = list(recipes.ops), list(recipes.parents)
        through = [[row] for row in range(len(ops))]
        latest = [self._last_rebuilt(rows) for rows in self.groups]
        for group in range(len(self.groups) - 1, -1, -1):
            for row in self.groups[group].tolist():
                through[row], lasting = _reaching(recipes, row, gone_op > latest[group])
                ops[row] = np.concatenate([recipes.ops[each] for each in through[row]])
                parents[row] = np.array(lasting, np.int64)
                for parent in lasting:
                    if parent in group_of:
                        above = group_of[parent]
                        latest[above] = max(latest[above], latest[group])
        return replace(recipes, ops=ops, parents=parents), through

    def _last_rebuilt(self, rows: Ints) -> int:
        """Return the last op of the whole behind which a group is rebuilt for itself; -1 if nobody asks for it."""
        uses = [op for row in rows.tolist() for op in self.asked[row].tolist()]
        if not uses:
            return -1
        begin = int(self.op_begin[self._op_of(max(uses))])
        return min(int(op) for op in uses if op >= begin)

    def _ordinary(self, gone: Sequence[int]) -> Ints:
        """Return ordinary bytes at each op of the whole, with every member counted until its group is gone (rule 2)."""
        whole = self.whole
        gone_op = gone_ops(whole)
        more = np.zeros(whole.n_ops + 1, np.int64)
        for rows, until in zip(self.groups, gone, strict=True):
            end = int(self.op_begin[min(until, len(self.op_begin) - 1)])
            for row in rows.tolist():
                begin = int(gone_op[row])
                if begin < end:
                    more[begin] += whole.saved_bytes[row]
                    more[end] -= whole.saved_bytes[row]
        return np.asarray(whole.op_ordinary_bytes + np.cumsum(more)[:-1], np.int64)

    def _live(
        self, ordinary: Ints, values: Sequence[_Value], gone: Sequence[int]
    ) -> tuple[Ints, Ints]:
        """Return live bytes of each contracted op at its worst, and when something is asked for in it (rule 5).

        Args:
            ordinary: live bytes at the begin of each op of the whole.
            values: of the contracted graph.
            gone: for each group the first contracted op at whose begin it is not held any more.
        """
        whole, n = self.whole, len(self.op_begin) - 1
        until = gone_ops(whole)
        for rows, end in zip(self.groups, gone, strict=True):
            until[rows] = self.op_begin[end]
        held = ordinary + whole.op_watermark_bytes
        behind = behind_ops(held, ordinary, until, whole.saved_bytes)
        most = np.maximum.reduceat(held, self.op_begin[:-1])
        made = np.zeros(n, np.int64)
        for op, _, size in values:
            made[op] += size
        when_asked = np.where(made > 0, most - np.minimum(most, made), 0)
        asked = np.concatenate([*self.asked, self.op_begin[:-1]])
        np.maximum.at(when_asked, self._ops_of(asked), behind[asked])
        return most, when_asked

    def _recipes(
        self, recipes: Recipes, made: Sequence[int], n: int
    ) -> tuple[Floats, list[list[int]]]:
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


def _reaching(recipes: Recipes, row: int, lasts: Mask) -> tuple[list[int], list[int]]:
    """Return a row with those that it is rebuilt through, and the rows that last from which that starts."""
    again, todo, lasting = {row}, [row], set()
    while todo:
        for parent in recipes.parents[todo.pop()].tolist():
            if lasts[parent]:
                lasting.add(parent)
            elif parent not in again:
                again.add(parent)
                todo.append(parent)
    return sorted(again), sorted(lasting)

"""The judge of plans: walks a step op by op under a plan, and says what it takes, or why it cannot work.

A plain interpreter, simpler than any planner. It shares no line with their own evaluation, so what both agree
on was derived twice. Covers every `Plan` on every `StepGraph`. Does not
cover whether another plan is better.

Note: the account
  1. At each op live bytes are those of the ordinary step, its watermark included, less what is away.
  2. Autograd asks for a value, once it is made, between two ops. That, and what is rebuilt for it, is charged to
     the first of the two. The node that asked holds the value until another one asks for something, whatever
     the plan says. What the program let go of before the first op begins is not found.
  3. Each value that autograd asks for, and then each whose interval begins, is rebuilt by a run of ops, each
     once. What they make, and does not stay, is held until the last of them that reads it has run; beside it
     each holds its workspace. What stays counts from when it is made. But in what order autograd asks is not
     known: all that it asks for counts while any of that is rebuilt, though nothing of what begins does. An op
     that ran again may have left what it makes. And in a contracted step, whose ops stand for several, all
     that stays counts. All this comes on top of what is live between the two ops, where what the first held for
     a moment has gone.
  4. Copies go through one lane in each direction, one after the other. A copy out starts when forward has
     read the value for the last time. The step waits for a copy that is late.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import NEVER, Interval, Plan
from delta_runtime.core.step_graph import Floats, StepGraph
from delta_runtime.core.transfer import Links


class InvalidPlan(ValueError):
    """A plan that cannot be carried out on its graph; the text says which value, where, and why."""


@dataclass(frozen=True, eq=False)
class Verdict:
    """What a step takes under a plan.

    Args:
        live_bytes: highest live bytes at each op.
        rebuild_s: seconds of the ops that run again.
        stall_s: seconds that the step waits for copies.
    """

    live_bytes: Floats
    rebuild_s: float
    stall_s: float

    @property
    def peak_bytes(self) -> int:
        """Highest live bytes of the step."""
        return int(self.live_bytes.max(initial=0))


def validate(plan: Plan, graph: StepGraph, links: Links | None = None) -> Verdict:
    """Carry a plan out on paper.

    Args:
        plan: what is judged.
        graph: the recorded step that it is for.
        links: speed of the lanes; None where the plan may not copy.

    Raises:
        InvalidPlan: the plan is not well formed, or a value is not there when it is asked for.
    """
    lanes = links if links and links.out_bytes_per_s > 0 and links.in_bytes_per_s > 0 else None
    return _Walk(graph, _intervals_of(plan, graph, copies=lanes is not None), lanes).run()


def _intervals_of(plan: Plan, graph: StepGraph, *, copies: bool) -> dict[int, list[Interval]]:
    """Return the intervals of each saved value, checked for all that is wrong without walking the step."""
    columns = (plan.begins, plan.ends, plan.exits, plan.copy_back_at)
    offsets = plan.interval_offsets.tolist()
    if len(offsets) != graph.n_values + 1 or [offsets[0], offsets[-1]] != [0, len(plan.begins)]:
        raise InvalidPlan("the intervals are not those of the values of this graph")
    if len({len(column) for column in columns}) != 1 or offsets != sorted(offsets):
        raise InvalidPlan("the columns do not fit each other")
    saved = set(graph.saved.tolist())
    held_until = _held_until(graph)
    ticks = {*graph.op_tick.tolist(), graph.ticks}
    found = dict(enumerate(plan.intervals()))
    for value, intervals in found.items():
        if value in saved:
            _check(value, intervals, graph, ticks, held_until[value], copies=copies)
        elif intervals:
            raise InvalidPlan(f"value {value}: it is not saved, so nothing holds it")
    return {value: found[value] for value in sorted(saved)}


def _check(
    value: int,
    intervals: list[Interval],
    graph: StepGraph,
    ticks: set[int],
    held_until: int,
    *,
    copies: bool,
) -> None:
    made_at = int(graph.op_tick[graph.value_op[value]])

    def refuse(why: str) -> None:
        raise InvalidPlan(f"value {value}: {why}")

    if not intervals or intervals[0].begin != made_at:
        refuse(f"its first interval does not begin at {made_at}, when it is made")
    for number, (begin, end, exit_, back_at) in enumerate(intervals):
        is_last = number == len(intervals) - 1
        next_begin = graph.ticks if is_last else intervals[number + 1].begin
        by_copy = exit_ == Exit.SWAP and not is_last
        if not {begin, end} <= ticks or not begin <= end <= next_begin:
            refuse(f"[{begin}, {end}) is out of order, or no op has these ticks")
        if exit_ not in set(Exit) or (exit_ == Exit.STAYS and not (is_last and end == graph.ticks)):
            refuse(f"the gap from {end} has no way back")
        if exit_ != Exit.STAYS and end < held_until and not (by_copy and back_at == end):
            refuse(f"it leaves at {end}, but forward holds or reads it until {held_until}")
        if exit_ == Exit.DROP and not graph.value_repeats[value]:
            refuse("it is dropped, but its op does not make it again bit for bit")
        if exit_ == Exit.SWAP and not copies:
            refuse("it is swapped, but there is no lane")
        if by_copy and not (back_at in ticks and end <= back_at <= next_begin):
            refuse(f"its copy back starts at {back_at}, outside of the gap from {end}")
        if not by_copy and back_at != NEVER:
            refuse(f"a copy back starts at {back_at}, but none went out")


def _held_until(graph: StepGraph) -> dict[int, int]:
    """Return until when letting go of each saved value frees nothing: forward saves it, reads it, or holds it."""
    columns = (graph.saved.tolist(), graph.saved_at.tolist(), graph.alone_at.tolist())
    until = {
        value: max(saved_at + 1, alone_at)
        for value, saved_at, alone_at in zip(*columns, strict=True)
    }
    for op in np.flatnonzero(~graph.op_backward).tolist():
        for value in graph.inputs_of(op).tolist():
            if value in until:
                until[value] = max(until[value], int(graph.op_tick[op]) + 1)
    return until


class _Walk:
    """A step that goes on under a plan: what is there, both lanes, and the clock."""

    def __init__(
        self, graph: StepGraph, intervals: dict[int, list[Interval]], links: Links | None
    ) -> None:
        self.graph, self.intervals, self.links = graph, intervals, links
        # Columns of the graph as plain numbers.
        self.tick: list[int] = graph.op_tick.tolist()
        self.watermark: list[int] = graph.op_watermark_bytes.tolist()
        self.rerun_s: list[float] = graph.rerun_seconds.tolist()
        self.reads = [graph.inputs_of(op).tolist() for op in range(graph.n_ops)]
        self.bytes: list[int] = graph.value_bytes.tolist()
        self.made_by: list[int] = graph.value_op.tolist()
        self.repeats: list[bool] = graph.value_repeats.tolist()
        self.makes: list[list[int]] = [[] for _ in range(graph.n_ops)]
        for value, op in enumerate(self.made_by):
            self.makes[op].append(value)
        saved = graph.saved.tolist()
        self.released_at = dict(zip(saved, graph.released_at.tolist(), strict=True))
        self.saved_at = dict(zip(saved, graph.saved_at.tolist(), strict=True))
        self.alone_at = dict(zip(saved, graph.alone_at.tolist(), strict=True))
        self.read_by: dict[int, list[int]] = {value: [] for value in saved}  # in forward
        for op in np.flatnonzero(~graph.op_backward).tolist():
            for value in self.reads[op]:
                if value in self.read_by:
                    self.read_by[value].append(op)
        self.there: set[int] = set()
        self.in_use: set[int] = set()  # by the node that runs
        self.ran_behind: set[int] = set()  # ops that ran again behind the op of the step
        self.copied_s: dict[int, float] = {}  # when the copy out of a value is done
        self.arrives_s: dict[int, float] = {}  # when its copy back is
        self.out_free_s = self.in_free_s = 0.0
        self.clock_s = self.rebuild_s = self.stall_s = 0.0

    def run(self) -> Verdict:
        graph = self.graph
        live = np.zeros(graph.n_ops)
        asked = self._asked()
        begins_at, moves = self._begins(), self._moves()
        away, behind = self._away(), self._behind()
        for op in range(graph.n_ops):
            tick = self.tick[op]
            self._leave(op, tick, moves[op])
            self.clock_s += max(float(np.nan_to_num(graph.op_seconds[op])), 0.0)
            begins = self._arrive(begins_at.get(tick, []))
            held = self._rebuild(asked[op], begins, op, tick)
            not_away = sum(self.bytes[value] for value in self.in_use if self._is_away(value, op))
            most = int(graph.op_ordinary_bytes[op]) + self.watermark[op]
            live[op] = max(most, min(behind[op], most) + held) - (away[op] - not_away)
            if asked[op] and not graph.contracted:
                self.in_use = set(asked[op])
        return Verdict(live, self.rebuild_s, self.stall_s)

    def _op_of(self, tick: int) -> int:
        """Return the last op at a tick or before it; -1 if there is none."""
        return bisect_right(self.tick, tick) - 1

    def _first_op_from(self, tick: int) -> int:
        return bisect_left(self.tick, tick)

    def _asked(self) -> list[list[int]]:
        """Return for each op the values that are asked for behind it."""
        graph = self.graph
        asked: list[list[int]] = [[] for _ in range(graph.n_ops)]
        for row, value in enumerate(graph.saved.tolist()):
            for tick in graph.uses[graph.use_offsets[row] : graph.use_offsets[row + 1]].tolist():
                op = self._op_of(tick)
                if op >= self.made_by[value]:  # else it is of no use to anybody yet
                    asked[op].append(value)
        return asked

    def _begins(self) -> dict[int, list[tuple[int, int]]]:
        """Return by tick the values of which an interval but the first begins, and how each of them left."""
        found: dict[int, list[tuple[int, int]]] = {}
        for value, intervals in self.intervals.items():
            for before, interval in itertools.pairwise(intervals):
                found.setdefault(interval.begin, []).append((value, before.exit))
        return found

    def _moves(self) -> list[list[int]]:
        """Return for each op the values for which something may happen before it."""
        found: list[list[int]] = [[] for _ in range(self.graph.n_ops + 1)]
        for value in self.graph.saved.tolist():
            ops = {self.made_by[value]}
            for begin, end, exit_, copy_back_at in self.intervals[value]:
                if exit_ == Exit.SWAP:
                    ops.add(self._idle_from(value, begin, end))
                for tick in (end, copy_back_at):
                    ops.update(range(self._first_op_from(tick), self._op_of(tick) + 1))
            for op in ops:
                found[op].append(value)
        return found

    def _away(self) -> list[int]:
        """Return bytes of what is away at each op, and would be there in the ordinary step."""
        changes = [0] * (self.graph.n_ops + 1)
        for value, first, last in self._spans_away():
            changes[first] += self.bytes[value]
            changes[last] -= self.bytes[value]
        return list(itertools.accumulate(changes))

    def _spans_away(self) -> Iterator[tuple[int, int, int]]:
        """Yield from which op to before which a value is away."""
        for value, intervals in self.intervals.items():
            until = self._op_of(self.released_at[value]) + 1
            leaves, since = until, NEVER
            for begin, end, _, copy_back_at in intervals:
                comes_back = self._first_op_from(begin if since == NEVER else since)
                if leaves < min(comes_back, until):
                    yield value, leaves, min(comes_back, until)
                leaves, since = max(self._first_op_from(end), self.made_by[value]), copy_back_at
            if leaves < until:
                yield value, leaves, until

    def _is_away(self, value: int, op: int) -> bool:
        tick = self.tick[op]
        within = self.made_by[value] <= op and tick <= self.released_at[value]
        return within and not self._takes_room(value, tick)

    def _behind(self) -> list[int]:
        """Return ordinary live bytes between each op and the next one; what goes there may not have gone yet."""
        graph = self.graph
        ordinary: list[int] = graph.op_ordinary_bytes.tolist()
        if graph.contracted:
            return ordinary
        going = [0] * (graph.n_ops + 1)
        for value, released_at in self.released_at.items():
            going[self._op_of(released_at)] += self.bytes[value]
        at_end = [each + self.watermark[-1] for each in ordinary[-1:]]
        return [next_ + going[op] for op, next_ in enumerate(ordinary[1:])] + at_end

    def _wait_until(self, then_s: float) -> None:
        self.stall_s += max(then_s - self.clock_s, 0.0)
        self.clock_s = max(then_s, self.clock_s)

    def _takes_room(self, value: int, tick: int) -> bool:
        since = None
        for begin, end, _, copy_back_at in self.intervals[value]:
            if (begin if since is None or since == NEVER else since) <= tick < end:
                return True
            since = copy_back_at
        return False

    def _leave(self, op: int, tick: int, values: Iterable[int]) -> None:
        """Before an op: what is made begins, copies start in both directions, and values leave."""
        for value in values:
            if self.made_by[value] == op:
                self.there.add(value)
            for begin, end, exit_, copy_back_at in self.intervals[value]:
                if exit_ == Exit.SWAP and value not in self.copied_s:
                    if op >= self._idle_from(value, begin, end):
                        self.out_free_s = self._copy(value, self.out_free_s, out=True)
                        self.copied_s[value] = self.out_free_s
                if end == tick:
                    self.there.discard(value)
                    if exit_ == Exit.SWAP:
                        self._wait_until(self.copied_s.get(value, self.clock_s))
                if copy_back_at == tick:
                    self.in_free_s = self._copy(value, self.in_free_s, out=False)
                    self.arrives_s[value] = self.in_free_s

    def _idle_from(self, value: int, begin: int, end: int) -> int:
        """Return the op from which nobody reads a value any more before an interval of it ends."""
        first, last = self._first_op_from(begin), self._first_op_from(end) - 1
        held = self._op_of(max(self.saved_at[value], self.alone_at[value] - 1))
        reads = [op for op in [*self.read_by[value], min(held, last)] if first <= op <= last]
        return max([self.made_by[value], *reads]) + 1

    def _copy(self, value: int, free_s: float, *, out: bool) -> float:
        """When a copy is done that starts now, or as soon as its lane is free."""
        assert self.links is not None
        speed = self.links.out_bytes_per_s if out else self.links.in_bytes_per_s
        if not out:
            free_s = max(free_s, self.copied_s.get(value, 0.0))
        return max(self.clock_s, free_s) + self.bytes[value] / speed

    def _arrive(self, begins: Iterable[tuple[int, int]]) -> list[int]:
        """Wait for the copies that are needed now; say which values are to be rebuilt now."""
        rebuilt = []
        for value, left_by in begins:
            if left_by == Exit.SWAP:
                self._wait_until(self.arrives_s[value])
                self.there.add(value)
            else:
                rebuilt.append(value)
        return sorted(rebuilt)

    def _rebuild(self, asked: Sequence[int], begins: Sequence[int], op: int, tick: int) -> float:
        """Rebuild behind an op what is asked for, then what begins.

        Returns:
            The most bytes that this holds, beyond what is there afterwards.
        """
        self.ran_behind = set()
        held = 0.0
        for value in asked:
            most, _ = self._bring(value, op, tick)
            held = max(held, most)
        for value in begins:
            most, arrives = self._bring(value, op, tick)
            held = max(held - arrives, most)
        return held

    def _bring(self, value: int, op: int, tick: int) -> tuple[float, int]:
        """Rebuild a value, and what it is rebuilt from, as far as that is not there.

        Returns:
            The most bytes that this holds, beyond what is there afterwards; and bytes that were not there before.
        """
        if self._is_there(value, op):
            return 0.0, 0
        if not self._stays(value, op):
            raise InvalidPlan(f"value {value} is asked for behind op {op}, and is not there")
        chains: dict[int, set[int]] = {}  # ops of each value that is rebuilt
        sources: dict[int, set[int]] = {}  # saved values that it is rebuilt from
        todo = [value]
        while todo:
            made = todo.pop()
            if made not in chains:
                copied = self._left_by(made, tick) == Exit.SWAP and not self._is_let_go(made, op)
                if not self.repeats[made] or copied:
                    raise InvalidPlan(f"value {made} is read behind op {op}, and cannot be rebuilt")
                chains[made], sources[made] = self._chain(made)
                todo += [each for each in sources[made] if not self._is_there(each, op)]
        staying = {each for each in chains if self._stays(each, op)}
        self.there |= staying
        ops = set().union(*chains.values())
        seconds = self._seconds(ops)
        self.rebuild_s += seconds
        self.clock_s += seconds
        later = {
            each
            for each in staying - self.in_use
            if not self.graph.contracted and self.made_by[each] not in self.ran_behind
        }
        self.ran_behind |= ops
        most = self._held(ops, staying, later, set(chains))
        return most, sum(self.bytes[each] for each in later)

    def _held(self, ops: set[int], staying: set[int], later: set[int], wanted: set[int]) -> float:
        """Return the most bytes that ops hold which run again for what is wanted, beyond what is there afterwards.

        Args:
            ops: that run.
            staying: what they make that stays.
            later: what of it takes no bytes before it is made.
            wanted: all values that are made.
        """
        needed_by = {
            value: op
            for op in sorted(ops)
            for value in self.reads[op]
            if value in wanted or value not in self.intervals  # else it is there
        }
        passing = {value: op for op in ops for value in self.makes[op] if value not in staying}
        most = 0.0
        for op in ops:
            held = sum(
                self.bytes[value]
                for value, begin in passing.items()
                if begin <= op <= max(begin, needed_by.get(value, begin))
            )
            own = sum(self.bytes[value] for value in self.makes[op])
            to_come = sum(self.bytes[value] for value in later if self.made_by[value] > op)
            most = max(most, held + max(self.watermark[op] - own, 0) - to_come)
        return most

    def _is_there(self, value: int, op: int) -> bool:
        return value in self.there and not self._is_let_go(value, op)

    def _stays(self, value: int, op: int) -> bool:
        tick = self.tick[op]
        in_interval = any(each.begin <= tick < each.end for each in self.intervals[value])
        return in_interval and not self._is_let_go(value, op)

    def _is_let_go(self, value: int, op: int) -> bool:
        """Whether nobody holds a value any more when the op begins that is charged."""
        return bool(self.released_at[value] < self.tick[op])

    def _left_by(self, value: int, tick: int) -> int:
        """How a value left the last time."""
        exits = [each.exit for each in self.intervals[value] if each.end <= tick]
        return exits[-1] if exits else Exit.STAYS

    def _chain(self, value: int) -> tuple[set[int], set[int]]:
        """Return the ops that make a value again from saved ones, and these."""
        ops: set[int] = set()
        sources: set[int] = set()
        todo = [self.made_by[value]]
        while todo:
            op = todo.pop()
            ops.add(op)
            for read in self.reads[op]:
                if read in self.intervals:
                    sources.add(read)
                elif not self.repeats[read]:
                    raise InvalidPlan(f"value {value}: rebuilt from {read}, which does not repeat")
                elif self.made_by[read] not in ops:
                    todo.append(self.made_by[read])
        return ops, sources - {value}

    def _seconds(self, ops: set[int]) -> float:
        return sum(self.rerun_s[op] for op in sorted(ops))

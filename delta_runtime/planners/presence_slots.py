"""A step as slots of backward, in which saved values are there or not: what `presence_search` works on.

Covers the columns, from a step graph and a budget, and the way between them and plans. Does not cover the search.

Note: the account
  1. A slot begins with an op behind which something is asked for, and ends before the next one. It counts twice: that
     op, and the ops behind it. Values are rebuilt behind that op alone.
  2. What is asked for stays until the next slot ends: the node that asked may hold it until that one's op has run.
     All else is there behind the op of a slot only if it is there in the next slot too. On a contracted step what is
     asked for stays until its own slot ends. (The judge asks for no more than the first op of the next slot.)
  3. Before the first slot there is forward. What left there is not back before the first slot.
  4. A value may leave at the first slot that begins after forward let go of it, or in forward. It is let go of for good
     at the begin of an op; no rebuild behind that op finds it.
  5. What a rebuild takes, and holds for a moment, is what the judge of plans says (`validate`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from delta_runtime.core.events import Exit
from delta_runtime.core.plan import Interval, Plan
from delta_runtime.core.recipes import Lists, Recipes, rebuild_seconds
from delta_runtime.core.reruns import Reruns
from delta_runtime.core.step_graph import Floats, Ints, Mask, StepGraph
from delta_runtime.planners.presence import Presence, held_until, spare_behind


@dataclass(frozen=True, eq=False)
class Slots:
    """Columns over slots, and over saved values in the order in which they are made; see the Note.

    Args:
        rows: of `graph.saved`, in the order of all other columns.
        begin: the op of each slot.
        bytes, seconds: of each value, and of rebuilding it alone.
        reruns: what rebuilding several takes; their numbers are places in `rows`.
        parents: what each is rebuilt from.
        first, end: slots from which each may be away, and is let go of.
        leaves: limit of forward from which on it counts there; -1 where it stays in forward.
        leaves_at: op from which it may be away.
        gone: first op at whose begin the program does not hold it any more.
        fixed: whether it is not to be moved.
        asked: what is asked for in each slot, in the order of the judge.
        pinned: what has to be there in each slot (rule 2).
        room: bytes for all that may be away, in the op of each slot.
        spare: bytes that a rebuild there may hold for a moment.
        rest_room: as `room`, in the ops behind.
        forward_room: as `room`, in parts of forward; each also holds what may leave in those before.
        least_bytes: live bytes where they are highest with all away that may be.
        offsets: where the presence of each value begins, in columns that have one entry for forward, or the slot before
            `first`, and one for each slot before `end`.
    """

    rows: Ints
    begin: Ints
    bytes: Floats
    seconds: Floats
    reruns: Reruns
    parents: Lists
    first: Ints
    end: Ints
    leaves: Ints
    leaves_at: Ints
    gone: Ints
    fixed: Mask
    asked: Lists
    pinned: Lists
    room: Floats
    spare: Floats
    rest_room: Floats
    forward_room: Floats
    least_bytes: int
    offsets: Ints


def slots_of(
    graph: StepGraph,
    budget_bytes: int,
    recipes: Recipes | None = None,
) -> Slots | None:
    """Return a step as slots; None where nothing is asked for.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        recipes: of `graph`; made where None is given.
    """
    presence = Presence(graph, recipes)
    begin = _begins(graph, presence)
    if not len(begin):
        return None
    values = _Values(graph, presence, begin)
    beside = _held_beside(graph, values, begin)
    room = budget_bytes - beside
    until = np.append(begin[1:], graph.n_ops).tolist()
    rest_room = [
        room[low + 1 : high].min(initial=np.inf)
        for low, high in zip(begin.tolist(), until, strict=True)
    ]
    parts, forward_room = _forward(room[: begin[0]], values.leaves_at[values.in_forward])
    leaves = np.full(len(values.rows), -1, np.int64)
    leaves[values.in_forward] = np.searchsorted(parts, values.leaves_at[values.in_forward])
    recipes = presence.recipes
    rows = values.rows.tolist()
    lengths = values.end - values.first + 1
    return Slots(
        rows=values.rows,
        begin=begin,
        bytes=values.bytes,
        seconds=np.array(rebuild_seconds(graph, recipes), np.float64)[values.rows],
        reruns=Reruns(graph, recipes).in_order_of(values.rows),
        parents=Lists.of([np.sort(values.place[recipes.parents[row]]) for row in rows]),
        first=values.first,
        end=values.end,
        leaves=leaves,
        leaves_at=values.leaves_at,
        gone=values.gone,
        fixed=~values.moves | values.early,
        asked=Lists.of(values.asked),
        pinned=Lists.of(values.pinned),
        room=room[begin],
        spare=spare_behind(graph)[begin],
        rest_room=np.array(rest_room, np.float64),
        forward_room=forward_room,
        least_bytes=int(beside.max(initial=0)),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
    )


def _begins(graph: StepGraph, presence: Presence) -> Ints:
    """Return the ops with which slots begin: those behind which backward asks for something."""
    backward = int(np.argmax(graph.op_backward)) if graph.op_backward.any() else graph.n_ops
    asked = {op for each in presence.asked for op in each if op >= backward - 1}
    return np.array(sorted(asked), np.int64)


class _Values:
    """Saved values in the order in which they are made, and the slots in which they may be away."""

    def __init__(self, graph: StepGraph, presence: Presence, begin: Ints) -> None:
        rows = np.argsort(graph.saved, kind="stable")
        self.rows: Ints = rows
        self.place: Ints = np.argsort(rows)
        self.bytes: Floats = graph.saved_bytes[rows].astype(np.float64)
        self.gone: Ints = presence.gone[rows]
        possible = presence.recipes.possible[rows]
        until = held_until(graph, presence.asked)
        asked_in_forward = [
            max((until[op] for op in presence.asked[row] if op < begin[0]), default=-1)
            for row in rows.tolist()
        ]
        leaves = np.maximum(presence.leaves[rows], presence.made[rows] + 1)
        leaves = np.maximum(leaves, np.array(asked_in_forward, np.int64) + 1)
        first = np.searchsorted(begin, leaves)
        late = leaves > begin[0]
        leaves[late] = np.append(begin, graph.n_ops)[first[late]]  # rule 4
        self.moves: Mask = possible & (self.gone > leaves)
        self.leaves_at: Ints = np.where(self.moves, leaves, self.gone)
        self.end: Ints = np.searchsorted(begin, self.gone)
        self.first: Ints = np.where(self.moves, first, self.end)
        # Let go of before anything is asked for: it leaves at once.
        self.early: Mask = self.moves & (self.gone <= begin[0])
        self.in_forward: Mask = self.moves & (leaves < begin[0]) & ~self.early
        self.asked: list[list[int]] = [[] for _ in begin]
        slot_of = {op: slot for slot, op in enumerate(begin.tolist())}
        for row, asked in enumerate(presence.asked):
            for op in asked:
                if op in slot_of:
                    self.asked[slot_of[op]].append(int(self.place[row]))
        self.pinned: list[list[int]] = self.asked if graph.contracted else self._pinned(len(begin))

    def _pinned(self, n_slots: int) -> list[list[int]]:
        """Rule 2."""
        pinned: list[set[int]] = [set() for _ in range(n_slots)]
        for slot in range(n_slots):
            for value in self.asked[slot]:
                for each in range(slot, min(slot + 2, int(self.end[value]))):
                    pinned[each].add(value)
        return [sorted(each) for each in pinned]


def _held_beside(graph: StepGraph, values: _Values, begin: Ints) -> Floats:
    """Return live bytes at each op without any of the values that may be away there."""
    held = np.zeros(graph.n_ops + 1)
    moves = values.moves
    np.add.at(held, values.leaves_at[moves], -values.bytes[moves])
    np.add.at(held, values.gone[moves], values.bytes[moves])
    for slot, pinned in enumerate(values.pinned):
        behind = int(begin[slot]) + 1
        for value in pinned:  # until it is let go of
            if moves[value] and values.end[value] == slot + 1 and values.gone[value] > behind:
                held[behind] += values.bytes[value]
                held[values.gone[value]] -= values.bytes[value]
    ordinary = (graph.op_ordinary_bytes + graph.op_watermark_bytes).astype(np.float64)
    return np.asarray(ordinary + np.cumsum(held)[:-1], np.float64)


def _forward(room: Floats, leaves: Ints) -> tuple[Ints, Floats]:
    """Return the last op of each part of forward that matters, and the room in it.

    What may leave in one part may be away in all that follow: a part with no less room than a later one never matters.
    """
    starts = np.unique(leaves)
    if not len(starts):
        return np.empty(0, np.int64), np.empty(0, np.float64)
    least = np.minimum.reduceat(room, starts)
    later = np.append(np.minimum.accumulate(least[::-1])[::-1][1:], np.inf)
    matters = least < later
    return starts[matters], np.asarray(least[matters], np.float64)


def presence_of(slots: Slots, plan: Plan, graph: StepGraph) -> Mask:
    """Return when values are there under a plan, in the columns of `Slots.offsets`.

    Args:
        slots: of `graph`.
        plan: that drops alone.
        graph: the recorded step.
    """
    there = np.ones(int(slots.offsets[-1]), bool)
    begin_tick = graph.op_tick[slots.begin]
    for value, row in enumerate(slots.rows.tolist()):
        own = there[slots.offsets[value] : slots.offsets[value + 1]]
        if slots.fixed[value]:
            own[:] = slots.leaves_at[value] >= slots.gone[value]
            continue
        saved = int(graph.saved[row])
        spans = slice(*plan.interval_offsets[saved : saved + 2].tolist())
        begins, ends = plan.begins[spans], plan.ends[spans]
        first, end = int(slots.first[value]), int(slots.end[value])
        in_slots = own[1 : 1 + end - first]
        in_slots[:] = False
        for low, high in zip(
            np.searchsorted(begin_tick, begins).tolist(),
            np.searchsorted(begin_tick, ends).tolist(),
            strict=True,
        ):
            in_slots[max(low - first, 0) : max(high - first, 0)] = True
        if slots.leaves[value] >= 0:
            own[0] = ends[0] >= begin_tick[0]
    for slot, (low, high) in enumerate(itertools.pairwise(slots.pinned.offsets.tolist())):
        for value in slots.pinned.items[low:high].tolist():
            if slot >= slots.first[value]:
                there[slots.offsets[value] + slot - slots.first[value] + 1] = True
    return there


def plan_of(
    slots: Slots,
    there: Mask,
    graph: StepGraph,
    weights: Floats,
    *,
    predicted_seconds: float,
    predicted_peak_bytes: int,
) -> Plan:
    """Return the plan under which values are there as `presence_of` tells it.

    Args:
        slots: of `graph`.
        there: in the columns of `Slots.offsets`.
        graph: the recorded step.
        weights, predicted_seconds, predicted_peak_bytes: of the plan.
    """
    intervals: list[list[Interval]] = [[] for _ in range(graph.n_values)]
    tick = np.append(graph.op_tick, graph.ticks)
    pinned: list[list[int]] = [[] for _ in slots.rows]
    for slot, (low, high) in enumerate(itertools.pairwise(slots.pinned.offsets.tolist())):
        for value in slots.pinned.items[low:high].tolist():
            pinned[value].append(slot)
    for value, row in enumerate(slots.rows.tolist()):
        own = there[slots.offsets[value] : slots.offsets[value + 1]]
        ops = _ops_of(slots, value, own, pinned[value], graph.n_ops)
        ops[0, 0] = graph.value_op[graph.saved[row]]
        stays = ops[:, 1] >= slots.gone[value]
        begins, ends = tick[ops[:, 0]], np.where(stays, graph.ticks, tick[ops[:, 1]])
        exits = np.where(stays, int(Exit.STAYS), int(Exit.DROP))
        columns = (begins.tolist(), ends.tolist(), exits.tolist())
        intervals[int(graph.saved[row])] = [Interval(*each) for each in zip(*columns, strict=True)]
    return Plan.of(
        intervals,
        weights=weights,
        predicted_seconds=predicted_seconds,
        predicted_peak_bytes=predicted_peak_bytes,
        as_written=True,
    )


def _ops_of(slots: Slots, value: int, own: Mask, pinned: list[int], n_ops: int) -> Ints:
    """Return the first op and the one after the last of each time in which a value is there; the first begins at 0."""
    first, end = int(slots.first[value]), int(slots.end[value])
    gone, leaves = int(slots.gone[value]), int(slots.leaves_at[value])
    until = leaves
    if slots.leaves[value] >= 0 and own[0]:
        until = int(slots.begin[0])
    in_slots = own[1 : 1 + end - first]
    begins = slots.begin[first:end]
    behind = np.append(slots.begin, n_ops)[first + 1 : end + 1]
    stays = np.zeros(len(begins), bool)
    after = own[2 : 2 + end - first]
    stays[: len(after)] = in_slots[: len(after)] & after
    stays[[slot - first for slot in pinned if first <= slot < end]] = True  # rule 2
    ends = np.where(stays, np.minimum(behind, gone), begins + 1)[in_slots]
    ops = np.stack([begins[in_slots], ends], axis=1)
    ops = np.concatenate([np.array([[0, until]], np.int64), ops])
    new = np.append(True, ops[1:, 0] != ops[:-1, 1])
    return np.stack([ops[new, 0], ops[np.append(new[1:], True), 1]], axis=1)

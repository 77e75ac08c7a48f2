"""A local search over which saved values are there in which slot of backward. What a plan holds and takes is a sum over
slots, so the best presence of one value, with all others as they are, is a shortest path.

Covers drops alone, from any plan to begin with. The account of a step in slots is `presence_slots`; it is the judge's.

csrc/planners/presence_search.cpp searches alike, faster; it is used where the extension was loaded.

Note: the search
  1. A value is away or there in each slot. What a slot takes depends on that and on the slot before: a value that was
     away and is there is rebuilt, and so is what it is rebuilt from, as far as that is not found. What it holds too
     much has a price. Over all slots of a value, the cheapest way through both states is found by dynamic programming.
  2. A sweep does that for each value. A turn begins with low prices, and ends where all fits and nothing gets better:
     what costs little leaves first, and the dearer a byte gets, the more follows. In half of the turns prices rise
     only where there is too much: what leaves early is then not thought to do more good than what leaves late.
  3. The first turn begins with everything there, and so does one in fifty that find nothing better. Each other one
     begins with the best so far, changed by chance: in half of them values that are made one after the other are all
     there, or all away; in the others a few values are turned around over a stretch of slots, the more the longer
     nothing better was found, and the last of these stays so in the first sweep.
  4. It ends after fifty turns in vain for each value that can be moved, or three thousand.
  5. What is drawn by chance comes from a seed: equal steps give equal plans.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import inf, ldexp
from typing import Any, NamedTuple

import numpy as np

from delta_runtime.core import compiled
from delta_runtime.core.interrupts import give_way
from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import Recipes
from delta_runtime.core.step_graph import Mask, StepGraph
from delta_runtime.planners.presence_slots import Slots, plan_of, presence_of, slots_of

MOST_PRESENCE = 5_000_000
"""Slots of all values together: a step with more is not searched."""
_MOST_IN_VAIN = 3000  # turns in a row that found nothing better
_IN_VAIN_FOR_EACH = 50  # value that can be moved, where that is less
_SWEEPS = 30  # for a first turn in any case
_WORK_AT_ONCE = 200_000  # a few milliseconds
_MOST_WITHOUT_EXTENSION = 2_400_000  # a few seconds of Python

_LOWEST = 1.0 / 256.0  # price to begin with, in units of what a byte takes
_HIGHEST = 1e6
_DOUBLINGS = 6  # from the lowest price of a later turn to the highest
_FIRST_STEP = 2.0  # of the price, after each sweep of the first turn
_STEP = 1.3
_SHORTEST = 3  # stretch of values; the longest has a quarter of all values more
_FORCED = 4  # values turned around before a turn, at the most one less
_TURNS_FOR_ONE_MORE = 100  # in vain
_TURNS_TO_RESTART = 50  # in vain
_NOTHING = 1e-12  # seconds: less is no gain


class Found(NamedTuple):
    """The best that was found.

    Args:
        seconds: of rebuilding.
        excess: bytes too much, summed over slots.
        most: bytes too much where it is worst; below 0: what is left.
        there: in the columns of `Slots.offsets`.
    """

    seconds: float
    excess: float
    most: float
    there: Mask


def search(
    graph: StepGraph,
    budget_bytes: int,
    begin: Plan,
    *,
    most_work: int,
    recipes: Recipes | None = None,
) -> Plan | None:
    """Look for a plan that drops, is carried out as written, and fits.

    Args:
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        begin: a plan that drops; the result is no worse, by the account of the slots.
        most_work: units of work after which the best so far is the result, at the least as many as a first turn usually
            takes. Without the extension some seconds of Python are the most.
        recipes: of `graph`; made where None is given.

    Returns:
        The plan; None where the step is too large, or nothing can be moved.
    """
    slots = slots_of(graph, budget_bytes, recipes)
    if slots is None or slots.offsets[-1] > MOST_PRESENCE or slots.fixed.all():
        return None
    there = presence_of(slots, begin, graph)
    presence = searching(slots, there)
    if compiled.planners is None:
        most_work = min(most_work, _MOST_WITHOUT_EXTENSION)
    most_work = max(most_work, _SWEEPS * len(there))
    in_vain = min(_MOST_IN_VAIN, _IN_VAIN_FOR_EACH * int((~slots.fixed).sum()))
    through = False
    while not through and presence.work() < most_work:
        give_way()
        through = presence.go_on(min(_WORK_AT_ONCE, most_work - presence.work()), in_vain)
    found = Found(*presence.best())
    return plan_of(
        slots,
        found.there,
        graph,
        begin.weights,
        predicted_seconds=found.seconds,
        predicted_peak_bytes=int(max(budget_bytes + found.most, slots.least_bytes)),
    )


def searching(slots: Slots, there: Mask) -> Any:
    """Return the search, faster where the extension was loaded.

    Args:
        slots: of the step.
        there: where it begins, in the columns of `Slots.offsets`.
    """
    if compiled.planners is None:
        return PresenceSearch(slots, there)
    return compiled.planners.PresenceSearch(
        bytes=slots.bytes,
        seconds=slots.seconds,
        reruns=slots.reruns.compiled(),
        parent_offsets=slots.parents.offsets,
        parents=slots.parents.items,
        first=slots.first,
        end=slots.end,
        leaves=slots.leaves,
        fixed=slots.fixed,
        asked_offsets=slots.asked.offsets,
        asked=slots.asked.items,
        pinned_offsets=slots.pinned.offsets,
        pinned=slots.pinned.items,
        room=slots.room,
        spare=slots.spare,
        rest_room=slots.rest_room,
        forward_room=slots.forward_room,
        there=there,
    )


class _Made(NamedTuple):
    """What the rebuilds of a slot take, and hold for a moment."""

    seconds: float
    held: float


@dataclass(eq=False, slots=True)
class _Slot:
    """A slot as it is now.

    Args:
        made: by its rebuilds.
        sum: bytes there, in its op.
        rest_sum: in the ops behind.
        price, rest_price: seconds for a byte too much in its op, and in those behind.
        backs: values that are back from here on, in order.
        touched: values that its rebuilds make or read.
    """

    made: _Made = _Made(0.0, 0.0)
    sum: float = 0.0
    rest_sum: float = 0.0
    price: float = 0.0
    rest_price: float = 0.0
    backs: list[int] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)


_THERE, _AWAY, _BACK = range(3)  # how a value is looked at in a slot


class PresenceSearch:
    """The search of the Note, in Python.

    Args:
        slots: of the step.
        there: where it begins, in the columns of `Slots.offsets`.
    """

    def __init__(self, slots: Slots, there: Mask) -> None:
        self.bytes: list[float] = slots.bytes.tolist()
        self.seconds_of: list[float] = slots.seconds.tolist()
        self.reruns = slots.reruns
        self.parents = _lists(slots.parents.offsets.tolist(), slots.parents.items.tolist())
        self.first: list[int] = slots.first.tolist()
        self.end: list[int] = slots.end.tolist()
        self.leaves: list[int] = slots.leaves.tolist()
        self.asked = _lists(slots.asked.offsets.tolist(), slots.asked.items.tolist())
        self.room: list[float] = slots.room.tolist()
        self.spare: list[float] = slots.spare.tolist()
        self.rest_room: list[float] = slots.rest_room.tolist()
        self.forward_room: list[float] = slots.forward_room.tolist()
        offsets = slots.offsets.tolist()
        self.there = [
            there[low:high].tolist() for low, high in zip(offsets[:-1], offsets[1:], strict=True)
        ]
        self.is_pinned = [[False] * len(own) for own in self.there]
        pinned = _lists(slots.pinned.offsets.tolist(), slots.pinned.items.tolist())
        for slot, values in enumerate(pinned):
            for value in values:
                place = slot - self.first[value] + 1
                if place > 0:
                    self.is_pinned[value][place] = True
        self.movable = [value for value, fixed in enumerate(slots.fixed.tolist()) if not fixed]
        self.is_fixed: list[bool] = slots.fixed.tolist()
        self.slots = [_Slot() for _ in self.room]
        self.forward_sum = [0.0] * len(self.forward_room)
        self.forward_price = [0.0] * len(self.forward_room)
        self.seconds = self.excess = self.penalty = self.unit = self.step = 0.0
        self.highest_price = 0.0
        self.all_rise = True  # in this turn: also prices where nothing is too much
        self.best_there: list[list[bool]] = []
        self.best_seconds = self.best_excess = 0.0
        self.done = self.in_vain = 0
        self.state = 1
        self.begun = self.in_turn = False
        self.forced = -1
        self.made_now: set[int] = set()
        self.ran: set[int] = set()  # ops behind this slot's op
        self.early = False  # whether what is made now is made before it is asked for
        self.who, self.how = -1, _THERE

    def work(self) -> int:
        """Return units of work done."""
        return self.done

    def _is_there(self, value: int, slot: int) -> bool:
        place = slot - self.first[value] + 1
        if place < 0:
            return True
        own = self.there[value]
        return place < len(own) and own[place]

    def _is_found(self, value: int, slot: int) -> bool:
        """Whether the rebuilds of a slot find a value."""
        if value in self.made_now:
            return True
        if value == self.who:
            return self.how == _THERE
        place = slot - self.first[value] + 1
        own = self.there[value]
        if place <= 0:
            return place < 0 or own[0]
        return place < len(own) and own[place] and own[place - 1]

    def _bring(self, value: int, slot: int, into: _Made, touched: set[int] | None = None) -> _Made:
        """As the judge does."""
        if self._is_found(value, slot):
            return into
        chain, todo = {value}, [value]
        while todo:
            for parent in self.parents[todo.pop()]:
                self.done += 1
                if touched is not None:
                    touched.add(parent)
                if parent not in chain and not self._is_found(parent, slot):
                    chain.add(parent)
                    todo.append(parent)
        if touched is not None:
            touched |= chain
        staying = {
            made
            for made in chain
            if (self.how != _AWAY if made == self.who else self._is_there(made, slot))
        }
        self.made_now |= staying
        taken = self.reruns.run([*chain], staying.__contains__, self.ran)
        self.done += taken.ops
        held = into.held - taken.kept if self.early else into.held
        return _Made(into.seconds + taken.seconds, max(held, taken.held))

    def _make(self, slot: int, value: int, how: int, touched: set[int] | None = None) -> _Made:
        """Return what the rebuilds of a slot take with one value looked at in another way; -1: with none."""
        self.made_now, self.ran = set(), set()
        self.who, self.how = value, how
        made = _Made(0.0, 0.0)
        self.early = False
        for each in self.asked[slot]:
            made = self._bring(each, slot, made, touched)
        self.early = True
        backs = [each for each in self.slots[slot].backs if each != value]
        if value >= 0 and how == _BACK:
            backs.insert(bisect_left(backs, value), value)
        for each in backs:
            made = self._bring(each, slot, made, touched)
        self.who = -1
        return made

    def _make_alone(self, slot: int, value: int) -> _Made:
        """Return about what they take with a value back that they do not touch: as if it were made last."""
        self.made_now, self.ran, self.early = set(self.slots[slot].backs), set(), True
        self.who, self.how = value, _BACK
        made = self._bring(value, slot, self.slots[slot].made)
        self.who = -1
        return made

    def _may_pay(self, slot: int, value: int) -> bool:
        """Whether a value may as well be back here as later: something else is, or what it is rebuilt from goes."""
        return bool(self.slots[slot].backs) or any(
            self._is_there(parent, slot) and not self._is_there(parent, slot + 1)
            for parent in self.parents[value]
        )

    def _over(self, slot: int, sum_: float, held: float) -> float:
        return max(sum_ + max(held - self.spare[slot], 0.0) - self.room[slot], 0.0)

    def _rest_over(self, slot: int, sum_: float) -> float:
        return max(sum_ - self.rest_room[slot], 0.0)

    def _forward_over(self, limit: int) -> float:
        return max(self.forward_sum[limit] - self.forward_room[limit], 0.0)

    def _forward_penalty(self, value: int, bytes_: float) -> float:
        """Return what is too much in forward comes to, if a value has so many bytes more."""
        found = 0.0
        for limit, room in enumerate(self.forward_room):
            more = bytes_ if limit >= self.leaves[value] else 0.0
            found += self.forward_price[limit] * max(self.forward_sum[limit] + more - room, 0.0)
        return found

    def _add_over(self, slot: int, sign: float) -> None:
        its = self.slots[slot]
        bytes_ = sign * self._over(slot, its.sum, its.made.held)
        self.excess += bytes_
        self.penalty += its.price * bytes_

    def _add_rest_over(self, slot: int, sign: float) -> None:
        its = self.slots[slot]
        bytes_ = sign * self._rest_over(slot, its.rest_sum)
        self.excess += bytes_
        self.penalty += its.rest_price * bytes_

    def _add_forward_over(self, limit: int, sign: float) -> None:
        bytes_ = sign * self._forward_over(limit)
        self.excess += bytes_
        self.penalty += self.forward_price[limit] * bytes_

    def _set_prices(self, price: float) -> None:
        self.highest_price = price
        for its in self.slots:
            its.price = its.rest_price = price
        self.forward_price = [price] * len(self.forward_price)
        self._count()

    def _raised(self, price: float, step: float, bytes_: float) -> float:
        if self.all_rise or bytes_ > 0:
            price *= step
            self.highest_price = max(self.highest_price, price)
        return price

    def _raise_prices(self, step: float) -> None:
        for slot, its in enumerate(self.slots):
            over = self._over(slot, its.sum, its.made.held)
            its.price = self._raised(its.price, step, over)
            rest_over = self._rest_over(slot, its.rest_sum)
            its.rest_price = self._raised(its.rest_price, step, rest_over)
        for limit, price in enumerate(self.forward_price):
            self.forward_price[limit] = self._raised(price, step, self._forward_over(limit))
        self._count()

    def _costs(self, value: int) -> list[tuple[float, float, float, float]]:
        """For each slot of a value, by whether it is there before it, and in it: neither, in it, before it, both."""
        own, pinned = self.there[value], self.is_pinned[value]
        first, end = self.first[value], self.end[value]
        costs = []
        for slot in range(first, end):
            self.done += 1
            place = slot - first + 1
            its = self.slots[slot]
            bytes_ = self.bytes[value]
            others = its.sum - (bytes_ if own[place] else 0.0)
            found = away = back = its.made
            may_back = True
            if value in its.touched or (pinned[place] and its.backs):
                found = self._make(slot, value, _THERE)
                away = self._make(slot, value, _AWAY)
                back = self._make(slot, value, _BACK)
            elif pinned[place] or self._may_pay(slot, value):
                back = self._make_alone(slot, value)
            else:
                may_back = False
            away_s = away.seconds + its.price * self._over(slot, others, away.held)
            neither = before = inf if pinned[place] else away_s
            in_it = inf
            if may_back:
                in_it = back.seconds + its.price * self._over(slot, others + bytes_, back.held)
            both = found.seconds + its.price * self._over(slot, others + bytes_, found.held)
            if place > 1:
                stays = own[place - 1] and (own[place] or pinned[place - 1])
                behind = self.slots[slot - 1]
                without = behind.rest_sum - (bytes_ if stays else 0.0)
                low = behind.rest_price * self._rest_over(slot - 1, without)
                high = behind.rest_price * self._rest_over(slot - 1, without + bytes_)
                neither += low
                in_it += low
                before += high if pinned[place - 1] else low
                both += high
            costs.append((neither, in_it, before, both))
        return costs

    def _improve(self, value: int) -> bool:
        """Find the best presence of one value with all others as they are (rule 1). Return whether it changed."""
        own = self.there[value]
        costs = self._costs(value)
        free = self.leaves[value] >= 0
        away, there = inf, 0.0
        now = 0.0
        if free:
            away = self._forward_penalty(value, -self.bytes[value] if own[0] else 0.0)
            there = self._forward_penalty(value, 0.0 if own[0] else self.bytes[value])
            now = there if own[0] else away
        came_from = []
        for place, (neither, in_it, before, both) in enumerate(costs, 1):
            now += (neither, in_it, before, both)[2 * own[place - 1] + own[place]]
            from_away, from_there = away + neither, there + before
            to_away = from_there < from_away
            next_away = from_there if to_away else from_away
            from_away, from_there = away + in_it, there + both
            to_there = from_there <= from_away
            there = from_there if to_there else from_away
            away = next_away
            came_from.append((to_away, to_there))
        state = there < away
        if not (there if state else away) < now - _NOTHING:
            return False
        path = [state]
        for each in reversed(came_from):
            path.append(each[path[-1]])
        path.reverse()
        before_s = self._objective()
        self._put(value, path)
        if self._objective() < before_s - _NOTHING:
            return True
        self._put(value, own)
        return False

    def _objective(self) -> float:
        return self.seconds + self.penalty

    def _look_again(self, slot: int) -> None:
        its = self.slots[slot]
        its.touched = set()
        its.made = self._make(slot, -1, _THERE, its.touched)

    def _put(self, value: int, path: list[bool]) -> None:
        """Have a value there as `path` says, and keep all sums."""
        was, pinned, bytes_ = self.there[value], self.is_pinned[value], self.bytes[value]
        own = list(was)
        self.there[value] = own
        first, end = self.first[value], self.end[value]
        if path[0] != was[0]:
            for limit in range(self.leaves[value], len(self.forward_sum)):
                self._add_forward_over(limit, -1.0)
                self.forward_sum[limit] += bytes_ if path[0] else -bytes_
                self._add_forward_over(limit, 1.0)
        own[0] = path[0]
        for slot in range(first, end):
            p = slot - first + 1
            if was[p] == path[p] and was[p - 1] == path[p - 1]:
                continue
            its = self.slots[slot]
            self._add_over(slot, -1.0)
            if was[p] != path[p]:
                its.sum += bytes_ if path[p] else -bytes_
            if p > 1:
                stayed = was[p - 1] and (was[p] or pinned[p - 1])
                stays = path[p - 1] and (path[p] or pinned[p - 1])
                if stayed != stays:
                    self._add_rest_over(slot - 1, -1.0)
                    self.slots[slot - 1].rest_sum += bytes_ if stays else -bytes_
                    self._add_rest_over(slot - 1, 1.0)
            was_back, is_back = was[p] and not was[p - 1], path[p] and not path[p - 1]
            if is_back and not was_back:
                its.backs.insert(bisect_left(its.backs, value), value)
            elif was_back and not is_back:
                its.backs.remove(value)
            own[p] = path[p]
            if was_back or is_back or value in its.touched:
                self.seconds -= its.made.seconds
                self._look_again(slot)
                self.seconds += its.made.seconds
            self._add_over(slot, 1.0)

    def _count(self) -> None:
        """Sum everything up anew."""
        self.seconds = self.excess = self.penalty = 0.0
        for limit in range(len(self.forward_sum)):
            self._add_forward_over(limit, 1.0)
        for slot, its in enumerate(self.slots):
            self.seconds += its.made.seconds
            self._add_over(slot, 1.0)
            self._add_rest_over(slot, 1.0)

    def _begin(self) -> None:
        self.begun = True
        seconds, total = 0.0, 1.0
        for value, (own, pinned) in enumerate(zip(self.there, self.is_pinned, strict=True)):
            bytes_ = self.bytes[value]
            if not self.is_fixed[value]:
                seconds += self.seconds_of[value]
                total += bytes_
            if self.leaves[value] >= 0 and own[0]:
                for limit in range(self.leaves[value], len(self.forward_sum)):
                    self.forward_sum[limit] += bytes_
            for slot in range(self.first[value], self.end[value]):
                p = slot - self.first[value] + 1
                its = self.slots[slot]
                if own[p]:
                    its.sum += bytes_
                if p > 1 and own[p - 1] and (own[p] or pinned[p - 1]):
                    self.slots[slot - 1].rest_sum += bytes_
                if own[p] and not own[p - 1]:
                    its.backs.append(value)
        for slot in range(len(self.slots)):
            self._look_again(slot)
        self._count()
        self.best_there = list(self.there)
        self.best_seconds, self.best_excess = self.seconds, self.excess
        self.unit = (seconds or 1.0) / total  # prices must rise, also where nothing costs

    def _sweep(self) -> bool:
        """Have each value at its best once, in one direction. Return whether any changed."""
        n = len(self.movable)
        down = self._random(2) != 0
        shift = self._random(n)
        any_ = False
        for index in range(n):
            place = (index + shift) % n
            value = self.movable[n - 1 - place if down else place]
            if value != self.forced and self._improve(value):
                any_ = True
        return any_

    def _random(self, most: int) -> int:
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % most

    def _force(self, value: int) -> None:
        """Turn a value's presence around over a stretch, if nothing asks for it in the first slot that is drawn."""
        n = self.end[value] - self.first[value] + 1
        least = 0 if self.leaves[value] >= 0 else 1
        if n <= least:
            return
        at = least + self._random(n - least)
        own, pinned = self.there[value], self.is_pinned[value]
        if pinned[at]:
            return
        low = high = at
        while low - 1 >= least and own[low - 1] == own[at] and not pinned[low - 1]:
            low -= 1
        while high + 1 < n and own[high + 1] == own[at] and not pinned[high + 1]:
            high += 1
        if self._random(2):
            low += self._random(at - low + 1)
            high = at + self._random(high - at + 1)
        path = list(own)
        path[low : high + 1] = [not own[at]] * (high + 1 - low)
        self._put(value, path)
        self.forced = value

    def _put_stretch(self) -> None:
        """Have values that are made one after the other all there, or away wherever they may be."""
        n = len(self.movable)
        length = min(n, _SHORTEST + self._random(max(n // 4, 1)))
        begin = self._random(n - length + 1)
        there = self._random(2) != 0
        for value in self.movable[begin : begin + length]:
            path = [there or pinned for pinned in self.is_pinned[value]]
            if self.leaves[value] < 0:
                path[0] = True
            self._put(value, path)

    def _keep_if_better(self) -> None:
        if (self.excess, self.seconds) < (self.best_excess, self.best_seconds):
            self.best_there = list(self.there)
            self.best_seconds, self.best_excess = self.seconds, self.excess
            self.in_vain = 0

    def _go_back(self) -> None:
        for value in self.movable:
            if self.there[value] != self.best_there[value]:
                self._put(value, self.best_there[value])
        self._count()

    def _begin_anew(self, step: float) -> None:
        """Begin a turn with everything there."""
        for value in self.movable:
            self._put(value, [True] * len(self.there[value]))
        self._set_prices(self.unit * _LOWEST)
        self.step = step

    def _begin_turn(self) -> None:
        """Rule 3."""
        if not self.begun:
            self._begin()
            self._begin_anew(_FIRST_STEP)
            return
        self._go_back()
        self.step = _STEP
        self.in_vain += 1
        self.all_rise = self._random(2) != 0
        if self.in_vain % _TURNS_TO_RESTART == 0:
            self._begin_anew(_STEP)
            return
        halvings = self._random(_DOUBLINGS) + 1
        self._set_prices(self.unit * ldexp(1.0 + self._random(1000) / 1000.0, -halvings))
        if self._random(2):
            self._put_stretch()
            return
        for _ in range(self._random(_FORCED + self.in_vain // _TURNS_FOR_ONE_MORE)):
            self._force(self.movable[self._random(len(self.movable))])

    def _go_on_with_turn(self) -> None:
        """Rule 2: a sweep, and a higher price after it."""
        any_ = self._sweep()
        self.forced = -1
        if (self.excess <= 0 and not any_) or self.highest_price > _HIGHEST * self.unit:
            self._count()
            self._keep_if_better()
            self.in_turn = False
            return
        self._raise_prices(self.step if any_ else self.step * self.step)

    def go_on(self, most_work: int, most_in_vain: int) -> bool:
        """Go on for at least so many units of work. Return whether so many turns in a row found nothing better."""
        until = self.done + most_work
        while self.done < until and self.movable and self.in_vain < most_in_vain:
            if self.in_turn:
                self._go_on_with_turn()
                continue
            self._begin_turn()
            self.in_turn = True
        return not self.movable or self.in_vain >= most_in_vain

    def best(self) -> Found:
        """Return the best so far."""
        if not self.begun:
            self._begin()
        self._go_back()
        most = -inf
        for total, room in zip(self.forward_sum, self.forward_room, strict=True):
            most = max(most, total - room)
        for slot, its in enumerate(self.slots):
            passing = max(its.made.held - self.spare[slot], 0.0)
            most = max(most, its.sum + passing - self.room[slot])
            most = max(most, its.rest_sum - self.rest_room[slot])
        there = np.array([each for own in self.there for each in own], bool)
        return Found(self.seconds, self.excess, most, there)


def _lists(offsets: list[int], items: list[int]) -> list[list[int]]:
    return [items[low:high] for low, high in zip(offsets[:-1], offsets[1:], strict=True)]

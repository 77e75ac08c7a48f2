"""The ledger: the one account of all pages. Events in; who may leave, in which order, on request.

A pure state machine over one columnar table: no torch, no threads, no clock of its own (events
carry their ticks). The runtime and the simulator drive the same class. Policies rank; the ledger
alone says what may be evicted, and refuses moves that `LEGAL_MOVES` does not have.

Covered: the account of bytes by residency, candidates and their ranking by the policy's filter,
next uses learnt from the last step, requests for room that were not met. Not covered: pins, exposure and
the moment of eviction (C++ tests them when it walks the published queue), plans, and the budget.

Note: order within a batch
    1. Events of one page are in the order in which they happened. A batch gives the same account
       as its events one by one, however it is cut.
    2. A page begins with PACKED and ends with RELEASED; what comes for it outside is a fault. Only
       an EDGE may name such a page, and says nothing then.
    3. The sets of dropped neighbours depend on the order between pages too. They alone take events
       one by one, and are kept only for filters that look at them.
    4. All events of pages that were packed and released between two batches may be missing, unless `needs_all` says so.
    5. A batch is cut behind each end of a step and behind its worst unmet request, so that both see
       the account of their moment.
"""

from __future__ import annotations

import numpy as np

from delta_runtime.core.errors import DeltaError
from delta_runtime.core.events import (
    LEGAL_MOVES,
    UNKNOWN_TICK,
    BoolColumn,
    Distance,
    EventKind,
    Events,
    Exit,
    IntColumn,
    Place,
    PublishQueue,
    Shortfall,
)
from delta_runtime.core.transfer import Links
from delta_runtime.online.filters import Column, Columns, distances
from delta_runtime.online.neighbourhood import Neighbourhood
from delta_runtime.online.next_uses import NextUses
from delta_runtime.online.page_table import ABSENT, FIRST_CAPACITY, PageTable
from delta_runtime.online.policies import Policy

_STAYS = -1
_PAGE_KINDS = EventKind.SWAPPED_IN + 1  # the kinds below concern one page


class LedgerError(DeltaError):
    """The account does not add up: a fault of the runtime, not of the user. The ledger is spent."""


def _targets() -> IntColumn:
    """Return the residency that each kind of page event leads to, _STAYS where it leads nowhere."""
    target = np.full(_PAGE_KINDS, _STAYS)
    target[EventKind.PACKED] = target[EventKind.REBUILT] = Place.RESIDENT
    target[EventKind.DROPPED] = Place.DROPPED
    target[EventKind.RELEASED] = Place.RELEASED
    target[EventKind.SWAPPED_OUT] = Place.SWAPPED
    target[EventKind.SWAPPED_IN] = Place.RESIDENT
    return target


def _allowed() -> BoolColumn:
    """Return [kind, residency]: whether a page event may come in that residency."""
    allowed = np.zeros((_PAGE_KINDS, ABSENT + 1), np.bool_)
    allowed[EventKind.PACKED, ABSENT] = True
    for state, following in LEGAL_MOVES.items():
        allowed[EventKind.DROPPED, state] = Place.DROPPED in following
        allowed[EventKind.RELEASED, state] = Place.RELEASED in following
        allowed[EventKind.USED, state] = state is not Place.RELEASED
        allowed[EventKind.INADMISSIBLE, state] = state is not Place.RELEASED
        allowed[EventKind.SWAPPED_OUT, state] = Place.SWAPPED in following
    allowed[EventKind.REBUILT, Place.DROPPED] = True  # a swapped page is never rebuilt
    allowed[EventKind.SWAPPED_IN, Place.SWAPPED] = True  # and a dropped one never swapped in
    return allowed


_TARGET = _targets()
_ALLOWED = _allowed()
_ORDERED = np.array([each < _PAGE_KINDS and each is not EventKind.EDGE for each in EventKind])
_TOUCHES = np.array([each in (EventKind.USED, EventKind.REBUILT) for each in EventKind])
_NEARS = np.array(
    [
        each < EventKind.SWAPPED_OUT and each not in (EventKind.USED, EventKind.INADMISSIBLE)
        for each in EventKind
    ]
)
_PACKED, _EDGE = int(EventKind.PACKED), int(EventKind.EDGE)  # plain ints for the inner loop
_DROPPED, _REBUILT = int(EventKind.DROPPED), int(EventKind.REBUILT)
_RELEASED = int(EventKind.RELEASED)
_NO_LINKS = Links()


class Ledger:
    """The account of all pages, and the only place where it changes.

    Args:
        policy: Ranks the candidates.
        checked: Run `check` after each `handle` (slow; DELTA_CHECK=1).

    Example:
        >>> ledger = Ledger(get_policy("recompute"))
        >>> ledger.handle(events)
        >>> queue = ledger.rank(now_tick)
    """

    def __init__(self, policy: Policy, *, checked: bool = False) -> None:
        self._policy = policy
        self._checked = checked
        self._table = PageTable()
        self._bytes_in = np.zeros(ABSENT + 1, np.int64)
        self._counts = np.zeros(len(EventKind), np.int64)
        self._shortfall: Shortfall | None = None
        self._released_rows = 0
        needs = policy.filter.needs if policy.filter is not None else Column.NOTHING
        self._near = Neighbourhood() if Column.NEIGHBOURHOOD_SECONDS in needs else None
        self._next_uses = NextUses() if Column.NEXT_USE in needs else None

    @property
    def policy(self) -> Policy:
        """The policy that ranks the candidates."""
        return self._policy

    @property
    def needs_all(self) -> bool:
        """Whether no event may be left out: the filter learns from pages that are gone, or events are checked."""
        return self._checked or self._near is not None or self._next_uses is not None

    @property
    def resident_bytes(self) -> int:
        """Bytes of all pages whose device copy exists."""
        return int(self._bytes_in[Place.RESIDENT])

    @property
    def dropped_bytes(self) -> int:
        """Bytes of all pages that are dropped now."""
        return int(self._bytes_in[Place.DROPPED])

    @property
    def swapped_bytes(self) -> int:
        """Bytes of all pages that are in a tier below and not on the device."""
        return int(self._bytes_in[Place.SWAPPED])

    def take_shortfall(self) -> Shortfall | None:
        """Return the worst request that could not be met since this was asked last; None where all were."""
        shortfall, self._shortfall = self._shortfall, None
        return shortfall

    def handle(self, events: Events) -> None:
        """Enter a batch of events into the account.

        Args:
            events: Events in the order they happened, dtype EVENT_DTYPE; not kept.

        Raises:
            LedgerError: An event that cannot be, with what the batch tells of its page. The ledger is
                spent then: part of the batch may have been entered.
        """
        if not len(events):
            return
        kind = events["kind"]
        if kind.min() < 0 or kind.max() >= len(EventKind):
            raise LedgerError(f"events of unknown kinds: {np.setdiff1d(kind, list(EventKind))}")
        count = np.bincount(kind, minlength=len(EventKind))
        self._counts += count
        if count[EventKind.SHORTFALL] or count[EventKind.STEP]:
            self._enter_in_parts(events)
        else:
            self._enter(events)
        if self._released_rows > max(FIRST_CAPACITY, self._table.rows) // 2:
            self._table.forget(Place.RELEASED)
            self._released_rows = 0
        if self._checked:
            self.check()

    def rank(self, now_tick: int, links: Links = _NO_LINKS) -> PublishQueue:
        """Return all pages that may leave, with the filter's weights and the director's choices.

        Candidates are resident; without a recipe they can only be swapped. Whether one is pinned or
        exposed is tested by C++ when it needs room.

        Args:
            now_tick: The present tick: uses foreseen before it are past, and the queue is ordered
                by the scores of this moment.
            links: What is known of the lanes now, for the director.

        Returns:
            The queue, smallest score first; empty when the policy evicts nothing.
        """
        table, chosen = self._table, self._policy.filter
        swaps = Place.SWAPPED in self._policy.evicts_to
        drops = Place.DROPPED in self._policy.evicts_to
        if chosen is None or not (swaps or drops):
            none = np.empty(0, np.int64)
            return PublishQueue(none, np.empty(0), np.empty(0, np.int8), Distance.NONE)
        may_go = table.residency[: table.rows] == Place.RESIDENT
        admissible = table.admissible[: table.rows]
        rows = np.flatnonzero(may_go if swaps else may_go & admissible)
        columns = self._columns(rows, now_tick)
        weights = chosen.weights(columns)
        scores = weights / np.maximum(distances(chosen.distance, columns), 1)
        order = np.argsort(scores, kind="stable")
        if swaps and drops and self._policy.director is not None:
            exits = self._policy.director(columns, links)
            exits[~admissible[rows]] = Exit.SWAP
        else:
            exits = np.full(len(rows), Exit.SWAP if swaps else Exit.DROP, np.int8)
        return PublishQueue(table.page[rows[order]], weights[order], exits[order], chosen.distance)

    def check(self) -> None:
        """Verify every invariant of the account.

        Raises:
            LedgerError: With all that is wrong.
        """
        faults = self._faults()
        if faults:
            raise LedgerError("the ledger does not add up: " + "; ".join(faults))

    def _enter_in_parts(self, events: Events) -> None:
        """Enter a batch with ends of steps or unmet requests: rule 5 of the Note."""
        kind, asked = events["kind"], events["bytes"]
        steps = kind == EventKind.STEP
        shortfalls = kind == EventKind.SHORTFALL
        worst = int(np.argmax(np.where(shortfalls, asked, -1))) if shortfalls.any() else _STAYS
        begin = 0
        for last in np.unique([*np.flatnonzero(steps), worst, len(events) - 1]).tolist():
            if last < begin:
                continue
            self._enter(events[begin : last + 1])
            begin = last + 1
            if last == worst:
                self._note_shortfall(events[last])
            if steps[last] and self._next_uses is not None:
                self._next_uses.end_step()

    def _enter(self, events: Events) -> None:
        """Enter the page events of a part that has neither a step's end nor a refusal within."""
        table = self._table
        every = events
        ordered = _ORDERED[events["kind"]]
        if not ordered.all():
            events = events[ordered]
        kind = np.ascontiguousarray(events["kind"])
        packed = events[kind == EventKind.PACKED]
        if len(packed):
            twice = table.append(packed)
            if len(twice):
                raise self._fault(int(twice[0]), "was packed twice", every)
        if len(kind):
            page = np.ascontiguousarray(events["page"])
            rows = table.find(page)
            if rows.min() < 0:
                raise self._fault(int(page[rows.argmin()]), "is not in the ledger", every)
            self._move(kind, rows, every)
            self._count(kind, rows, events)
        if self._near is not None:
            self._enter_near(self._near, every)

    def _move(self, kind: IntColumn, rows: IntColumn, batch: Events) -> None:
        """Change residencies, recipes and the account of bytes; rules 1 and 2 of the Note.

        The events are put in order of row, then of time. What a page was before an event is the
        target of the last moving event before it in its run of equal rows, else what the table
        says.
        """
        table = self._table
        order = rows.argsort(kind="stable")
        row, kind = rows[order], kind[order]
        place = np.arange(len(row))
        begins = np.empty(len(row), np.bool_)
        begins[0] = True
        np.not_equal(row[1:], row[:-1], out=begins[1:])
        begin = np.maximum.accumulate(place * begins)
        target = _TARGET[kind]
        last_move = np.maximum.accumulate(np.where(target == _STAYS, -1, place))
        before = table.residency[row].astype(np.int64)
        moved = np.flatnonzero(last_move[:-1] >= begin[1:]) + 1
        before[moved] = target[last_move[moved - 1]]
        after = np.where(target == _STAYS, before, target)

        legal = _ALLOWED[kind, before]
        broke = kind == EventKind.INADMISSIBLE
        admissible = table.admissible[row]
        if broke.any():
            admissible &= np.maximum.accumulate(np.where(broke, place, -1)) < begin
            table.admissible[row[broke]] = False
        legal &= admissible | (kind != EventKind.DROPPED)
        if not legal.all():
            wrong = np.flatnonzero(~legal)
            first = wrong[order[wrong].argmin()]
            raise self._illegal(int(kind[first]), int(before[first]), int(row[first]), batch)

        bytes_ = table.bytes[row]
        self._bytes_in += (
            np.bincount(after, bytes_, ABSENT + 1) - np.bincount(before, bytes_, ABSENT + 1)
        ).astype(np.int64)
        ends = np.append(begins[1:], True)
        table.residency[row[ends]] = after[ends]

    def _count(self, kind: IntColumn, rows: IntColumn, events: Events) -> None:
        """Note uses and count, for events that have been found legal."""
        table = self._table
        touches = _TOUCHES[kind]
        table.last_use[rows[touches]] = events["tick"][touches]  # the last of a page wins
        used = kind == EventKind.USED
        if self._next_uses is not None and used.any():
            row = rows[used]
            self._next_uses.see(table.key[row], events["tick"][used] - table.packed_at[row])
        self._released_rows += int(np.count_nonzero(kind == EventKind.RELEASED))

    def _enter_near(self, near: Neighbourhood, events: Events) -> None:
        """Bring the sets of dropped neighbours up to date: rule 3 of the Note."""
        events = events[_NEARS[events["kind"]]]
        page = np.ascontiguousarray(events["page"])
        seconds = self._table.seconds[self._table.find(page)].tolist()
        for kind, each, other, cost in zip(
            events["kind"].tolist(), page.tolist(), events["key"].tolist(), seconds, strict=True
        ):
            if kind == _PACKED:
                near.add(each)
            elif kind == _EDGE:
                near.link(each, other)
            elif kind == _DROPPED:
                near.drop(each, cost)
            elif kind == _REBUILT:
                near.rebuild(each)
            elif kind == _RELEASED:
                near.release(each)

    def _columns(self, rows: IntColumn, now_tick: int) -> Columns:
        """Return what the policy's filter may look at, for some rows."""
        table = self._table
        last_use = table.last_use[rows]
        near = np.zeros(len(rows))
        if self._near is not None:
            near = self._near.seconds_near(table.page[rows])
        next_use = np.full(len(rows), UNKNOWN_TICK)
        if self._next_uses is not None:
            packed_at = table.packed_at[rows]
            earliest = np.maximum(now_tick, last_use + 1) - packed_at
            lead = self._next_uses.next_lead(table.key[rows], earliest)
            next_use = np.where(lead == UNKNOWN_TICK, UNKNOWN_TICK, packed_at + lead)
        return Columns(table.bytes[rows], table.seconds[rows], near, last_use, next_use, now_tick)

    def _note_shortfall(self, event: np.void) -> None:
        """Describe an unmet request by the account as it is now, if it is the worst so far."""
        missing_bytes = int(event["bytes"])
        if self._shortfall is not None and self._shortfall.missing_bytes >= missing_bytes:
            return
        table = self._table
        resident = table.residency[: table.rows] == Place.RESIDENT
        pinned = table.bytes[: table.rows][resident & ~table.admissible[: table.rows]]
        pinned_bytes = int(pinned.sum())
        self._shortfall = Shortfall(
            tick=int(event["tick"]),
            missing_bytes=missing_bytes,
            movable_bytes=self.resident_bytes - pinned_bytes,
            pinned_bytes=pinned_bytes,
            largest_pinned_bytes=int(pinned.max(initial=0)),
        )

    def _illegal(self, kind: int, state: int, row: int, batch: Events) -> LedgerError:
        """Return the error for an event that came while its page was in `state`."""
        was = "not yet packed" if state == ABSENT else Place(state).name
        if _ALLOWED[kind, state]:
            was += " without an admissible recipe"
        what = f"cannot be {EventKind(kind).name} while {was}"
        return self._fault(int(self._table.page[row]), what, batch)

    def _fault(self, page: int, what: str, batch: Events) -> LedgerError:
        """Return an error about a page, with what the batch tells of it."""
        known = batch[_names_page(batch, page)]
        lines = [
            f"  tick {each['tick']}: {EventKind(int(each['kind'])).name} page {each['page']} "
            f"bytes {each['bytes']} key {each['key']} reason {each['reason']}"
            for each in known
        ]
        return LedgerError("\n".join([f"page {page} {what}; in this batch:", *lines]))

    def _faults(self) -> list[str]:
        """Return what is wrong with the account; empty when all is well."""
        table = self._table
        rows = slice(table.rows)
        page, residency, bytes_ = table.page[rows], table.residency[rows], table.bytes[rows]
        seconds = table.seconds[rows]
        sums = np.zeros_like(self._bytes_in)
        np.add.at(sums, residency, bytes_)
        released = residency == Place.RELEASED
        counted = self._counts[EventKind.PACKED] - self._counts[EventKind.RELEASED]
        held = {
            "page ids are not unique and increasing": (page[1:] > page[:-1]).all(),
            "a page is in no residency": (residency < ABSENT).all(),
            "a size or a cost is negative or not finite": (bytes_ >= 0).all()
            and np.isfinite(seconds).all()
            and (seconds >= 0).all(),
            "a page was used before it was packed": (
                table.last_use[rows] >= table.packed_at[rows]
            ).all(),
            f"bytes are {self._bytes_in[:-1]}, the pages make {sums[:-1]}": (
                # released rows go when the table is compacted, their bytes stay in the account
                self._bytes_in[: Place.RELEASED] == sums[: Place.RELEASED]
            ).all(),
            "released rows are miscounted": np.count_nonzero(released) == self._released_rows,
            "pages are missing": np.count_nonzero(~released) == counted,
        }
        faults = [fault for fault, well in held.items() if not well]
        if self._near is not None:
            faults += self._near.faults(page[~released], page[residency == Place.DROPPED])
        return faults


def _names_page(events: Events, page: int) -> BoolColumn:
    """Return which events name a page, as themselves or as the ancestor of another."""
    kind = events["kind"]
    named: BoolColumn = (events["page"] == page) & (kind < _PAGE_KINDS)
    named |= (events["key"] == page) & (kind == EventKind.EDGE)
    return named

"""The words that recorder, ledger and victim queue share: events, residencies, the order of victims.

Covers what crosses a layer: the layout of the events that C++ hands over, the residencies of a page
with their table of legal moves, and the order in which pages may leave. Does not cover the step
graph and plans, nor anything that holds a tensor: everything here is keys, bytes and seconds.

A *page* is one managed storage with live tickets. Page ids are int64, increase, and are never used
again in a session. A *tick* is the index of an op on the process-wide logical clock.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from delta_runtime.core.units import format_bytes

IntColumn: TypeAlias = npt.NDArray[np.int64]
FloatColumn: TypeAlias = npt.NDArray[np.float64]
BoolColumn: TypeAlias = npt.NDArray[np.bool_]
Events: TypeAlias = npt.NDArray[Any]  # a structured array of EVENT_DTYPE

ExitColumn: TypeAlias = npt.NDArray[np.int8]

UNKNOWN_KEY = -1
"""The structural key of a page that has none."""

UNKNOWN_TICK = -1
"""A next use that nobody knows."""


class EventKind(enum.IntEnum):
    """What happened; the fields that a kind does not name are zero.

    The kinds up to SWAPPED_IN concern one page, the later ones concern none.
    """

    PACKED = 0
    """A storage got its first ticket: `bytes`, `key` (structural key within the step or
    UNKNOWN_KEY), `seconds` (of the op that made it and of the unsaved ops on the way), `reason` 1
    when it has an admissible recipe, else 0."""
    USED = 1
    """A ticket was unpacked."""
    DROPPED = 2
    """The device copy was freed; a recompute will bring it back."""
    REBUILT = 3
    """It was recomputed; `seconds` as measured."""
    RELEASED = 4
    """The last ticket is gone; nothing follows for this page."""
    EDGE = 5
    """`page` was made from page `key`, its nearest saved ancestor."""
    INADMISSIBLE = 6
    """The recipe broke: the page may not be dropped any more."""
    SWAPPED_OUT = 7
    """The device copy was freed; a finished copy is in a tier below: in host memory, `reason` 0, or
    on disk, 1."""
    SWAPPED_IN = 8
    """It is on the device again; `seconds` of the copy alone. The copy below may be kept."""
    STEP = 9
    """A step ended."""
    RESCUE = 10
    """An allocation of `bytes` inside an op had to ask for room."""
    SHORTFALL = 11
    """A request for room could not be met; `bytes` were still missing."""
    REPLAYED = 12
    """An op ran again for a rebuild; `key` of a value that it made, `seconds` as measured, `reason`
    the low 31 bits of the value's fingerprint: it may be of an earlier step."""
    ALONE = 13
    """Nobody but the runtime holds the storage of `page` any more: it may leave from now on. Told of
    steps that are logged, once for each page."""


EVENT_DTYPE = np.dtype(
    [
        ("kind", "<i4"),
        ("reason", "<i4"),
        ("page", "<i8"),
        ("tick", "<i8"),
        ("bytes", "<i8"),
        ("key", "<i8"),
        ("seconds", "<f8"),
    ]
)
"""One event, 48 bytes, as the C++ event queue lays it out."""

TRACE_DTYPE = np.dtype(
    [
        ("kind", "<i8"),
        ("name", "<u8"),
        ("bytes", "<i8"),
        ("dropped_bytes", "<i8"),
        ("swapped_bytes", "<i8"),
        ("begin_s", "<f8"),
        ("end_s", "<f8"),
    ]
)
"""One row of the extension's trace; `TraceRow` in csrc/util/rows.h."""

PROFILE_DTYPE = np.dtype([("op", "<i8"), ("peak_bytes", "<i8")])
"""One point of the extension's profile of a step; `ProfilePoint` in csrc/util/rows.h."""


class Place(enum.IntEnum):
    """Where the bytes of a page are, by the ledger. Bytes are on the device until a copy of them is done."""

    RESIDENT = 0
    """On the device."""
    SWAPPED = 1
    """In a tier below the device, host memory or disk."""
    DROPPED = 2
    """Nowhere: they are to be recomputed."""
    RELEASED = 3
    """Nowhere, and nobody asks for them any more."""


LEGAL_MOVES: Mapping[Place, frozenset[Place]] = MappingProxyType(
    {
        Place.RESIDENT: frozenset({Place.SWAPPED, Place.DROPPED, Place.RELEASED}),
        Place.SWAPPED: frozenset({Place.RESIDENT, Place.RELEASED}),
        Place.DROPPED: frozenset({Place.RESIDENT, Place.RELEASED}),
        Place.RELEASED: frozenset(),
    }
)
"""From each residency, the residencies that may follow. A page begins RESIDENT."""


class Distance(enum.IntEnum):
    """What C++ divides a page's weight by at the moment it needs room; never less than one tick.

    The score is weight / max(1, distance), and the smallest score goes first.
    """

    NONE = 0
    """Nothing: the score is the weight."""
    STALENESS = 1
    """now - last use, in ticks."""
    NEXT_USE = 2
    """next use - now, in ticks; staleness where the next use is unknown."""


class Exit(enum.IntEnum):
    """How a page leaves device memory."""

    STAYS = -1
    """Not at all, by the plan; the victim queue may still take it when room is short."""
    DROP = 0
    """Freed, and recomputed."""
    SWAP = 1
    """Copied to a tier below, freed, and copied back."""


@dataclass(frozen=True, slots=True, eq=False)
class PublishQueue:
    """Publish these pages as the victims that C++ may drop by itself, without Python.

    Args:
        pages: Page ids, int64, contiguous; in the order of their score when the queue was made.
        weights: One float64 for each page, finite and >= 0; smallest score goes first.
        exits: One int8 for each page, an `Exit`: how it leaves.
        distance: What a weight is divided by when room is needed.
    """

    pages: IntColumn
    weights: FloatColumn
    exits: ExitColumn
    distance: Distance

    def __len__(self) -> int:
        """Return the number of pages in the queue."""
        return len(self.pages)


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A request for room that could not be met in full, by the account as it was at that moment.

    Args:
        tick: when it came.
        missing_bytes: what it still missed after everything else had been freed.
        movable_bytes: of resident pages that may be dropped, and were not: in use by the op, held by code
            outside of autograd, or not in the published queue yet.
        pinned_bytes: of resident pages that may not be dropped, for want of an admissible recipe.
        largest_pinned_bytes: of the largest of these.
    """

    tick: int
    missing_bytes: int
    movable_bytes: int
    pinned_bytes: int
    largest_pinned_bytes: int

    def text(self) -> str:
        """Return what was missing, and what stayed, in words."""
        pinned = format_bytes(self.pinned_bytes)
        if self.pinned_bytes > self.largest_pinned_bytes:
            pinned += f" (the largest of {format_bytes(self.largest_pinned_bytes)})"
        return (
            f"{format_bytes(self.missing_bytes)} were not found when room was asked for, while {pinned} could "
            f"not be recomputed and {format_bytes(self.movable_bytes)} were in use or held by others"
        )


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is known of the budgets of one recorded step.

    Args:
        lower_bytes: no budget below that holds.
        lower_op: the op that sets it.
        least_bytes: a budget that is expected to hold.
    """

    lower_bytes: int
    lower_op: str
    least_bytes: int

"""Filters: which page should go first, as pure functions over columns of numbers.

A filter returns one weight for each page and declares the distance that C++ divides it by at the
moment it needs room: score = weight / max(1, distance), smallest score first. Splitting the score
so keeps a published queue true while the clock runs on. Distances are counted in logical ticks, not
in wall time. Weights are finite and never negative; costs are seconds, sizes are bytes.

A new filter is one function and one line in `FILTERS`; tests/contracts/test_filters_contract.py
holds it to what it declares. Whether a page may be evicted at all is not a filter's business.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from delta_runtime.core.events import Distance, FloatColumn, IntColumn


class Column(enum.Flag):
    """The columns that a filter may look at."""

    NOTHING = 0
    BYTES = enum.auto()
    SECONDS = enum.auto()
    NEIGHBOURHOOD_SECONDS = enum.auto()
    LAST_USE = enum.auto()
    NEXT_USE = enum.auto()


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """What is known of each candidate; all columns have one entry for each page.

    Args:
        bytes: Size of the device copy in bytes, int64.
        seconds: Seconds to make the page again from its saved ancestors, float64.
        neighbourhood_seconds: Seconds of the dropped pages next to it, float64; zeros unless asked.
        last_use: Tick of the last use, int64.
        next_use: Tick of the next use, int64, negative where unknown; all unknown unless asked.
        now: The tick at which the columns were read.
    """

    bytes: IntColumn
    seconds: FloatColumn
    neighbourhood_seconds: FloatColumn
    last_use: IntColumn
    next_use: IntColumn
    now: int


WeightsFunction: TypeAlias = Callable[[Columns], FloatColumn]

_DISTANCE_COLUMNS: Mapping[Distance, Column] = MappingProxyType(
    {
        Distance.NONE: Column.NOTHING,
        Distance.STALENESS: Column.LAST_USE,
        Distance.NEXT_USE: Column.LAST_USE | Column.NEXT_USE,
    }
)


@dataclass(frozen=True, slots=True)
class Filter:
    """A named way to rank pages.

    Args:
        name: Its name in `FILTERS`.
        weights: The weight of each page; looks only at the columns named below.
        distance: What the weight is divided by when room is needed.
        falls_with: Columns of which a larger entry gives a smaller weight: the page goes earlier.
        rises_with: Columns of which a larger entry gives a larger weight: the page goes later.
    """

    name: str
    weights: WeightsFunction
    distance: Distance
    falls_with: Column = Column.NOTHING
    rises_with: Column = Column.NOTHING

    @property
    def needs(self) -> Column:
        """All columns that the score depends on, those of the distance included."""
        return self.falls_with | self.rises_with | _DISTANCE_COLUMNS[self.distance]

    def scores(self, columns: Columns) -> FloatColumn:
        """Return the score of each page at `columns.now`, by the formula that C++ uses.

        Example:
            >>> order = np.argsort(FILTERS["lru"].scores(columns))  # the first goes first
        """
        ticks = distances(self.distance, columns)
        return self.weights(columns) / np.maximum(ticks, 1)


def distances(distance: Distance, columns: Columns) -> IntColumn:
    """Return the distance of each page in ticks, before it is bounded below by one.

    Args:
        distance: The kind of distance.
        columns: The pages.

    Returns:
        int64; ones for `Distance.NONE`; for `Distance.NEXT_USE` the staleness where the next use is
        unknown.
    """
    if distance is Distance.NONE:
        return np.ones_like(columns.last_use)
    staleness = columns.now - columns.last_use
    if distance is Distance.STALENESS:
        return staleness
    return np.where(columns.next_use >= 0, columns.next_use - columns.now, staleness)


def delta(columns: Columns) -> FloatColumn:
    """1 / (bytes x staleness): DELTA's filter (Tang et al., arXiv 2203.15980)."""
    return 1.0 / np.maximum(columns.bytes, 1)


def dtr(columns: Columns) -> FloatColumn:
    """Seconds / (bytes x staleness), dropped neighbours included: h_DTR^eq (arXiv 2006.09616)."""
    return (columns.seconds + columns.neighbourhood_seconds) / np.maximum(columns.bytes, 1)


def dtr_local(columns: Columns) -> FloatColumn:
    """Seconds / (bytes x staleness), own seconds only: h_DTR^local (arXiv 2006.09616)."""
    return columns.seconds / np.maximum(columns.bytes, 1)


def msps(columns: Columns) -> FloatColumn:
    """Seconds / bytes: Capuchin's memory saved per second, inverted (Peng et al., ASPLOS 2020)."""
    return columns.seconds / np.maximum(columns.bytes, 1)


def lru(columns: Columns) -> FloatColumn:
    """1 / staleness: least recently used (h_LRU in arXiv 2006.09616)."""
    return np.ones_like(columns.seconds)


def largest(columns: Columns) -> FloatColumn:
    """1 / bytes: the largest page first (h_size in arXiv 2006.09616)."""
    return 1.0 / np.maximum(columns.bytes, 1)


def next_use(columns: Columns) -> FloatColumn:
    """1 / ticks until the next known use: farthest first (Belady, IBM Systems Journal 5, 1966)."""
    return np.ones_like(columns.seconds)


_COST = Column.SECONDS
_COSTS = Column.SECONDS | Column.NEIGHBOURHOOD_SECONDS

FILTERS: Mapping[str, Filter] = MappingProxyType(
    {
        each.name: each
        for each in (
            Filter("delta", delta, Distance.STALENESS, falls_with=Column.BYTES),
            Filter("dtr", dtr, Distance.STALENESS, falls_with=Column.BYTES, rises_with=_COSTS),
            Filter(
                "dtr_local",
                dtr_local,
                Distance.STALENESS,
                falls_with=Column.BYTES,
                rises_with=_COST,
            ),
            Filter("msps", msps, Distance.NONE, falls_with=Column.BYTES, rises_with=_COST),
            Filter("lru", lru, Distance.STALENESS),
            Filter("largest", largest, Distance.NONE, falls_with=Column.BYTES),
            Filter("next_use", next_use, Distance.NEXT_USE),
        )
    }
)
"""Every filter, by name; the contract suite runs over all of them."""

"""The columns of the ledger: one row for each page, ordered by page id."""

from __future__ import annotations

import numpy as np

from delta_runtime.core.events import BoolColumn, Events, FloatColumn, IntColumn, Place

ABSENT = len(Place)
"""The residency of a page that has a row but no PACKED event yet."""
FIRST_CAPACITY = 1024
"""Rows that there is room for at first."""


class PageTable:
    """Struct of arrays, one row for each page, ordered by page id; rows below `rows` are in use."""

    __slots__ = (
        "admissible",
        "bytes",
        "key",
        "last_use",
        "packed_at",
        "page",
        "residency",
        "rows",
        "seconds",
    )

    _columns = (
        ("page", np.int64),
        ("bytes", np.int64),
        ("key", np.int64),
        ("seconds", np.float64),
        ("packed_at", np.int64),
        ("last_use", np.int64),
        ("residency", np.int8),
        ("admissible", np.bool_),
    )

    def __init__(self) -> None:
        self.rows = 0
        self.page: IntColumn
        self.bytes: IntColumn
        self.key: IntColumn
        self.seconds: FloatColumn
        self.packed_at: IntColumn
        self.last_use: IntColumn
        self.residency: np.ndarray[tuple[int], np.dtype[np.int8]]
        self.admissible: BoolColumn
        for name, dtype in self._columns:
            setattr(self, name, np.zeros(FIRST_CAPACITY, dtype))

    def append(self, packed: Events) -> IntColumn:
        """Add one row for each PACKED event, keeping the order by page id; return ids now twice."""
        old, new = self.rows, self.rows + len(packed)
        if new > len(self.page):
            self._resize(max(new, 2 * len(self.page)))
        rows = slice(old, new)
        page = self.page
        page[rows] = packed["page"]
        self.bytes[rows] = packed["bytes"]
        self.key[rows] = packed["key"]
        self.seconds[rows] = np.fmax(packed["seconds"], 0.0)
        self.packed_at[rows] = self.last_use[rows] = packed["tick"]
        self.residency[rows] = ABSENT
        self.admissible[rows] = packed["reason"] != 0
        self.rows = new
        tail = page[max(old - 1, 0) : new]
        if (tail[1:] > tail[:-1]).all():
            return tail[:0]
        self._take(np.argsort(page[:new], kind="stable"))
        twice: IntColumn = page[1:new][page[1:new] == page[: new - 1]]
        return twice

    def find(self, pages: IntColumn) -> IntColumn:
        """Return the row of each page, -1 where there is none."""
        if not self.rows:
            return np.full(len(pages), -1)
        page = self.page[: self.rows]
        at = page.searchsorted(pages)
        at[at == self.rows] = 0
        at[page[at] != pages] = -1
        return at

    def forget(self, residency: Place) -> None:
        """Remove all rows in a residency."""
        self._take(np.flatnonzero(self.residency[: self.rows] != residency))

    def _take(self, rows: IntColumn) -> None:
        for name, _ in self._columns:
            column = getattr(self, name)
            column[: len(rows)] = column[rows]
        self.rows = len(rows)

    def _resize(self, capacity: int) -> None:
        for name, dtype in self._columns:
            column = np.zeros(capacity, dtype)
            column[: self.rows] = getattr(self, name)[: self.rows]
            setattr(self, name, column)

"""When the pages of a repeated step are used next, as the step before had it."""

from __future__ import annotations

import numpy as np

from delta_runtime.core.events import UNKNOWN_TICK, IntColumn


class NextUses:
    """When pages of a key are used, in ticks after their packing, as the last step had it.

    Counting from the packing of the page, and not of the step, keeps most of it right when ops come
    or go between steps or in the middle of one. Several pages of one key share their leads.
    """

    __slots__ = ("_firsts", "_leads", "_names", "_places", "_seen_keys", "_seen_leads", "_span")

    def __init__(self) -> None:
        self._seen_keys: list[IntColumn] = []
        self._seen_leads: list[IntColumn] = []
        self._names: IntColumn = np.empty(0, np.int64)  # distinct keys, increasing
        self._firsts: IntColumn  # place of each key's first lead, and one end mark
        self._leads: IntColumn  # ordered by key, then by size
        self._places: IntColumn  # index of the key * span + lead: increasing
        self._span: int

    def see(self, keys: IntColumn, leads: IntColumn) -> None:
        """Remember uses of the running step; negative keys say nothing."""
        known = keys >= 0
        self._seen_keys.append(keys[known])
        self._seen_leads.append(np.maximum(leads[known], 0))

    def end_step(self) -> None:
        """Learn from the step that ended. A step without a use (forward only) teaches nothing."""
        seen = [
            np.concatenate(each or [self._names[:0]])
            for each in (self._seen_keys, self._seen_leads)
        ]
        self._seen_keys, self._seen_leads = [], []
        keys, leads = seen
        if not len(keys):
            return
        order = np.lexsort((leads, keys))
        self._leads = leads[order]
        self._names, firsts, group = np.unique(keys[order], return_index=True, return_inverse=True)
        self._firsts = np.append(firsts, len(keys))
        self._span = int(leads.max()) + 2
        self._places = group * self._span + self._leads

    def next_lead(self, keys: IntColumn, at_least: IntColumn) -> IntColumn:
        """Return for each key its first lead >= `at_least`, UNKNOWN_TICK where there is none."""
        if not len(self._names):
            return np.full(len(keys), UNKNOWN_TICK)
        group = np.minimum(self._names.searchsorted(keys), len(self._names) - 1)
        place = self._places.searchsorted(group * self._span + np.clip(at_least, 0, self._span - 1))
        found = (self._names[group] == keys) & (place < self._firsts[group + 1])
        return np.where(found, self._leads[np.minimum(place, len(self._leads) - 1)], UNKNOWN_TICK)

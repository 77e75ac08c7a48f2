"""When swapped values leave and come back: both lanes, in order, laid over the recorded step.

Copies out are queued as forward lets go of values (what somebody else holds is not copied); a value is
away from when its copy is done. Copies in are laid backwards from when each is needed, so that
every one begins as late as the lane allows and none is late. No copy makes the step wait here: where
a lane is too slow the value is away for a shorter time, or not at all.

The clock is that of the recorded ops alone: what rebuilding adds gives the lanes more time than is
counted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_runtime.core.interrupts import unhurried
from delta_runtime.core.step_graph import Floats
from delta_runtime.core.transfer import Links
from delta_runtime.planners.greedy_drops import GreedyCover

_SPEED_COUNTED_ON = 0.9  # of what the lanes were seen to do
_PRICE_OF_LANES = 0.001
"""Seconds counted for each second of a lane that nobody waits for: no copy is quite free."""


@dataclass(frozen=True, slots=True)
class Span:
    """The ops during which a swapped value is away: first and one past the last. Empty: it never is."""

    begin: int
    end: int


class LaneTimes:
    """The two lanes over one recorded step.

    Args:
        cover: of the graph; its `begin` and `own_need` say when a value is read last and asked for.
        links: speed of the lanes; both must be known.
    """

    def __init__(self, cover: GreedyCover, links: Links) -> None:
        graph = cover.graph
        self.store_bytes = links.store_bytes
        seconds = np.nan_to_num(np.maximum(graph.op_seconds, 0))
        self._clock = np.concatenate([[0.0], np.cumsum(seconds)])
        bytes_ = cover.bytes / _SPEED_COUNTED_ON
        self.out_s = links.out_s(bytes_).tolist()
        self.in_s = links.in_s(bytes_).tolist()
        self.price_s: list[float] = (
            _PRICE_OF_LANES * (np.array(self.out_s) + np.array(self.in_s))
        ).tolist()
        self._ready = self._clock[np.minimum(cover.begin, graph.n_ops)].tolist()
        self._begin = cover.begin.tolist()
        self._clock_s = self._clock.tolist()

    def columns(self) -> list[Floats]:
        """Return the clock; of each saved value when it may leave, the seconds of its copies, and their price."""
        return [
            np.asarray(each)
            for each in (self._clock, self._ready, self.out_s, self.in_s, self.price_s)
        ]

    def spans(self, rows: Sequence[int], need: Sequence[int]) -> dict[int, Span]:
        """Return when each of some swapped values is away.

        Args:
            rows: rows of `graph.saved`.
            need: for every saved value the op behind which it is asked for.
        """
        gone_s: dict[int, float] = {}
        free_s = 0.0
        for row in unhurried(sorted(rows, key=self._begin.__getitem__)):
            free_s = max(free_s, self._ready[row]) + self.out_s[row]
            gone_s[row] = free_s
        starts: dict[int, float] = {}
        latest_s = float("inf")
        for row in unhurried(sorted(rows, key=lambda each: need[each], reverse=True)):
            latest_s = min(latest_s, self._clock_s[need[row] + 1]) - self.in_s[row]
            starts[row] = latest_s
        at = np.array([*gone_s.values()])
        away = np.searchsorted(self._clock, at, side="left").tolist()
        back = np.searchsorted(self._clock, np.array([starts[row] for row in gone_s]), side="right")
        return {
            row: Span(max(begin, self._begin[row]), end)
            for row, begin, end in unhurried(zip(gone_s, away, (back - 1).tolist(), strict=True))
        }

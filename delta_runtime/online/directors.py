"""Directors: how a page that leaves goes, by swapping or by dropping. Pure functions over columns.

A director compares seconds with seconds: what the lanes would take, or make the step wait, against
what running ops again would take. It says what is better; a page without a recipe is swapped and a
page that host memory has no room for is dropped, whatever it said.

Not covered: which page goes first (filters.py), and the choice for a step whose graph is known
(planners/), which looks at the whole step instead of at one page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from delta_runtime.core.events import Exit, ExitColumn
from delta_runtime.core.transfer import Links
from delta_runtime.online.filters import Columns

Director: TypeAlias = Callable[[Columns, Links], ExitColumn]


def _swap_where(better: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> ExitColumn:
    return np.where(better, np.int8(Exit.SWAP), np.int8(Exit.DROP))


def always_swap(columns: Columns, links: Links) -> ExitColumn:
    """Swap everything."""
    return np.full(len(columns.bytes), Exit.SWAP, np.int8)


def always_drop(columns: Columns, links: Links) -> ExitColumn:
    """Drop everything."""
    return np.full(len(columns.bytes), Exit.DROP, np.int8)


def delta_rule(columns: Columns, links: Links) -> ExitColumn:
    """Swap where 2 x bytes / bandwidth is less than the producing ops' seconds (arXiv 2203.15980)."""
    both_ways = links.out_s(columns.bytes) + links.in_s(columns.bytes)
    return _swap_where(both_ways < columns.seconds)


def free_time(columns: Columns, links: Links) -> ExitColumn:
    """Swap where both copies fit between two uses: Capuchin's free time (Peng et al., ASPLOS 2020).

    FT = (next use - last use) - seconds out - seconds in; at least 0 means that compute hides the
    copies. Where the next use is not known, where nothing is known of the clock, or where FT is
    negative, what costs less seconds wins.
    """
    known = (columns.next_use >= 0) & (links.tick_s > 0)
    between = (columns.next_use - columns.last_use) * links.tick_s
    both_ways = links.out_s(columns.bytes) + links.in_s(columns.bytes)
    queued = links.out_s(np.array([links.out_queued_bytes], np.float64))[0]
    hidden = known & (between >= both_ways + queued)
    return _swap_where(hidden | (both_ways < columns.seconds))


def stall(columns: Columns, links: Links) -> ExitColumn:
    """Swap where the wait that it would cause is shorter than running the ops again.

    The wait is the part of the copy out, behind what is queued, that is not over by the next use,
    and the copy in as far as the time until the next use does not hide it.
    """
    bytes_ = columns.bytes
    until = np.where(
        columns.next_use >= 0,
        np.maximum(columns.next_use - columns.now, 0),
        columns.now - columns.last_use,
    )
    slack_s = until * links.tick_s
    out_s = links.out_s(bytes_) + links.out_s(np.array([links.out_queued_bytes], np.float64))[0]
    in_s = links.in_s(bytes_) + links.in_s(np.array([links.in_queued_bytes], np.float64))[0]
    return _swap_where(np.maximum(out_s + in_s - slack_s, 0) < columns.seconds)


DIRECTORS: Mapping[str, Director] = MappingProxyType(
    {each.__name__: each for each in (always_swap, always_drop, delta_rule, free_time, stall)}
)
"""Every director, by name; tests/contracts/test_directors_contract.py runs over all of them."""

"""Policies: a named choice of a filter, of where pages may go, and of whether a plan is followed.

A policy only suggests; the ledger alone refuses. Users choose `auto`, `recompute`, `swap`,
`delta` or `off`; the others are there to be compared (`rotor`, `checkmate` and `min_peak` follow the planners of
the source papers), and the `stress_*` ones to break things in tests. A
new policy is one line in `POLICIES`.

Not covered: what a filter computes (filters.py), and how a plan is made or followed.
"""

from __future__ import annotations

import difflib
import enum
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from delta_runtime.core.errors import UsageError
from delta_runtime.core.events import Distance, Place
from delta_runtime.online.directors import DIRECTORS, Director
from delta_runtime.online.filters import FILTERS, Filter


class Stress(enum.Enum):
    """Evictions without need, for tests."""

    NONE = "none"
    """Evict only when room is needed."""
    DROP_ALL = "drop_all"
    """Drop every page that may be dropped, at every op boundary."""
    RANDOM = "random"
    """Drop a seeded random choice of pages, at random op boundaries."""
    SWAP_ALL = "swap_all"
    """Swap out every page, at every op boundary."""
    RANDOM_MIX = "random_mix"
    """Swap out, drop and bring back seeded random choices of pages, at random op boundaries."""


class DefaultWeight(enum.IntEnum):
    """Weight of a page that no policy has seen yet; `DefaultWeight` in csrc/walk/row.h."""

    SECONDS_PER_BYTE = 0
    PER_BYTE = 1
    ONE = 2


_SECONDS_PER_BYTE = DefaultWeight.SECONDS_PER_BYTE
_DEFAULT_WEIGHT: Mapping[str, DefaultWeight] = MappingProxyType(
    {
        "delta": DefaultWeight.PER_BYTE,
        "largest": DefaultWeight.PER_BYTE,
        "lru": DefaultWeight.ONE,
        "next_use": DefaultWeight.ONE,
    }
)


@dataclass(frozen=True, slots=True)
class Policy:
    """How to decide what leaves device memory.

    Args:
        name: Its name in `POLICIES`.
        description: One line for users.
        filter: What ranks the victims; None when nothing is ever evicted.
        plans: Whether a plan made from the recorded graph is followed once the graph repeats.
        planner: Who makes it: its name in `planners.registry`.
        needs: The package that the planner needs, if any.
        evicts_to: The residencies that a victim may go to, where the device has such a tier; empty
            when nothing is ever evicted. HOST stands for any tier below: the nearest with room.
        director: Chooses between them while no plan is followed; None where there is one only.
        stress: Whether pages are evicted without need.
        seed: Of the random choice of `Stress.RANDOM`.

    Raises:
        ValueError: There is a filter but nowhere to go, or the other way round.
    """

    name: str
    description: str
    filter: Filter | None
    plans: bool = False
    planner: str = "joint"
    needs: str = ""
    evicts_to: tuple[Place, ...] = (Place.DROPPED,)
    director: Director | None = None
    stress: Stress = Stress.NONE
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a policy that could rank but not evict, or evict but not rank."""
        if (self.filter is None) != (not self.evicts_to):
            raise ValueError(
                f"policy {self.name!r} needs both a filter and a residency, or neither"
            )

    @property
    def distance(self) -> Distance:
        """What weights are divided by when room is needed, as long as no ranking says otherwise."""
        if self.plans:
            return Distance.NEXT_USE
        return self.filter.distance if self.filter else Distance.NONE

    @property
    def default_weight(self) -> DefaultWeight:
        """How C++ weighs a page that no filter has ranked yet: by the nearest local formula."""
        return _DEFAULT_WEIGHT.get(self.filter.name if self.filter else "msps", _SECONDS_PER_BYTE)

    def on(self, tiers: frozenset[Place]) -> Policy:
        """Return this policy for a device with these tiers below it.

        Args:
            tiers: Residencies that pages may have beside RESIDENT.

        Raises:
            UsageError: The policy only goes where this device has nothing, or its planner's package is not installed.
        """
        if self.needs and importlib.util.find_spec(self.needs) is None:
            raise UsageError(
                f"policy {self.name!r} needs {self.needs}, which is not installed.",
                change="pip install \"delta-runtime[planners]\", or take policy='auto'.",
            )
        evicts_to = tuple(each for each in self.evicts_to if each in tiers)
        if self.evicts_to and not evicts_to:
            raise UsageError(
                f"policy {self.name!r} swaps, and this device has no tier below it.",
                change="Give host_budget, link_bytes_per_s, disk_budget or spill_dir, or take "
                "policy='recompute'.",
            )
        return replace(self, evicts_to=evicts_to)


_BOTH = (Place.SWAPPED, Place.DROPPED)


def _planned(name: str, description: str, needs: str = "") -> Policy:
    """Return the policy that follows the plans of the planner of the same name, which drops alone."""
    return Policy(name, description, FILTERS["msps"], plans=True, planner=name, needs=needs)


def _online(name: str, description: str) -> Policy:
    """Return the policy that drops by the filter of the same name and follows no plan."""
    return Policy(name, description, FILTERS[name])


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        each.name: each
        for each in (
            Policy(
                "auto",
                "swap and recompute, whatever costs less; follow a plan once the step repeats",
                FILTERS["msps"],
                plans=True,
                evicts_to=_BOTH,
                director=DIRECTORS["stall"],
            ),
            Policy(
                "recompute",
                "drop the fewest seconds per byte; follow a plan once the step repeats",
                FILTERS["msps"],
                plans=True,
            ),
            Policy("off", "observe only, evict nothing", None, evicts_to=()),
            Policy(
                "swap",
                "swap only; follow a plan once the step repeats",
                FILTERS["next_use"],
                plans=True,
                evicts_to=(Place.SWAPPED,),
            ),
            Policy(
                "delta",
                "large stale pages first, swapped where both copies take less than the op (DELTA)",
                FILTERS["delta"],
                evicts_to=_BOTH,
                director=DIRECTORS["delta_rule"],
            ),
            Policy(
                "capuchin",
                "swap what compute hides, else fewest seconds per byte first (Capuchin)",
                FILTERS["msps"],
                evicts_to=_BOTH,
                director=DIRECTORS["free_time"],
            ),
            Policy(
                "joint",
                "what auto does, under the name of its planner",
                FILTERS["msps"],
                plans=True,
                evicts_to=_BOTH,
                director=DIRECTORS["stall"],
            ),
            _planned("rotor", "the fastest schedule of a chain, as written (Rotor)"),
            _planned(
                "checkmate",
                "the exact plan of a contracted step, as written (Checkmate)",
                needs="scipy",
            ),
            _planned("min_peak", "least-peak checkpoints, objective B, as written"),
            _planned("min_peak_a", "least-peak checkpoints, objective A, as written"),
            _online(
                "dtr", "drop cheap, large, stale pages first, dropped neighbours counted (DTR)"
            ),
            _online("dtr_local", "drop cheap, large, stale pages first, neighbours ignored (DTR)"),
            _online("msps", "drop the fewest seconds per byte first, without a plan (Capuchin)"),
            _online("lru", "drop the least recently used page first"),
            _online("largest", "drop the largest page first"),
            _online("next_use", "drop the page whose next use is farthest away"),
            Policy(
                "stress_drop_all",
                "tests only: drop everything that can be dropped, all the time",
                FILTERS["lru"],
                stress=Stress.DROP_ALL,
            ),
            Policy(
                "stress_random",
                "tests only: drop a seeded random choice at random moments",
                FILTERS["lru"],
                stress=Stress.RANDOM,
            ),
            Policy(
                "stress_swap_all",
                "tests only: swap out everything, all the time",
                FILTERS["lru"],
                evicts_to=(Place.SWAPPED,),
                stress=Stress.SWAP_ALL,
            ),
            Policy(
                "stress_mix",
                "tests only: swap, drop and bring back random choices at random moments",
                FILTERS["lru"],
                evicts_to=_BOTH,
                director=DIRECTORS["stall"],
                stress=Stress.RANDOM_MIX,
            ),
        )
    }
)
"""Every policy, by name."""


def get_policy(name: str) -> Policy:
    """Return the policy of that name.

    Args:
        name: A key of `POLICIES`, in any case.

    Returns:
        The entry of `POLICIES`.

    Raises:
        UsageError: There is no such policy; names the closest ones and all of them. Nothing has
            changed.

    Example:
        >>> get_policy("recompute").plans
        True
    """
    text = name.strip().lower() if isinstance(name, str) else ""
    if text in POLICIES:
        return POLICIES[text]
    close = difflib.get_close_matches(text, POLICIES, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(close)}? " if close else ""
    raise UsageError(
        "policy: no such policy.",
        asked=repr(name),
        change=f"{hint}Choose one of {', '.join(POLICIES)}.",
    )

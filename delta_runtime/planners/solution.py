"""What a planner's `solve` on plain numbers returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Schedule = TypeVar("Schedule", covariant=True)


@dataclass(frozen=True, slots=True)
class Solution(Generic[Schedule]):
    """A schedule, what it takes, and how much it holds.

    Args:
        objective: what the planner makes least, in the unit of its arguments: seconds, or bytes.
        peak: most that the schedule holds at once, in the unit of the sizes that were given; found by replaying the
            schedule with these sizes, even where the planner itself rounded them.
        schedule: what to do, in the planner's own words.
        bound: no schedule of the planner's model has a smaller objective; None where that was not shown.
    """

    objective: float
    peak: float
    schedule: Schedule
    bound: float | None = None

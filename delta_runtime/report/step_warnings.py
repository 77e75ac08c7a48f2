"""What is told without being asked for: a budget that was passed, copies that failed. Each once in a runtime."""

from __future__ import annotations

import errno
import os

from delta_runtime.core.errors import PlannerInfeasible
from delta_runtime.core.events import Bounds
from delta_runtime.core.units import format_bytes
from delta_runtime.core.warn import warn
from delta_runtime.report.step_report import StepTotals

_DEVICE_FAILED = 1 << 16  # kDeviceFailed in csrc/tiers/lanes.h


class StepWarnings:
    """The warnings of one runtime.

    Args:
        budget_bytes: that it was given.
        spill_directory: of the file that it swaps to; None where it swaps to host memory alone.
    """

    def __init__(self, budget_bytes: int, spill_directory: str | None) -> None:
        self._budget_bytes = budget_bytes
        self._spill_directory = spill_directory
        self._told: set[str] = set()
        self._steps_over = 0

    def _first(self, what: str) -> bool:
        """Whether that was not told yet; it is now."""
        if what in self._told:
            return False
        self._told.add(what)
        return True

    def over_budget(self, peak_bytes: int, bounds: Bounds, limit_bytes: int) -> None:
        """Tell that a step has passed the budget: as soon as there is something to advise, or in the second such step.

        Args:
            peak_bytes: of that step.
            bounds: what is known of all steps; its least budget is 0 as long as nothing is.
            limit_bytes: what is kept to from now on; the budget, where that was not given up.
        """
        self._steps_over += 1
        if not (bounds.least_bytes or self._steps_over > 1) or not self._first("budget"):
            return
        numbers = [f"The lower bound of any budget is {format_bytes(bounds.lower_bytes)}"]
        numbers += [f" ({bounds.lower_op})"] if bounds.lower_op else []
        if bounds.least_bytes:
            numbers += [f", the least budget is about {format_bytes(bounds.least_bytes)}"]
        if limit_bytes > self._budget_bytes:
            numbers += [
                f". It cannot be met, and {format_bytes(limit_bytes)} is kept to from now on: "
                "less would make each step half as long again"
            ]
        warn(
            f"delta_runtime: the budget of {format_bytes(self._budget_bytes)} was passed: peak "
            f"{format_bytes(peak_bytes)}. {''.join(numbers)}. "
            "runtime.report() says more; strict=True makes this an error.",
        )

    def planner_infeasible(self, refusal: PlannerInfeasible) -> None:
        """Tell that the planner that was asked for has no plan."""
        if self._first("planner"):
            warn(
                f"delta_runtime: {refusal.problem} The joint plan is followed instead. To change that, "
                f"{refusal.change}."
            )

    def failed_copies(self, totals: StepTotals) -> None:
        """Tell that copies to a tier below failed, or those back.

        Args:
            totals: of all steps.
        """
        if totals.failed_writes and self._first("writing"):
            warn(
                f"delta_runtime: copying to {self._place(totals.write_error)} failed: "
                f"{_why(totals.write_error)}. What was not copied stayed or was recomputed; no more is "
                "swapped there.",
            )
        if totals.failed_reads and self._first("reading"):
            what = (
                f"{totals.lost_pages} saved tensors could not be recomputed; backward raised."
                if totals.lost_pages
                else "What could not be read was recomputed."
            )
            warn(
                f"delta_runtime: copying from {self._place(totals.read_error)} failed: "
                f"{_why(totals.read_error)}. {what}",
            )

    def _place(self, error: int) -> str:
        """Return where a copy failed with that error: only a disk, or the device itself, may fail."""
        if error == _DEVICE_FAILED or not self._spill_directory:
            return "a tier below"
        return f"the spill file in {self._spill_directory}"


def _why(error: int) -> str:
    if error == _DEVICE_FAILED:
        return "the device failed"
    if error == errno.EBADMSG:  # kOtherBytes in csrc/tiers/spill_file.h
        return "the bytes there are not those that were written"
    return os.strerror(error)

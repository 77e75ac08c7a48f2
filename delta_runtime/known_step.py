"""What is remembered of a step: its record, the plan that it follows, and what the last ones came to.

Covers one graph. Does not cover which graphs are remembered, nor when plans are made (plan_cache).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from delta_runtime.affordable_peak import AffordablePeak
from delta_runtime.core.errors import PlannerInfeasible
from delta_runtime.core.events import Bounds
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.plan_trials import PlanTrials

CALIBRATION_STEPS = 3
"""Steps of one graph whose op times are taken (the least of them counts) before its plan is final."""
_MOVED = 0.005  # share of the peak; where as much more or less persists, the record is out of date


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step came to.

    Args:
        fingerprint: of its forward.
        ops: number of its ops.
        begin_bytes: live at its first op.
        peak_bytes: the allocator's highest live bytes.
        seconds: of all of it.
        rebuild_s: of recomputing; 0 where nobody's clock shows it.
        whole: whether it had a backward, and ended.
        around_s: what entering and leaving took beside that, the making of plans left out, when it was
            seen last: of the step before this one.
    """

    fingerprint: int
    ops: int
    begin_bytes: int
    peak_bytes: int
    seconds: float
    rebuild_s: float
    whole: bool
    around_s: float = 0.0

    @property
    def all_s(self) -> float:
        """Seconds of the step with all that the runtime did for it."""
        return self.seconds + self.around_s


@dataclass
class KnownStep:
    """A step that was recorded.

    Args:
        graph: the record: the least seconds and the highest watermarks of all runs.
        plan: the one that is followed; None where there is none yet.
        runs: records that it is made of.
        ops: as they were counted.
        record: of the last run alone; None where that had no backward.
        bounds: of that, once somebody asked.
        seen_bytes: its peak.
        searched: whether `plan` is the final plan.
        plan_s: seconds that it took to make it.
        relief: what is kept to where the budget was given up.
        costs: of the last steps that kept to it.
        budget_bytes: that `plan` was made for.
        links: that it was made with.
        trials: what several plans have cost.
        outdated: whether the record that its plan is being made from is out of date.
        times_left: how many more times a record of it is looked for, once others were logged enough.
        refusal: that the planner has no plan for `budget_bytes`.
    """

    graph: StepGraph
    plan: Plan | None = None
    runs: int = 1
    ops: int = 0
    record: StepGraph | None = None
    bounds: Bounds | None = None
    seen_bytes: int = 0
    searched: bool = False
    plan_s: float = 0.0
    relief: AffordablePeak | None = None
    costs: list[StepCost] = field(default_factory=list)
    budget_bytes: int = 0
    links: Links | None = None
    trials: PlanTrials = field(default_factory=PlanTrials)
    outdated: bool = False
    times_left: int = CALIBRATION_STEPS
    refusal: PlannerInfeasible | None = None

    def settle(self) -> None:
        """Stay with the best of what was measured; with the plan there is if nothing was."""
        self.trials.settle()
        if self.trials.any:
            self.take_chosen()

    def take_chosen(self) -> None:
        """Follow the plan that was chosen by what was measured."""
        self.plan = self.trials.chosen
        self.runs = max(self.runs, CALIBRATION_STEPS)
        self.searched = True

    def record_again(self) -> None:
        """Have the next step logged, and a plan made from the least seconds that there are then."""
        self.searched, self.outdated = False, True
        self.runs = CALIBRATION_STEPS - 1
        self.times_left = CALIBRATION_STEPS

    def has_moved(self, begin_bytes: int) -> bool:
        """Whether so much more or less persists at the begin of a step that the record is out of date."""
        return abs(begin_bytes - self.graph.persistent_bytes) > _MOVED * self.graph.peak_bytes

"""Which of several plans of one graph is the best, by the seconds that steps took under them.

A plan reckons with the lanes' speed and with op times of its own. Where the step has to wait for a lane all the same,
it is recorded once more first: on a machine that was slow while it was calibrated, the lanes seemed to have more time
than they have. Then plans that ask less of the lanes are tried, at last one that asks nothing, and the one with the
least measured seconds stays. It is watched from then on: if each of some steps waited longer than it used to, the step
is recorded once more, and what comes of that is tried against it; later the old one is tried again, for what kept the
lanes busy may have passed.

Covers the choice. Does not cover how plans are made (planners), nor which graph a step has (plan_cache).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from delta_runtime.core.plan import Plan

MOST_TRIALS = 5
"""Plans of one graph that are tried, one after the other, where the step waits for lanes.

One more may follow that leaves the lanes alone.
"""
TRIAL_STEPS = 2
"""Steps of each; the least counts, for the first one under a new plan has costs of its own."""
WATCH_STEPS = 5
"""A plan in place is looked at after so many steps; twice as many each time that it had to be made again."""

_LEAST_WAIT = 0.002  # share of a step; who waits less has a plan that is good enough
_LONGER_WAIT = 0.01  # the same; a plan in place that comes to wait for so much longer is made again


class Next(enum.Enum):
    """What is to be done after a step was measured."""

    GO_ON = enum.auto()
    """Follow the same plan."""
    TAKE_CHOSEN = enum.auto()
    """Follow `PlanTrials.chosen`."""
    RECORD_AGAIN = enum.auto()
    """Record the step once more; the plan that is made from it is the next to be tried."""
    ASK_LESS_OF_LANES = enum.auto()
    """Try a plan that counts on slower lanes."""
    LEAVE_LANES_ALONE = enum.auto()
    """Try a plan without lanes, if it expects fewer seconds than `PlanTrials.least_s`; else settle."""


@dataclass(order=True)
class _Trial:
    """A plan, and what a step took that followed it."""

    seconds: float  # of rebuilding and of waiting
    wait_s: float
    plan: Plan = field(compare=False)


class PlanTrials:
    """The plans of one graph that were tried, and the one that is in place."""

    def __init__(self) -> None:
        self.settled = False
        """Whether one of them is in place; it is watched then."""
        self.chosen: Plan | None = None
        """The plan to follow, once one was chosen by what was measured."""
        self._steps: list[tuple[float, float]] = []  # of the plan that is followed: seconds, waits
        self._tried: list[_Trial] = []
        self._in_place: _Trial | None = None  # with the least that was seen of it
        self._best: _Trial | None = None  # of those that were in place before
        self._best_again = False  # is being tried
        self._recorded_again = False  # because a plan waited
        self._watch_steps = WATCH_STEPS

    @property
    def any(self) -> bool:
        """Whether any plan was measured."""
        return bool(self._tried)

    @property
    def least_s(self) -> float:
        """Least seconds of rebuilding and waiting that a step took under one of them; inf if none was tried."""
        return min((each.seconds for each in self._tried), default=float("inf"))

    def forget(self) -> None:
        """Forget what was measured: it was under another budget."""
        self._tried, self._in_place, self._best = [], None, None

    def begin(self, *, settled: bool) -> None:
        """Take in that a new plan is followed from now on.

        Args:
            settled: whether it stays without being measured.
        """
        self._steps, self.settled = [], settled

    def settle(self) -> None:
        """Choose the best of what was measured, and put it in place; the plan there is if nothing was."""
        self.settled, self._best_again = True, False
        if self._tried:
            self._in_place = min(self._tried)
            self.chosen = self._in_place.plan

    def measure(
        self, plan: Plan, rebuild_s: float, wait_s: float, *, step_s: float, lanes: bool
    ) -> Next:
        """Take in what a step took.

        Args:
            plan: that the step followed.
            rebuild_s: seconds of recomputing.
            wait_s: seconds that it waited for lanes.
            step_s: seconds of the step's ops.
            lanes: whether the plan uses any.
        """
        self._steps.append((rebuild_s + wait_s, wait_s))
        if len(self._steps) < (self._watch_steps if self.settled else TRIAL_STEPS):
            return Next.GO_ON
        steps, self._steps = self._steps, []
        if self.settled:
            return self._watch(plan, steps, step_s)
        trial = _Trial(*min(steps), plan)
        self._tried.append(trial)
        waits = lanes and trial.wait_s > _LEAST_WAIT * step_s
        if self._best_again or not waits:
            self.settle()
            return Next.TAKE_CHOSEN
        if not self._recorded_again:
            return self._record_again()
        return Next.ASK_LESS_OF_LANES if len(self._tried) < MOST_TRIALS else Next.LEAVE_LANES_ALONE

    def _record_again(self) -> Next:
        self.settled, self._recorded_again = False, True
        return Next.RECORD_AGAIN

    def _watch(self, plan: Plan, steps: list[tuple[float, float]], step_s: float) -> Next:
        """Look at the plan in place, and leave it for now where another may be better."""
        if self._in_place is None:
            return Next.GO_ON
        seconds, wait_s = min(each for each, _ in steps), min(wait_s for _, wait_s in steps)
        margin_s = _LONGER_WAIT * step_s
        waits_longer = wait_s > self._in_place.wait_s + margin_s
        self._in_place = replace(
            self._in_place,
            seconds=min(self._in_place.seconds, seconds),
            wait_s=min(self._in_place.wait_s, wait_s),
        )
        now = replace(self._in_place, seconds=seconds, wait_s=wait_s)
        if waits_longer:
            self._best = min(self._best or self._in_place, self._in_place)
            self._tried = [now]
            self._watch_steps *= 2
            return self._record_again()
        best = self._best
        if best is not None and best.plan is not plan and seconds > best.seconds + margin_s:
            # What kept the lanes busy may have passed.
            self._tried, self.chosen = [now], best.plan
            self.settled, self._best_again = False, True
            self._watch_steps *= 2
            return Next.TAKE_CHOSEN
        return Next.GO_ON

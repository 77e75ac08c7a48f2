"""The steps that have been seen, by their graph, and the plans made from them.

Covers when a step has to be logged, how several runs of one graph become one record, which of several
plans is the best by measurement, and the plans in the form in which the extension follows them. What
a plan says is `foresight`'s concern.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from delta_runtime.core.graph import Floats, Ints, StepGraph, Words
from delta_runtime.core.model import Exit, ExitColumn
from delta_runtime.decide.director import Links
from delta_runtime.decide.foresight import Foresight, foresee

CALIBRATION_STEPS = 3
"""Steps of one graph whose op times are taken (the least of them counts) before its plan is final."""
SEARCH_EFFORT = 4.0
"""How long the final plan of a graph is improved, in steps' worth of what it rebuilds."""
MOST_TRIALS = 5
"""Plans of one graph that are tried, one after the other, where the step waits for lanes.

One more may follow that leaves the lanes alone.
"""
TRIAL_STEPS = 2
"""Steps of each; the least counts, for the first one under a new plan has costs of its own."""
STEPS_TO_SETTLE = CALIBRATION_STEPS + 1 + (MOST_TRIALS + 1) * TRIAL_STEPS
"""The most that it takes to stay with one of them, where every step is the same and follows its plan."""
WATCH_STEPS = 5
"""A plan in place is looked at after so many steps; twice as many each time that it had to be made again."""
MOST_GRAPHS = 16
"""Graphs that are remembered: alternating input shapes keep their plans."""

_LEAST_WAIT = 0.002  # share of a step; who waits less has a plan that is good enough
_LONGER_WAIT = 0.01  # the same; a plan in place that comes to wait for so much longer is made again
_CAUTION = 0.8  # of the speed that the last plan gave the lanes, in the next one that is tried


class PlanTable(NamedTuple):
    """One plan as the extension reads it: columns over the values of a step."""

    fingerprints: Words
    weights: Floats
    rebuilt_weights: Floats
    use_offsets: Ints
    uses: Ints
    exits: ExitColumn
    prefetch_at: Ints


@dataclass(order=True)
class _Trial:
    """A plan, and what a step took that followed it."""

    seconds: float  # of rebuilding and of waiting
    wait_s: float
    foresight: Foresight = field(compare=False)


@dataclass
class _Known:
    graph: StepGraph
    foresight: Foresight | None = None
    runs: int = 1
    budget_bytes: int = 0  # that `foresight` was made for
    links: Links | None = None  # that it was made with
    steps: list[tuple[float, float]] = field(default_factory=list)  # of this plan: seconds, waits
    trials: list[_Trial] = field(default_factory=list)
    settled: bool = False  # on one of the trials
    in_place: _Trial | None = None  # that one, with the least that was seen of it
    best: _Trial | None = None  # of those that were in place before
    best_again: bool = False  # is being tried
    recorded_again: bool = False  # because a plan of it waited
    watch_steps: int = WATCH_STEPS

    def settle(self) -> None:
        """Stay with the best of what was measured; with the plan there is if nothing was."""
        self.settled, self.best_again = True, False
        if self.trials:
            self.in_place = min(self.trials)
            self.foresight = self.in_place.foresight
            self.runs = max(self.runs, CALIBRATION_STEPS)

    def record_again(self) -> None:
        """Have the next step logged; a plan made from the least seconds there are then is the next trial."""
        self.settled = False
        self.recorded_again = True
        self.runs = CALIBRATION_STEPS - 1

    def watch(self, steps: list[tuple[float, float]]) -> None:
        """Look at the plan in place, and leave it for now where another may be better.

        Args:
            steps: seconds of rebuilding and waiting, and of waiting alone, of the last steps.
        """
        if self.in_place is None:
            return
        seconds, wait_s = min(each for each, _ in steps), min(wait_s for _, wait_s in steps)
        margin_s = _LONGER_WAIT * self.graph.seconds
        waits_longer = wait_s > self.in_place.wait_s + margin_s
        self.in_place = replace(
            self.in_place,
            seconds=min(self.in_place.seconds, seconds),
            wait_s=min(self.in_place.wait_s, wait_s),
        )
        now = replace(self.in_place, seconds=seconds, wait_s=wait_s)
        if waits_longer:
            self.best = min(self.best or self.in_place, self.in_place)
            self.trials = [now]
            self.record_again()
        elif (
            self.best is not None
            and self.best.foresight is not self.foresight
            and seconds > self.best.seconds + margin_s
        ):
            # What kept the lanes busy may have passed.
            self.trials, self.foresight = [now], self.best.foresight
            self.settled, self.best_again = False, True
        if not self.settled:
            self.watch_steps *= 2


class KnownSteps:
    """Remembers the graphs of the latest steps.

    Args:
        plans: whether plans are made; else only the order of uses is told.
        drops, swaps: what plans may do with a value.
    """

    def __init__(self, *, plans: bool, drops: bool = True, swaps: bool = False) -> None:
        self._plans = plans
        self._drops = drops
        self._swaps = swaps
        self._known: OrderedDict[tuple[int, tuple[str, ...]], _Known] = OrderedDict()

    @property
    def foresight(self) -> Foresight | None:
        """The plan of the latest graph; None where there is none."""
        return next(reversed(self._known.values())).foresight if self._known else None

    @property
    def settled(self) -> bool:
        """Whether the plan of the latest graph stays, as long as it waits no longer than it does."""
        if not self._known:
            return False
        known = next(reversed(self._known.values()))
        tries = self._plans and self._drops and self._swaps
        return known.runs >= CALIBRATION_STEPS and (known.settled or not tries)

    def wants_log(self, *, missed: bool, went_on: bool = False) -> bool:
        """Whether the next step should be logged.

        Args:
            missed: whether the last step left the plans that there are.
            went_on: whether it had a backward. Where all that is known is a forward alone, the whole
                step is looked for, though not for ever: backward may run outside of the step's block.
        """
        if not self._known:
            return True
        latest = next(reversed(self._known.values()))
        half = len(latest.graph.uses) == 0 and latest.runs < 2 * CALIBRATION_STEPS
        return missed or (went_on and half) or latest.runs < CALIBRATION_STEPS

    def learn(self, graph: StepGraph, budget_bytes: int, links: Links | None = None) -> StepGraph:
        """Take the record of a step in and make, or improve, its plan.

        Args:
            graph: the record.
            budget_bytes: what may be live at any moment.
            links: what is known of the lanes now.

        Returns:
            The record with the least seconds and the highest watermarks of all runs of this graph.
        """
        if len(graph.uses):
            self._forget_beginnings(graph)
        # The same values may be saved by other ops: accumulating gradients adds some.
        key = (graph.fingerprint, graph.op_name)
        known = self._known.pop(key, None)
        for other in self._known.values():  # whose seconds a step's are is no longer known
            if not other.settled and (other.trials or other.runs >= CALIBRATION_STEPS):
                other.settle()
        if known is not None:
            graph = replace(
                graph,
                op_seconds=np.minimum(known.graph.op_seconds, graph.op_seconds),
                op_replay_seconds=np.fmin(known.graph.op_replay_seconds, graph.op_replay_seconds),
                op_watermark_bytes=np.maximum(
                    known.graph.op_watermark_bytes, graph.op_watermark_bytes
                ),
            )
            known = replace(known, graph=graph, runs=known.runs + 1)
        else:
            known = _Known(graph)
        self._known[key] = known
        while len(self._known) > MOST_GRAPHS:
            self._known.popitem(last=False)
        has_final_plan = known.runs > CALIBRATION_STEPS and known.budget_bytes == budget_bytes
        if self._plans and not has_final_plan:
            if known.budget_bytes != budget_bytes:
                known.trials, known.in_place, known.best = [], None, None
            known.links = links if self._swaps else None
            known.budget_bytes = budget_bytes
            known.steps, known.settled = [], len(self._known) > 1
            known.foresight = self._plan(known)
            if known.settled:
                known.settle()
        return graph

    def _forget_beginnings(self, graph: StepGraph) -> None:
        """A forward alone is no step of its own once the whole of it is known."""
        for key, known in list(self._known.items()):
            part = known.graph.value_fingerprint
            if len(known.graph.uses) == 0 and np.array_equal(
                part, graph.value_fingerprint[: len(part)]
            ):
                del self._known[key]

    def _plan(self, known: _Known) -> Foresight:
        return foresee(
            known.graph,
            known.budget_bytes,
            effort=SEARCH_EFFORT if known.runs >= CALIBRATION_STEPS else 0.0,
            drops=self._drops,
            links=known.links,
        )

    def judge(self, rebuild_s: float, wait_s: float) -> bool:
        """Take in what the final plan of the only known graph has cost, and try another where that pays.

        A plan reckons with the lanes' speed and with op times of its own. Where the step has to wait
        for a lane all the same, it is recorded once more first: on a machine that was slow while it was
        calibrated, the lanes seemed to have more time than they have. Then plans that ask less of the
        lanes are tried, at last one that asks nothing, and the one with the least measured seconds
        stays. It is watched from then on: if each of some steps waited longer than it used to, it is
        recorded once more, and what comes of that is tried against it; later the old one is tried
        again, for what kept the lanes busy may have passed. A new plan takes as long to make as the
        first one.

        Args:
            rebuild_s: seconds of recomputing in a whole step that followed the plan.
            wait_s: seconds that it waited for lanes.

        Returns:
            Whether the next step has another plan.
        """
        if len(self._known) != 1 or not (self._plans and self._drops and self._swaps):
            return False
        known = next(iter(self._known.values()))
        before = known.foresight
        if before is None or known.runs < CALIBRATION_STEPS:
            return False
        known.steps.append((rebuild_s + wait_s, wait_s))
        if len(known.steps) < (known.watch_steps if known.settled else TRIAL_STEPS):
            return False
        steps, known.steps = known.steps, []
        if known.settled:
            known.watch(steps)
            return known.foresight is not before
        trial = _Trial(*min(steps), before)
        known.trials.append(trial)
        swaps = known.links is not None and known.links.out_bytes_per_s > 0
        waits = swaps and trial.wait_s > _LEAST_WAIT * known.graph.seconds
        if known.best_again:
            known.settle()
        elif waits and not known.recorded_again:
            known.record_again()
        elif waits and known.links is not None and len(known.trials) < MOST_TRIALS:
            known.links = replace(
                known.links,
                out_bytes_per_s=known.links.out_bytes_per_s * _CAUTION,
                in_bytes_per_s=known.links.in_bytes_per_s * _CAUTION,
            )
            known.foresight = self._plan(known)
        elif waits:
            known.links = None
            known.foresight = self._plan(known)
            if known.foresight.predicted_seconds > min(known.trials).seconds:
                known.settle()
        else:
            known.settle()
        return known.foresight is not before

    def tables(self) -> list[PlanTable]:
        """The plans of all known graphs, latest first."""
        return [
            _table(known.graph, known.foresight)
            for known in reversed(self._known.values())
            if known.foresight is not None or not self._plans
        ]


def _table(graph: StepGraph, foresight: Foresight | None) -> PlanTable:
    counts = np.zeros(graph.n_values + 1, dtype=np.int64)
    counts[graph.saved + 1] = np.diff(graph.use_offsets)
    uses = [
        graph.uses[graph.use_offsets[page] : graph.use_offsets[page + 1]]
        for page in np.argsort(graph.saved, kind="stable")
    ]
    weights = foresight.weights if foresight else np.ones(graph.n_values)
    rebuilt_weights = foresight.rebuilt_weights if foresight else weights
    return PlanTable(
        fingerprints=np.ascontiguousarray(graph.value_fingerprint),
        weights=np.ascontiguousarray(weights),
        rebuilt_weights=np.ascontiguousarray(rebuilt_weights),
        use_offsets=np.cumsum(counts).astype(np.int32),
        uses=np.concatenate([np.empty(0, np.int64), *uses]).astype(np.int64),
        exits=foresight.exits if foresight else np.full(graph.n_values, Exit.STAYS, np.int8),
        prefetch_at=foresight.prefetch_at if foresight else np.full(graph.n_values, -1, np.int64),
    )

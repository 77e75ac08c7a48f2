"""The steps that have been seen, by their graph, and the plans made from them.

Covers when a step has to be logged, and how several runs of one graph become one record. What a plan says is
the planners' concern; which of several is the best by measurement is that of `plan_trials`, and when a budget is
given up that of `budget_relief`.

Note: plans that are made beside training
  1. One at a time, whatever graph it is for. Meanwhile steps follow the plan there is, and are not
     measured for `plan_trials`.
  2. `take_made` puts it in place, between two steps. It is for the graph as it was when it was begun: a
     graph that was recorded anew since then for a reason gets another one.

Note: graphs that save the same values
  1. Steps that differ in backward alone, as where gradients are added to, follow the plan of the one of them that was
     recorded last. It is judged by steps of its own graph; the plans of the others are not followed.
  2. A graph whose values are the first ones of a longer one, recorded later, follows the longer one's plan, and is not
     judged.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from delta_runtime.budget_relief import BudgetRelief
from delta_runtime.core.errors import PlannerInfeasible
from delta_runtime.core.events import Bounds
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.known_step import CALIBRATION_STEPS, KnownStep, StepCost
from delta_runtime.plan_trials import MOST_TRIALS, TRIAL_STEPS, Next
from delta_runtime.planners import joint_heuristic
from delta_runtime.planners.registry import PLANNERS
from delta_runtime.planning_time import PlanningTime
from delta_runtime.plans_beside import Made, MakePlan, PlansBeside

SEARCH_EFFORT = 4.0
"""How long the final plan of a graph is improved, in steps' worth of what it rebuilds."""
LONG_EFFORT = 16.0
"""The same where a core idles beside training and a step rebuilds so much that a better plan is worth it."""
LONG_SEARCH = 400_000_000
"""Units of work for which it is then looked when values are there, at the most; see `joint_heuristic.plan`."""
LONG_FROM_S = 0.5
"""Seconds that such a step rebuilds by the plan before, at the least."""
STEPS_TO_SETTLE = CALIBRATION_STEPS + 1 + (MOST_TRIALS + 1) * TRIAL_STEPS
"""The most that it takes to stay with one of them, where every step is the same and follows its plan."""
MOST_GRAPHS = 16
"""Graphs that are remembered: alternating input shapes keep their plans."""

_LEFT_FOR_NEXT = 2  # times as long as the last plan took there has to be, for one that is no must
_MOST_NEW = 3  # graphs in a row that nobody has seen before; more of them are not planned for
_REST = 7  # steps that are not logged then, after each that is
_CAUTION = 0.8  # of the speed that the last plan gave the lanes, in the next one that is tried

_Key = tuple[int, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class _Begun:
    """A plan that is being made.

    Args:
        key: of its graph.
        budget_bytes: that it is made for.
        final: whether it is the final plan of the graph.
        free: whether its seconds are not counted.
        trial: whether it is one more to be tried: others were measured.
        only_if_s: the final plan there is stays, unless this one expects no more seconds; None: it does not.
    """

    key: _Key
    budget_bytes: int
    final: bool = True
    free: bool = False
    trial: bool = False
    only_if_s: float | None = None


class PlanCache:
    """Remembers the graphs of the latest steps.

    Args:
        plans: whether plans are made; else only the order of uses is told.
        drops, swaps: what plans may do with a value.
        yields: whether a budget that cannot be met is given up.
        planning: how long plans may take; None for as long as they like.
        planner: who makes the final plan of a graph, by its name in `planners.registry`. Until then, and where that
            one has none, it is joint's.
        beside: makes them beside training; None: they are made at once.
    """

    def __init__(
        self,
        *,
        plans: bool,
        drops: bool = True,
        swaps: bool = False,
        yields: bool = False,
        planning: PlanningTime | None = None,
        planner: str = "joint",
        beside: PlansBeside | None = None,
    ) -> None:
        self._makes_plans = plans
        self._drops = drops
        self._swaps = swaps
        self._planning = planning or PlanningTime(limited=False)
        self._planner = planner
        self._beside = beside
        self._relief = BudgetRelief(drops=drops, plans=plans, planning=self._planning)
        self.margin_bytes = 0
        """What is kept below the budget, as long as that was not given up."""
        self.waits_for_margin = False
        """Whether more may be kept below it soon."""
        self._yields = yields
        self._begun: _Begun | None = None  # beside training
        self._known: OrderedDict[_Key, KnownStep] = OrderedDict()
        self._last: StepCost | None = None
        self._out_of_date = False  # the next step is to be recorded once more
        self._asked = 0  # times that it was; each time twice as many steps have to pass
        self._unrecorded = 0  # steps since the last record
        self._to_log = 0  # next steps, of which one is of a graph that was logged too seldom
        self._forgot = False  # whether there were more graphs than are remembered
        self._new = 0  # records in a row whose graph had not been seen before

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest graph; None where there is none."""
        return next(reversed(self._known.values())).plan if self._known else None

    @property
    def known_graphs(self) -> int:
        """How many graphs are remembered."""
        return len(self._known)

    @property
    def last_graph(self) -> StepGraph | None:
        """The record of steps like the last one, of as many ops; None where there is none."""
        last = self._last
        known = self._of(last) if last is not None else None
        alike = last is not None and known is not None and known.ops == last.ops
        return known.graph if known is not None and alike else None

    @property
    def refusal(self) -> PlannerInfeasible | None:
        """That the planner has no plan for a graph that is known; of several, the latest graph's. None where it has."""
        refusals = (known.refusal for known in reversed(self._known.values()))
        return next((each for each in refusals if each is not None), None)

    @property
    def settled(self) -> bool:
        """Whether the plan of the latest graph stays, as long as it waits no longer than it does."""
        if not self._known:
            return False
        known = next(reversed(self._known.values()))
        tries = self._makes_plans and self._drops and self._swaps
        return self._is_final(known) and (known.trials.settled or not tries)

    def wants_log(self, *, missed: bool, went_on: bool = False) -> bool:
        """Whether the next step should be logged.

        Args:
            missed: whether the last step left the plans that there are.
            went_on: whether it had a backward. Where all that is known is a forward alone, the whole
                step is looked for, though not for ever: backward may run outside of the step's block.
        """
        if not self._known:
            return True
        if self._never_again:
            return self._unrecorded >= _REST
        latest = next(reversed(self._known.values()))
        half = len(latest.graph.uses) == 0 and latest.runs < 2 * CALIBRATION_STEPS
        due = self._out_of_date or self._to_log > 0 or latest.runs < CALIBRATION_STEPS
        return missed or due or (went_on and half)

    @property
    def _never_again(self) -> bool:
        """Whether each step has a graph of its own, as where the data choose what is computed."""
        return self._new > _MOST_NEW

    @property
    def bounds(self) -> Bounds | None:
        """Of all whole steps that are known: the largest of each. None where there is none."""
        found = [self._relief.bounds_of(known) for known in self._known.values()]
        each = [bounds for bounds in found if bounds is not None]
        if not each:
            return None
        lower = max(each, key=lambda bounds: bounds.lower_bytes)
        return replace(lower, least_bytes=max(bounds.least_bytes for bounds in each))

    @property
    def yielded(self) -> bool:
        """Whether the budget was given up."""
        return self._relief.given_up

    @property
    def relieved(self) -> bool:
        """Whether, for the last step, what is kept to instead of the budget is found, and its record holds.

        It does not where more persists now than when the step was recorded, such as the optimizer's
        state: the bounds would be those of a step that is no more.
        """
        cost = self._last
        known = self._of(cost) if cost is not None else None
        return (
            self._relief.given_up
            and cost is not None
            and known is not None
            and (known.relief is None or known.relief.is_over)
            and not known.has_moved(cost.begin_bytes)
        )

    def limit_bytes(self, budget_bytes: int) -> int:
        """Return what the next step is to keep to: the budget less the margin, or more where it was given up."""
        if not self._relief.given_up:
            return budget_bytes - self.margin_bytes
        return self._relief.limit_bytes(budget_bytes, self._known.values())

    def saw(self, cost: StepCost) -> None:
        """Take in what a step came to, before its record if there is one."""
        self._last = cost
        self._to_log = max(self._to_log - 1, 0)

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
        cost = self._last if self._last and self._last.fingerprint == graph.fingerprint else None
        record = graph if len(graph.uses) else None
        self._out_of_date = False
        self._new = 0 if known is not None or record is None else self._new + 1
        if known is not None:
            if known.has_moved(graph.persistent_bytes):
                known.searched, known.outdated = False, True
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
            known = KnownStep(graph)
        known.record, known.bounds = record, None
        self._unrecorded = 0
        if cost is not None:
            known.ops, known.seen_bytes = cost.ops, cost.peak_bytes
        self._known[key] = known
        while len(self._known) > MOST_GRAPHS:
            _, forgotten = self._known.popitem(last=False)
            self._forgot = True
            self._relief.forget(forgotten)
        self._look_at_budget(known, budget_bytes)
        self._improve(known, self.limit_bytes(budget_bytes), links, recorded=True)
        return graph

    def tend(self, budget_bytes: int, links: Links | None = None) -> bool:
        """After a step that was not recorded: go on with what there was no time for.

        Returns:
            Whether the next step has another plan, or keeps to something else.
        """
        cost = self._last
        known = self._of(cost) if cost is not None else None
        plans = [each.plan for each in self._known.values()]
        limit_bytes = self.limit_bytes(budget_bytes)
        self._look_at_budget(known, budget_bytes)
        self._unrecorded += 1
        if cost is not None and cost.whole:
            # Another forward, or more that persists, such as the optimizer's state.
            moved = known is not None and known.has_moved(cost.begin_bytes)
            passes = self.yielded and cost.peak_bytes > limit_bytes
            if (moved or passes) and self._unrecorded > 2**self._asked:
                self._asked += 1
                self._out_of_date = True
        if known is not None:
            if self._comes_in_turn(known):
                known.times_left -= 1
                self._to_log = len(self._known) + 1
            elif self._waits_in_vain(known):
                known.settle()
            self._improve(known, self.limit_bytes(budget_bytes), links)
        return limit_bytes != self.limit_bytes(budget_bytes) or any(
            each.plan is not plan for each, plan in zip(self._known.values(), plans, strict=True)
        )

    def _comes_in_turn(self, known: KnownStep) -> bool:
        """Whether a step was logged too seldom because others, with which it comes in turn, were logged enough."""
        return self._is_short(known) and known.times_left > 0 and not self._forgot

    def _waits_in_vain(self, known: KnownStep) -> bool:
        """Whether a plan was to be tried that is made from one more record, for which nobody looks any more."""
        looked_for = known.times_left > 0 and not self._forgot
        return self._is_short(known) and not looked_for and known.trials.any

    def _is_short(self, known: KnownStep) -> bool:
        latest = next(reversed(self._known.values()))
        short = len(known.graph.uses) > 0 and known.runs < CALIBRATION_STEPS
        return short and known is not latest

    def is_of_last(self, graph: StepGraph) -> bool:
        """Whether this is the record of steps like the last one."""
        known = self._of(self._last) if self._last is not None else None
        return known is not None and known.graph is graph

    def _of(self, cost: StepCost) -> KnownStep | None:
        """Return what is known of a step that was not recorded."""
        alike = [
            known
            for known in reversed(self._known.values())
            if known.graph.fingerprint == cost.fingerprint
        ]
        # An optimizer's first step has other ops than the next; the forward is the same.
        return next((known for known in alike if known.ops == cost.ops), next(iter(alike), None))

    def _is_final(self, known: KnownStep) -> bool:
        return known.searched if self._makes_plans else known.runs >= CALIBRATION_STEPS

    def _improve(
        self, known: KnownStep, budget_bytes: int, links: Links | None, *, recorded: bool = False
    ) -> None:
        """Make a plan where one is due, and there is time for it."""
        if not self._makes_plans or (self._never_again and known.runs == 1):
            return
        if known.budget_bytes != budget_bytes:
            known.trials.forget()
            known.searched = False
        elif known.searched:
            return
        if self._begun is not None:
            return
        left_s = self._left_s
        final = known.runs >= CALIBRATION_STEPS
        free = known.plan is None and known.runs > 1
        if final and self._planner != "joint":
            may = True  # who asks for a planner by name waits for it
        elif final and known.plan is not None:
            first_s = known.plan.predicted_seconds
            search_s = joint_heuristic.search_seconds(SEARCH_EFFORT, first_s)
            may = left_s >= known.plan_s + search_s
        elif known.plan is None:
            may = free or left_s > 0
        else:
            may = recorded and left_s >= _LEFT_FOR_NEXT * known.plan_s
        if not may:
            return
        known.links = links if self._swaps else None
        known.budget_bytes = budget_bytes
        self._begin(known, _Begun(self._key_of(known), budget_bytes, final=final, free=free))

    def _key_of(self, known: KnownStep) -> _Key:
        return known.graph.fingerprint, known.graph.op_name

    def _begin(self, known: KnownStep, begun: _Begun) -> None:
        """Make a plan for a graph: at once, or beside training."""
        known.outdated = False
        make = self._make_plan(known)
        if self._beside is not None:
            self._begun = begun
            self._beside.begin(make)
            return
        before_s = self._planning.spent_s
        try:
            with self._planning.planning(free=begun.free):
                plan = make()
        except Exception as error:
            self._take_error(known, begun, error)
            return
        self._put_in_place(known, begun, plan, self._planning.spent_s - before_s)

    def _take_error(self, known: KnownStep, begun: _Begun, error: Exception) -> None:
        """Stay with the plan there is where the planner has none, or failed.

        Where that was to be the final plan, it is not asked again for this budget.

        Raises:
            Exception: the error, if it is any but that there is no plan.
        """
        known.searched = begun.final and not known.outdated
        known.trials.begin(settled=True)
        if not isinstance(error, PlannerInfeasible):
            raise error
        known.refusal = error.with_traceback(None)  # its frames would keep this object alive

    def take_made(self) -> bool:
        """Put the plan in place that was made beside training, if there is one.

        Returns:
            Whether the next step has another plan.

        Raises:
            Exception: what kept it from being made.
        """
        made = self._beside.take() if self._beside is not None else None
        begun = self._begun
        if made is None or begun is None:
            return False
        self._begun = None
        self._planning.planned_beside(made.seconds, free=begun.free)
        return self._take_in(made, begun)

    def _take_in(self, made: Made, begun: _Begun) -> bool:
        known = self._known.get(begun.key)
        if known is None or known.budget_bytes != begun.budget_bytes:
            return False
        if made.error is not None:
            self._take_error(known, begun, made.error)
        if made.plan is None:
            return False
        self._put_in_place(known, begun, made.plan, made.seconds)
        return True

    def _put_in_place(self, known: KnownStep, begun: _Begun, plan: Plan, seconds: float) -> None:
        known.plan, known.refusal = plan, None
        if begun.trial:
            if begun.only_if_s is not None and plan.predicted_seconds > begun.only_if_s:
                known.settle()
            return
        known.plan_s = seconds
        known.searched = begun.final and not known.outdated
        known.trials.begin(settled=False)

    def _look_at_budget(self, known: KnownStep | None, budget_bytes: int) -> None:
        """Have the budget given up where the last step shows that it cannot be met; see `BudgetRelief`."""
        cost = self._last
        if self._yields and cost is not None and cost.whole:
            steps = list(self._known.values())
            self._relief.saw(
                cost,
                known,
                steps,
                budget_bytes,
                repeats=not self._never_again,
                waits=self.waits_for_margin,
            )

    def _forget_beginnings(self, graph: StepGraph) -> None:
        """Forget steps of a forward alone, once the whole that it begins is known."""
        for key, known in list(self._known.items()):
            part = known.graph.value_fingerprint
            if len(known.graph.uses) == 0 and np.array_equal(
                part, graph.value_fingerprint[: len(part)]
            ):
                del self._known[key]

    def _make_plan(self, known: KnownStep) -> MakePlan:
        if self._planner != "joint" and known.runs >= CALIBRATION_STEPS and not self.yielded:
            return partial(_by_name, self._planner, known.graph, known.budget_bytes, known.links)
        effort, most_search = self._search(known)
        return partial(
            joint_heuristic.plan,
            known.graph,
            known.budget_bytes,
            drops=self._drops,
            links=known.links,
            effort=effort,
            most_search=most_search,
        )

    @property
    def _left_s(self) -> float:
        planning = self._planning
        return planning.left_s if self._beside is None else planning.left_beside_s

    def _search(self, known: KnownStep) -> tuple[float, int]:
        """Return `effort` and `most_search` of `joint_heuristic.plan` for a plan that is due."""
        if known.runs < CALIBRATION_STEPS or self.yielded:
            return 0.0, joint_heuristic.MOST_TO_SEARCH
        rebuild_s = known.plan.predicted_seconds if known.plan is not None else 0.0
        if rebuild_s >= LONG_FROM_S and self._planning.core_idles():
            search_s = joint_heuristic.search_seconds(LONG_EFFORT, rebuild_s, LONG_SEARCH)
            if self._left_s >= search_s:
                return LONG_EFFORT, LONG_SEARCH
        return SEARCH_EFFORT, joint_heuristic.MOST_TO_SEARCH

    def judge(self, plan: Plan | None, rebuild_s: float, wait_s: float) -> bool:
        """Take in what the final plan of a graph has cost, and try another where that pays.

        A new plan takes as long to make as the first one; see `plan_trials`. Beside other graphs, which want plans
        too, one that asks less of the lanes is tried only where there is time for it.

        Args:
            plan: that a whole step followed.
            rebuild_s: seconds of recomputing in it.
            wait_s: seconds that it waited for lanes.

        Returns:
            Whether the next step of that graph has another plan.
        """
        known = next((each for each in self._known.values() if each.plan is plan), None)
        if plan is None or known is None or not (self._makes_plans and self._drops and self._swaps):
            return False
        if not known.searched or self._begun is not None:
            return False
        links = known.links
        lanes = links is not None and links.out_bytes_per_s > 0
        step_s = known.graph.seconds
        then = known.trials.measure(plan, rebuild_s, wait_s, step_s=step_s, lanes=lanes)
        makes_another = then in (Next.ASK_LESS_OF_LANES, Next.LEAVE_LANES_ALONE)
        if makes_another and len(self._known) > 1 and self._left_s < known.plan_s:
            known.settle()
        elif then is Next.TAKE_CHOSEN:
            known.take_chosen()
        elif then is Next.RECORD_AGAIN:
            known.record_again()
        elif then is Next.ASK_LESS_OF_LANES and links is not None:
            out, in_ = links.out_bytes_per_s * _CAUTION, links.in_bytes_per_s * _CAUTION
            self._try(known, replace(links, out_bytes_per_s=out, in_bytes_per_s=in_))
        elif then is Next.LEAVE_LANES_ALONE:
            self._try(known, None, only_if_s=known.trials.least_s)
        return known.plan is not plan

    def _try(self, known: KnownStep, links: Links | None, only_if_s: float | None = None) -> None:
        known.links = links
        begun = _Begun(self._key_of(known), known.budget_bytes, trial=True, only_if_s=only_if_s)
        self._begin(known, begun)

    def plans(self) -> list[tuple[StepGraph, Plan]]:
        """Return the known graphs that have a plan, latest first, each with it.

        Where no plans are made, each has one that moves nothing: what it tells is when values are asked for.
        """
        known = [(known.graph, known.plan) for known in reversed(self._known.values())]
        return [
            (graph, plan or Plan.moving_nothing(graph))
            for graph, plan in known
            if plan is not None or not self._makes_plans
        ]


def _by_name(planner: str, graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    """Return the plan of a planner.

    Raises:
        PlannerInfeasible: it has none for this budget.
    """
    result = PLANNERS[planner].plan(graph, budget_bytes, links)
    if result.plan is None:
        raise PlannerInfeasible(planner, budget_bytes, result.least_budget_bytes or 0)
    return result.plan

"""The steps of a runtime: where each begins and ends, what it came to, and what is learned from it.

Note: steps and their boundaries
  1. Inside `runtime.step()` the step is the block. While the runtime is only entered, a step ends
     when something runs after backward, and a new one begins after an optimizer stepped. A backward
     that keeps its graph (retain_graph, create_graph) ends nothing: another one of the step follows.
  2. An optimizer's step is observed but not taped: it holds nothing evictable. Where something is
     still dropped when it begins, the weights that recipes read get a copy before they change.
  3. A step whose forward has been seen before follows the plan made from it; otherwise the policy's
     filter decides online.
  4. Plans are made beside training (`plans_beside`); one that is ready is followed from the next step on. The
     step that goes on keeps to the plan that it began with.

Covers one session's steps. Does not cover entering and leaving (runtime), nor what a user sees of a step (report).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from delta_runtime import raw_access, torch_hooks
from delta_runtime.act.plans import follow
from delta_runtime.act.tiers import Tiers
from delta_runtime.allocator_margin import AllocatorMargin
from delta_runtime.budget_relief import DIFFERS_BYTES
from delta_runtime.config import Config
from delta_runtime.core.errors import BudgetInfeasible, RecomputeMismatch
from delta_runtime.core.events import TRACE_DTYPE, Bounds, Distance, Place, Shortfall
from delta_runtime.core.interrupts import Interrupted
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.units import format_bytes
from delta_runtime.core.warn import warn
from delta_runtime.device import core_idles
from delta_runtime.extension import _C, shielded
from delta_runtime.idle_steps import IdleSteps
from delta_runtime.known_step import StepCost
from delta_runtime.online.policies import Policy, Stress
from delta_runtime.plan_cache import PlanCache
from delta_runtime.planning_time import PlanningTime
from delta_runtime.plans_beside import PlansBeside
from delta_runtime.pump import Pump
from delta_runtime.record.step_log import read_step_graph
from delta_runtime.report.step_report import StepTotals
from delta_runtime.report.step_warnings import StepWarnings
from delta_runtime.report.trace import Trace
from delta_runtime.standing_aside import StandingAside

logger = logging.getLogger(__name__)

_DEAR = 0.5
"""Of the seconds of a step's ops: what a plan may take beside them so that an allocator has room for its fragments."""
_MOST_TO_JUDGE = 16
"""Steps of an accelerator whose seconds are waited for."""


class Steps:
    """The steps of one session, one after the other.

    Args:
        session: of the runtime.
        config: its settings.
        policy: how it decides.
        device: that it manages.
        budget_bytes: that it was given.
        tiers: below the device.
        after_step: called behind each step that was observed.
    """

    def __init__(
        self,
        session: _C.Session,
        config: Config,
        policy: Policy,
        device: torch.device,
        budget_bytes: int,
        tiers: Tiers,
        after_step: Callable[[], None],
    ) -> None:
        self._session = session
        self._config = config
        self._policy = policy
        self._on_cpu = device.type == "cpu"
        self._after_step = after_step
        self._budget_bytes = budget_bytes
        self.pump = Pump(session, policy, tiers, checked=config.check)
        self.totals = StepTotals()
        """Of all steps."""
        self.last: StepTotals | None = None
        """Of the last one."""
        self.graph: StepGraph | None = None
        """The record of the step that was logged last, with the least seconds of all runs of it."""
        self.shortfall: Shortfall | None = None
        """The worst request for room of all steps that could not be met; None where all were."""
        self.limit_bytes = budget_bytes
        """What is kept to: the budget, or a higher peak where that cannot be met."""
        self.beside = PlansBeside() if config.planning == "beside" else None
        """Makes plans beside training; None where they are made between steps."""
        idles = core_idles(device) if self.beside is not None else lambda: False
        self.planning = PlanningTime(core_idles=idles)
        self.last_planning_s = 0.0
        """Seconds of planning behind the last step, which the next one waited for."""
        self.plans = self._new_plans()
        """The graphs that are known, and their plans."""
        self.margin = AllocatorMargin(
            budget_bytes, plans=policy.plans and policy.planner == "joint" and not self._on_cpu
        )
        """What plans leave to an accelerator's allocator."""
        self.aside = StandingAside()
        """Which steps are left alone."""
        self.idle = IdleSteps(budget_bytes)
        """Which steps are idle."""
        self.around_s = 0.0
        """Seconds that entering and leaving the last step took, planning left out."""
        self.in_block = False
        """Whether the step that goes on is the block of a `runtime.step()`."""
        self.begin_s = 0.0
        """When the step that goes on began, by `time.perf_counter`."""
        self._logged = False
        self._woke = False  # in the step that goes on, which began as an idle one
        self._following: list[tuple[StepGraph, Plan]] = []  # as they were handed to the session
        self._to_judge: dict[int, Plan] = {}  # followed in a step whose seconds are not known yet
        self._warnings = StepWarnings(budget_bytes, tiers.spill.directory if tiers.spill else None)
        self.trace = Trace(config.trace) if config.trace else None
        """Of the last steps; None where none was asked for."""
        session.set_tracing(self.trace is not None)

    @property
    def ranks(self) -> bool:
        """Whether Python ranks online: there is a filter and no stress."""
        return self._policy.filter is not None and self._policy.stress is Stress.NONE

    def _new_plans(self) -> PlanCache:
        policy = self._policy
        return PlanCache(
            plans=policy.plans,
            drops=Place.DROPPED in policy.evicts_to,
            swaps=Place.SWAPPED in policy.evicts_to,
            yields=bool(policy.evicts_to) and self.ranks and not self._config.strict,
            planning=self.planning,
            planner=policy.planner,
            beside=self.beside,
        )

    # ------------------------------------------------------------------ where they begin and end

    def begin(self) -> None:
        """Begin a step."""
        self.take_plan()
        _C.release_repointed()
        self._session.set_taping(True)  # an optimizer that raised has left it off
        missed = self.last is not None and self.last.plan_misses > 0
        went_on = self.last is not None and self.last.managed_unpacks > 0
        self._logged = self.plans.wants_log(missed=missed, went_on=went_on)
        if self._logged:  # what happened before is not of the step that is logged
            self._session.set_logging(False)
            self.pump.drain()
        self._session.set_logging(self._logged)
        raw_access.take_back()
        if self.margin.measures:
            with contextlib.suppress(RuntimeError):  # while a graph is captured
                torch.accelerator.empty_cache()
            self.margin.measure()
        torch_hooks.choose_hooks()
        self._session.begin_step()
        self.begin_s = time.perf_counter()

    def take_plan(self) -> None:
        """Follow the plan from now on that was made beside training, if there is one and no step goes on."""
        if self.beside is None or self._session.packs() != self.totals.packs:
            return
        try:
            if self.plans.take_made():
                self._follow()
        except Exception:
            logger.exception("delta_runtime: no plan could be made for this step")
        self._warn_of_refusal()

    def _follow(self) -> None:
        plans = self.plans.plans()
        follow(self._session, plans)
        self._following = plans

    def _warn_of_refusal(self) -> None:
        refusal = self.plans.refusal
        if refusal is not None and not self._config.strict:
            self._warnings.planner_infeasible(refusal)

    def raise_refusal(self) -> None:
        """Raise that the planner has no plan for the budget, where that is an error.

        Raises:
            PlannerInfeasible: it said so, and the runtime is strict.
        """
        if self._config.strict and self.plans.refusal is not None:
            raise self.plans.refusal

    def wait_for_plan(self, timeout_s: float | None = None) -> bool:
        """Wait for the plan that is being made beside training; `take_plan` takes it.

        Returns:
            Whether none is being made any more.
        """
        return self.beside is None or self.beside.wait(timeout_s)

    def end_and_begin(self) -> None:
        """End a step, and begin the next."""
        self.finish()
        self.begin()

    def on_step_over(self, _: int) -> None:
        """End it and begin the next where something ran behind a backward; inside of a block, the block goes on."""
        if not self.in_block:
            self.end_and_begin()

    @shielded
    def before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take in that an optimizer is about to step."""
        if any(callable(a) for a in args[1:]) or callable(kwargs.get("closure")):
            return  # a closure runs forward and backward inside the optimizer's step
        self.judge()
        self._session.forget_past()
        if self._session.levels().dropped_now_bytes:
            # Not every optimizer writes through the dispatcher, where we would see it.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._session.prepare_write(parameter)
        self._session.set_taping(False)

    @shielded
    def after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Take in that it has stepped."""
        self._session.set_taping(True)
        self.on_step_over(0)
        self.judge()  # of a closure

    def judge(self) -> None:
        """On an accelerator, learn if what came back is what went; waits for it where there is something to learn.

        Raises:
            RecomputeMismatch: something came back different, and the gradients were computed with it.
        """
        if not self._on_cpu and (text := self._session.judge()):
            raise RecomputeMismatch(text)

    def warn_of_mismatch(self) -> None:
        """Return what `judge` would raise, where another error is on its way; whoever comes next raises it."""
        if not self._on_cpu and (text := self._session.judge(later=True)):
            with contextlib.suppress(Warning):  # where warnings are errors
                warn(text)

    def begin_alone(self) -> None:
        """Begin a step of which nothing is observed; for what it does, the runtime is not there."""
        self.begin_s = time.perf_counter()
        self._session.begin_alone()

    def finish_alone(self, *, whole: bool, idle: bool) -> int:
        """End such a step.

        Args:
            whole: whether it did not raise.
            idle: whether it was an idle one.

        Returns:
            Its peak, in bytes.
        """
        seconds = time.perf_counter() - self.begin_s
        peak_bytes: int = self._session.alone_peak_bytes()
        totals = self.totals
        self.totals = replace(
            totals,
            steps=totals.steps + 1,
            alone_steps=totals.alone_steps + (not idle),
            idle_steps=totals.idle_steps + idle,
            over_budget_steps=totals.over_budget_steps + (peak_bytes > self._budget_bytes),
            peak_bytes=max(totals.peak_bytes, peak_bytes),
        )
        self.planning.trained(seconds)
        if idle:
            self.idle.was_idle()
            if peak_bytes > self._budget_bytes:
                self._warnings.over_budget(peak_bytes, self.bounds(), self.limit_bytes)
                self._end_idleness(passed=True)
            elif not whole:  # it may have run out of memory: the next one is observed
                self._end_idleness()
        elif whole:
            self.aside.was_alone(seconds)
        return peak_bytes

    def wake(self) -> None:
        """Begin the rest of an idle step as an observed one."""
        self._woke = True
        self.begin()

    def finish(self, *, whole: bool = True, marked: bool = False) -> None:
        """Close the step's account, unless nothing was saved in it, and it was observed from its begin.

        Args:
            whole: whether there is something to learn from it: it did not raise.
            marked: whether it was a block of its own, with nothing entered around it.
        """
        if not self._on_cpu:
            self._session.judge(later=True)
        if self._session.packs() == self.totals.packs and not self._woke:
            return
        levels = self._session.levels()
        self._session.end_step()
        counters = self._session.counters()
        seconds = time.perf_counter() - self.begin_s
        self.planning.trained(seconds)
        self.pump.end_step()
        self._take_in(self.pump.take_shortfall())
        step_peak_bytes = levels.step_peak_bytes
        over = bool(self._policy.evicts_to) and step_peak_bytes > self._budget_bytes
        before = self.totals
        self.totals = StepTotals.from_counters(
            counters,
            steps=before.steps + 1,
            alone_steps=before.alone_steps,
            idle_steps=before.idle_steps,
            over_budget_steps=before.over_budget_steps + over,
            peak_bytes=max(before.peak_bytes, step_peak_bytes),
            uncounted_bytes=levels.uncounted_bytes,
        )
        self.last = self.totals.since(before, peak_bytes=step_peak_bytes)
        before_s = self.planning.spent_s
        try:
            if whole:
                with self.planning.planning():
                    self._learn(self.last, seconds, marked=marked)
        except Interrupted:
            self.stop_planning()
            self.plans = self._new_plans()  # what is left of it is half of a plan
            self._keep_margin()
        except Exception:
            # A plan only makes steps faster; without it the filter decides online.
            logger.exception("delta_runtime: no plan could be made for this step")
        self.pump.take_logged()
        self.last_planning_s = self.planning.spent_s - before_s
        if over:
            self._warnings.over_budget(step_peak_bytes, self.bounds(), self.limit_bytes)
        if not whole or (over and self._woke):
            self._end_idleness(passed=over and self._woke)
        self._woke = False
        self._warn_of_refusal()
        self._warnings.failed_copies(self.totals)
        if self.trace is not None:
            self.trace.add_step(np.frombuffer(self._session.drain_trace(), dtype=TRACE_DTYPE))
        self._after_step()

    def _take_in(self, shortfall: Shortfall | None) -> None:
        worst = self.shortfall
        if shortfall and (worst is None or shortfall.missing_bytes > worst.missing_bytes):
            self.shortfall = shortfall

    def stop_planning(self) -> None:
        """Stop making a plan beside training, and forget it."""
        if self.beside is not None:
            self.beside.stop()

    def end(self) -> None:
        """Write the trace, where one was asked for. No step follows."""
        self.stop_planning()
        if self.trace is not None:
            self.trace.write(self._session.logged_names())

    # ------------------------------------------------------------------ what is learned

    def _learn(self, last: StepTotals, seconds: float, *, marked: bool) -> None:
        """Take the step in, with its record if there is one, and tell the session what comes of it."""
        cost = StepCost(
            fingerprint=int(self._session.fingerprint()),
            ops=last.ops,
            begin_bytes=last.begin_bytes,
            peak_bytes=last.peak_bytes,
            seconds=seconds,
            rebuild_s=last.rebuild_s if self._on_cpu else 0.0,
            whole=last.managed_unpacks > 0,
            around_s=self.around_s,
        )
        self.plans.saw(cost)
        if not self._on_cpu and self._policy.evicts_to and not self.plans.yielded:
            self._see_allocator(last)
        changed = self._judge_plan(last)
        events = self.pump.take_logged() if self._logged else None
        graph = read_step_graph(self._session, events) if events is not None else None
        if graph is not None and len(graph.saved) > 0:
            links = self.pump.links()
            self.graph = graph = self.plans.learn(graph, self._budget_bytes, links)
            self.pump.tick_s = graph.seconds / graph.n_ops if graph.n_ops else 0.0
            changed = self._policy.plans or self.pump.distance is Distance.NEXT_USE
        elif not self._logged:
            changed |= self.plans.tend(self._budget_bytes, self.pump.links())
        if changed:
            self._follow()
        limit_bytes = self.plans.limit_bytes(self._budget_bytes)
        if limit_bytes != self.limit_bytes:
            self.limit_bytes = limit_bytes
            self.idle.keep_to(min(limit_bytes, self._budget_bytes))
            self._session.set_budget(limit_bytes)
        if marked and self._on_cpu and self._may_look_away:
            self.aside.saw(cost, settled=self.plans.relieved)
        if marked and self._may_look_away:
            self._see_whether_idle(cost, last)

    def _see_allocator(self, last: StepTotals) -> None:
        """Learn what the allocator takes beside what lives, and keep room for it."""
        reserved_bytes, retries = self._session.allocator_bytes()
        followed = self._followed_plan(last)
        plan = followed if followed is self.plans.plan else None
        dear = (
            plan is not None
            and self.graph is not None
            and plan.predicted_seconds > _DEAR * self.graph.seconds
        )
        self.margin.saw(
            reserved_bytes=reserved_bytes,
            peak_bytes=last.peak_bytes,
            retries=retries,
            least_bytes=lambda: self.bounds().least_bytes,
            plan=plan,
            dear=dear,
        )
        self._keep_margin()

    def _keep_margin(self) -> None:
        self.plans.margin_bytes = self.margin.bytes
        self.plans.waits_for_margin = not self._on_cpu and self.margin.is_looked_for

    @property
    def _may_look_away(self) -> bool:
        """Whether there may be steps that are not observed."""
        return (
            not self._config.strict
            and not self._config.check
            and bool(self._policy.evicts_to)
            and self._policy.stress is Stress.NONE
            and self.trace is None
        )

    def _end_idleness(self, *, passed: bool = False) -> None:
        """Have no step be idle until enough of them were quiet again."""
        if passed:
            self.idle.passed()
        else:
            self.idle.forget()
        self._session.forget_first_ops()

    def _see_whether_idle(self, cost: StepCost, last: StepTotals) -> None:
        done = last.drops + last.swap_outs + last.written_back_bytes + last.plan_actions
        done += last.rescues + last.shortfalls + last.boundary_evictions + last.mismatches
        if done or not last.peak_bytes <= self.limit_bytes <= self._budget_bytes:
            self._end_idleness()
        elif cost.whole and not self._logged and self.idle.saw_quiet(cost):
            self._session.remember_first_ops()

    def _judge_plan(self, last: StepTotals) -> bool:
        """Judge the plan that is followed by what steps took under it; return whether the next has another one.

        On an accelerator the host's clock says nothing of the waits: the device's does, a step or two later.
        """
        plan = self._followed_plan(last)
        if self._on_cpu:
            waited_s = last.out_stall_s + last.in_stall_s
            return plan is not None and self.plans.judge(plan, last.rebuild_s, waited_s)
        if plan is not None:
            self._to_judge[self._session.step()] = plan
        changed = False
        for step, rerun_s, out_wait_s, in_wait_s in self._session.take_device_seconds():
            judged = self._to_judge.pop(step, None)
            if judged is not None:
                changed |= self.plans.judge(judged, rerun_s, out_wait_s + in_wait_s)
        while len(self._to_judge) > _MOST_TO_JUDGE:
            self._to_judge.pop(next(iter(self._to_judge)))
        return changed

    def _followed_plan(self, last: StepTotals) -> Plan | None:
        """Return the plan whose step the last one was, backward included; None where it was logged, or no such step."""
        at = -1 if self._logged or last.plan_misses else self._session.followed_plan()
        if not 0 <= at < len(self._following):
            return None
        graph, plan = self._following[at]
        if not self.plans.is_of_last(graph):
            return None
        whole = last.plan_hits >= len(graph.saved) and last.managed_unpacks >= len(graph.uses)
        return plan if whole else None

    def bounds(self) -> Bounds:
        """Of the steps that were recorded whole; else what the last one has shown."""
        known = self.plans.bounds
        if known is not None:
            return known
        last = self.last
        return Bounds(last.stuck_bytes, last.stuck_op, 0) if last else Bounds(0, "", 0)

    def infeasible(self) -> BudgetInfeasible:
        """Return what is to be said of a budget that cannot be met."""
        self.pump.drain()
        self._take_in(self.pump.take_shortfall())
        counters = self._session.counters()
        refused_bytes = _C.cpu_pool.take_refused_bytes() if self._on_cpu else 0
        bounds = self.bounds()
        stuck_bytes = counters.stuck_bytes - DIFFERS_BYTES
        if stuck_bytes > bounds.lower_bytes:
            bounds = Bounds(stuck_bytes, counters.stuck_op, bounds.least_bytes)
        details = [f"an allocation that makes {format_bytes(refused_bytes)} live"] * bool(
            refused_bytes
        )
        if self.shortfall is not None:
            details.append(self.shortfall.text())
        details += [
            f"{format_bytes(counters.exposed_bytes)} of saved tensors are held by code outside "
            "autograd",
            f"{format_bytes(self._session.levels().uncounted_bytes)} are older than the pool",
        ]
        return BudgetInfeasible(
            self._budget_bytes,
            bounds.lower_bytes,
            bounds.lower_op,
            max(bounds.least_bytes, refused_bytes) if bounds.least_bytes else 0,
            "; ".join(details),
        )

"""The runtime: the context manager around training steps, and the pump between record and the deciders.

It puts the parts together and nothing else: the extension observes and obeys, `record` reads what
it saw, `online` and `planners` say what to evict, and here they are connected, once per step and
whenever memory gets tight while no plan is followed.

Note: steps and their boundaries
  1. Inside `runtime.step()` the step is the block. While the runtime is only entered, a step ends
     when something runs after backward, and a new one begins after an optimizer stepped. A backward
     that keeps its graph (retain_graph, create_graph) ends nothing: another one of the step follows.
  2. An optimizer's step is observed but not taped: it holds nothing evictable. Where something is
     still dropped when it begins, the weights that recipes read get a copy before they change.
  3. A step whose forward has been seen before follows the plan made from it; otherwise the policy's
     filter decides online.

Note: interrupts
  1. What is `shielded` is not interrupted by signal handlers, from before its first line to behind its
     last: `with` calls __enter__ and __exit__ in C, with no moment in between. So entering and leaving
     are done whole, and a handler's exception comes up in the program, outside of them.
  2. Other exceptions may come up anywhere (MemoryError, a warning that is an error): entering is
     undone, and leaving goes on to its end. Each of the two is idempotent.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import torch

from delta_runtime import optimizer_hooks, python_random, raw_access, saved_leaves
from delta_runtime.act.pinning import pinning
from delta_runtime.act.plans import follow
from delta_runtime.act.tiers import open_tiers
from delta_runtime.config import Config, Launched, check_requested
from delta_runtime.core.errors import BudgetInfeasible, DeltaError, RecomputeMismatch, UsageError
from delta_runtime.core.events import Bounds, Distance, PublishQueue, Residency
from delta_runtime.core.interrupts import Interrupted
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.core.units import BudgetSpec, BytesSpec, format_bytes
from delta_runtime.core.warn import warn
from delta_runtime.device import resolve_budget, resolve_device
from delta_runtime.extension import _C, shielded
from delta_runtime.online.ledger import Ledger, LedgerError
from delta_runtime.online.policies import Policy, Stress, get_policy
from delta_runtime.plan_cache import DIFFERS_BYTES, PlanCache, StepCost
from delta_runtime.planning_time import PlanningTime
from delta_runtime.record.step_log import drain_events, read_step_graph
from delta_runtime.report.step_report import StepReport, StepTotals, TierUse
from delta_runtime.report.trace import TRACE_DTYPE, Trace
from delta_runtime.standing_aside import StandingAside

logger = logging.getLogger(__name__)

_VERIFY = {"off": 0, "first": 1, "always": 2}
_STRESS = {each: number for number, each in enumerate(Stress)}
_DISTANCE = {Distance.NONE: 0, Distance.STALENESS: 1, Distance.NEXT_USE: 2}
# Until a filter has ranked a page, C++ ranks it by the nearest local formula (DefaultWeight).
_DEFAULT_WEIGHT = {"delta": 1, "largest": 1, "lru": 2, "next_use": 2}

HookPair: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_entered: Runtime | None = None
_entered_lock = threading.Lock()


class Runtime:
    """Trains inside a byte budget: evicts what autograd saved, and brings it back when it is asked for.

    Args:
        budget: most bytes that the device may hold for this process: weights, gradients, optimizer
            state, activations, temporaries. Bytes, ``"10GiB"``, ``"50%"``, a float in (0, 1] of the
            device's capacity, or ``"auto"``: what is free now, less a margin.
        device: the device to manage; None for the current accelerator, or the CPU where there is none.
        policy: how to decide; see `delta_runtime.online.policies`.
        verify: how much of what comes back is compared with what went. ``"first"``: everything in the
            first two steps of a sequence of ops, then each value at least once in 50 steps, and always
            what depends on an op that is not PyTorch's own; ``"always"``: everything; ``"off"``: nothing.
        min_bytes: smaller saved tensors are left alone.
        strict: raise BudgetInfeasible where the budget cannot be met, instead of running over it.
        host_budget: most bytes of host memory to swap to; None for half of what is available, below
            an accelerator. On a CPU device this, or the next, makes the CPU pool stand in for one,
            with RAM outside of it as the host's.
        link_bytes_per_s: throttle of the lanes between the two: bytes per second, or a card's name
            (``"pcie3"``, ``"pcie4"``, ``"pcie5"``, ``"c2c"``; see `delta_runtime.act.links`).
        disk_budget: most bytes of disk to swap to. With this, or the next, what host memory has no
            room for goes to a file, and on a CPU device without host memory below it, everything
            that is swapped. Its space is taken at once.
        spill_dir: directory of that file; None for the system's directory for temporary files.
        trace: file to write a trace of the last steps to at close, for Perfetto or chrome://tracing.

    Raises:
        UsageError: an argument makes no sense; nothing has been changed.

    Example:
        >>> runtime = Runtime(budget="10GiB")               # doctest: +SKIP
        >>> with runtime.step():                            # doctest: +SKIP
        ...     model(x).loss.backward()
        >>> print(runtime.report())                         # doctest: +SKIP
    """

    def __init__(
        self,
        budget: BudgetSpec = "auto",
        *,
        device: str | torch.device | None = None,
        policy: str | Policy = "auto",
        host_budget: BytesSpec | None = None,
        disk_budget: BytesSpec | None = None,
        spill_dir: str | None = None,
        link_bytes_per_s: float | str | None = None,
        verify: str = "first",
        min_bytes: BytesSpec = 4096,
        strict: bool = False,
        trace: str | None = None,
    ) -> None:
        chosen = policy if isinstance(policy, Policy) else None
        config = Config(
            budget=budget,
            device=None if device is None else str(device),
            policy=chosen.name if chosen else str(policy),
            host_budget=host_budget,
            disk_budget=disk_budget,
            spill_dir=spill_dir,
            link_bytes_per_s=link_bytes_per_s,
            verify=verify,
            min_bytes=min_bytes,
            strict=strict,
            trace=trace,
            check=check_requested(),
        )
        self._start(config, chosen or get_policy(config.policy))

    @classmethod
    def from_config(cls, config: Config) -> Runtime:
        """A runtime with settings that were read elsewhere, such as from the environment."""
        runtime = cls.__new__(cls)
        runtime._start(config, get_policy(config.policy))
        return runtime

    @shielded
    def _start(self, config: Config, policy: Policy) -> None:
        self.config = config
        self.policy = policy
        self.device = resolve_device(config.device)
        if self.device.type == "cpu":
            _C.cpu_pool.install()
        self.budget_bytes = resolve_budget(config, self.device)
        self.tiers = tiers = open_tiers(config, self.device)
        try:
            below = {Residency.HOST} if tiers else set()
            self.policy = policy = policy.on(frozenset({Residency.DROPPED} | below))
            self._swaps = Residency.HOST in policy.evicts_to
            pins = pinning(self.device) if self._swaps else None
            self._session = _C.Session(
                device=str(self.device),
                budget_bytes=self.budget_bytes if policy.evicts_to else 0,
                min_bytes=int(config.min_bytes),
                verify=_VERIFY[config.verify],
                stress=_STRESS[policy.stress],
                seed=policy.seed,
                drop=Residency.DROPPED in policy.evicts_to,
                swap=self._swaps,
                host_bytes=tiers.host_bytes,
                link_bytes_per_s=tiers.link_bytes_per_s,
                spill_file=tiers.spill.descriptor if tiers.spill and self._swaps else -1,
                spill_bytes=tiers.spill.budget_bytes if tiers.spill else 0,
                spill_direct=bool(tiers.spill and tiers.spill.direct),
                pin=pins[0] if pins else None,
                unpin=pins[1] if pins else None,
            )
        finally:
            tiers.close()  # the session has a descriptor of its own by now
        self._hooks = (self._session.pack_hook(), self._session.unpack_hook())
        self._ledger = Ledger(policy, checked=config.check)
        filter_name = policy.filter.name if policy.filter else "msps"
        self._session.set_default_weight(_DEFAULT_WEIGHT.get(filter_name, 0))
        self._distance = (
            Distance.NEXT_USE
            if policy.plans
            else policy.filter.distance
            if policy.filter
            else Distance.NONE
        )
        self._session.set_distance(_DISTANCE[self._distance])
        self._planning = PlanningTime()
        self._known = self._new_known()
        self._kept_bytes = self.budget_bytes
        self._step_begin_s = 0.0
        self._logged = False
        self._step_events: list[Any] = []
        self._last: StepTotals | None = None
        self._totals = StepTotals()
        self._last_planning_s = 0.0
        self._entering_s = 0.0
        self._around_s = 0.0
        self._graph: StepGraph | None = None
        self._depth = 0
        self._entries = 0  # times that it was entered
        self._in_step = False
        self._marked = False  # the step that ends was begun by step(), and nothing around it was
        self._alone = False  # the step that goes on is left alone
        self._aside = StandingAside()
        self._closed = False
        self._warned_over = False
        self._steps_over = 0
        self._warned_failed: set[str] = set()
        self._attached = False
        self._thread = threading.current_thread()  # that entered it last
        self._trace = Trace(config.trace) if config.trace else None
        self._session.set_tracing(self._trace is not None)

    def _new_known(self) -> PlanCache:
        return PlanCache(
            plans=self.policy.plans,
            drops=Residency.DROPPED in self.policy.evicts_to,
            swaps=self._swaps,
            yields=bool(self.policy.evicts_to) and self._pumps and not self.config.strict,
            planning=self._planning,
        )

    # ------------------------------------------------------------------ entering and leaving

    @shielded
    def __enter__(self) -> Runtime:
        self._enter()
        return self

    @shielded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_left():
            return
        self._leave(error)

    def _is_left(self) -> bool:
        """Whether there is nothing to leave: it was closed or left before.

        Raises:
            UsageError: it was entered on another thread, which alone can take the hooks away; it goes
                on as it was.
        """
        if self._closed or self._depth == 0:
            return True
        if self._thread is threading.current_thread():
            return False
        if self._thread.is_alive():
            raise UsageError(
                "this runtime is entered on another thread.",
                found=f"the thread {self._thread.name!r}",
                change="Leave it there.",
            )
        self._abandon()
        self._release()
        return True

    def step(self) -> _Step:
        """Marks one step: forward and backward inside.

        Returns:
            A context; entering it gives the runtime.

        Raises:
            UsageError: steps are nested, another runtime is entered, or this one is closed.
            BudgetInfeasible: with strict=True, the budget cannot be met. Gradients of this step are
                incomplete; weights and optimizer state are as they were.
        """
        return _Step(self)

    def _enter_step(self) -> None:
        if self._in_step:
            raise UsageError("runtime.step() inside runtime.step().", change="Leave the first one.")
        called_s = time.perf_counter()
        alone = self._depth == 0 and self._aside.leaves_next and not self._closed
        # What was dropped in a step before, and is yet to be made again, needs us to see what is written.
        if alone and not self._session.counters()["dropped_now_bytes"]:
            self._claim()
            self._depth, self._in_step, self._alone = 1, True, True
            self._begin_alone()
            return
        self._enter()
        try:
            if self._depth > 1:
                self._boundary()
            self._session.set_boundary(None)
        except BaseException:
            self._leave()
            raise
        self._in_step = True
        self._entering_s = self._step_begin_s - called_s

    def _leave_step(self, error: BaseException | None) -> None:
        if self._is_left():
            self._in_step = False
            return
        self._in_step = False
        if self._alone:
            self._leave_alone(whole=error is None)
            return
        called_s = time.perf_counter()
        self._marked = self._depth == 1
        try:
            self._finish_step(whole=error is None)
            if error is None:
                self._judge()
            elif self._depth > 1:
                self._warn_of_mismatch()
        finally:
            self._marked = False
            _C.release_repointed()
            self._session.set_boundary(self._on_boundary)
            self._leave(error)
        leaving_s = time.perf_counter() - called_s
        self._around_s = self._entering_s + max(0.0, leaving_s - self._last_planning_s)

    def _enter(self) -> None:
        if self._closed:
            raise UsageError("this runtime is closed.", change="Make a new one.")
        if self._depth == 0:
            self._claim()
            self._entries += 1
            try:
                self._attach()
                self._begin_step()
            except BaseException:
                self._detach()
                self._release()
                raise
        elif self._thread is not threading.current_thread():
            raise UsageError(
                "this runtime is entered on another thread.", change="Use it on one thread."
            )
        self._depth += 1

    def _leave(self, error: BaseException | None = None) -> None:
        try:
            if self._depth == 1:
                self._finish_step()
                if error is None:
                    self._judge()
                else:
                    self._warn_of_mismatch()
        finally:
            _C.release_repointed()
            self._depth -= 1
            if self._depth == 0:
                try:
                    self._detach()
                finally:
                    self._session.rest()
                    self._release()
        if self.config.strict and isinstance(error, torch.OutOfMemoryError):
            raise self._infeasible() from error

    def _claim(self) -> None:
        """Becomes the one that is entered in this process."""
        global _entered
        with _entered_lock:
            if _entered is not None and _entered._thread.is_alive():
                raise UsageError(
                    "another runtime is entered already.",
                    found=f"a runtime with a budget of {format_bytes(_entered.budget_bytes)}",
                    change="Leave it first; one runtime manages the whole process.",
                )
            if _entered is not None:
                _entered._abandon()
            _entered = self
            self._thread = threading.current_thread()

    def _release(self) -> None:
        """Makes room for another one. Idempotent."""
        global _entered
        with _entered_lock:
            if _entered is self:
                _entered = None

    def _abandon(self) -> None:
        """Ends a runtime whose thread ended, hooks and observer with it, while it was entered."""
        self._attached = self._in_step = self._alone = False
        self._closed = True
        self._depth = 0
        self._take_from_process()

    def _attach(self, above: Sequence[HookPair] = ()) -> None:
        """Puts hooks, observer and soft limit in place, below the hooks in `above`."""
        self._attached = True
        self._session.set_pump(self._pump if self._pumps else None)
        self._session.set_boundary(self._on_boundary)
        self._session.set_drain(lambda _: self._drain())
        self._session.enter()
        raw_access.listen(self._session)
        saved_leaves.install()
        _C.watch_data_setter()
        if self.device.type == "cpu":
            _C.cpu_pool.set_soft_limit_is_hard(self.config.strict)
        for pair in (self._hooks, *above):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensors_hooks
        optimizer_hooks.attach(self._before_optimizer, self._after_optimizer)

    def _detach(self) -> None:
        """Takes away what `_attach` put in place, or as much of it as there is. Idempotent."""
        if not self._attached:
            return
        self._attached = False
        try:
            above = self._hooks_above()
            if above is not None:
                for _ in (self._hooks, *above):
                    torch._C._autograd._pop_saved_tensors_default_hooks()
                for pair in above:
                    torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        finally:
            self._take_from_process()

    def _take_from_process(self) -> None:
        """Takes away what is not of the thread that entered. Idempotent."""
        optimizer_hooks.detach(self._before_optimizer)
        torch.autograd.graph.disable_saved_tensors_hooks = _torch_disable_saved_tensors_hooks
        self._session.leave()
        self._session.set_pump(None)
        self._session.set_boundary(None)
        self._session.set_drain(None)
        if self.device.type == "cpu":
            _C.cpu_pool.set_soft_limit_is_hard(False)

    def _hooks_above(self) -> list[HookPair] | None:
        """The hooks that others put on top of ours and have not taken away yet, lowest first.

        None where ours are not there.
        """
        above: list[HookPair] = []
        found = False
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
            found = top[0] is self._hooks[0]
            if found:
                break
            torch._C._autograd._pop_saved_tensors_default_hooks()
            above.append(top)
        above.reverse()
        for pair in above:
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        return above if found else None

    @property
    def _pumps(self) -> bool:
        """Whether Python ranks online: there is a filter and no stress."""
        return self.policy.filter is not None and self.policy.stress is Stress.NONE

    @shielded
    def close(self) -> None:
        """Ends the runtime. Idempotent. Backward of what was recorded goes on working.

        Raises:
            UsageError: it is entered on another thread, which alone can take the hooks away; it goes
                on as it was.
        """
        if self._closed:
            return
        if self._depth > 0 and self._thread is threading.current_thread():
            self._depth = 1
            try:
                self._leave()
            finally:
                self._end()
            return
        if self._depth > 0 and self._thread.is_alive():
            raise UsageError(
                "this runtime is entered on another thread.",
                found=f"the thread {self._thread.name!r}",
                change="Close it there, or when it has been left.",
            )
        if self._depth > 0:
            self._abandon()
            self._release()
        self._end()

    def _end(self) -> None:
        self._closed = True
        raw_access.stop_listening(self._session)
        self._session.stop_lanes()
        if self._trace is not None:
            self._trace.write(self._session.logged_names())

    # ------------------------------------------------------------------ steps

    @shielded
    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(callable(a) for a in args[1:]) or callable(kwargs.get("closure")):
            return  # a closure runs forward and backward inside the optimizer's step
        self._judge()
        self._session.forget_past()
        if self._session.counters()["dropped_now_bytes"]:
            # Not every optimizer writes through the dispatcher, where we would see it.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._session.prepare_write(parameter)
        self._session.set_taping(False)

    @shielded
    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._session.set_taping(True)
        if not self._in_step:
            self._boundary()
        self._judge()  # of a closure

    def _on_boundary(self, _: int) -> None:
        if not self._in_step:
            self._boundary()

    def _boundary(self) -> None:
        self._finish_step()
        self._begin_step()

    def _judge(self) -> None:
        """On an accelerator, learns if what came back is what went; waits for it where there is something to learn.

        Raises:
            RecomputeMismatch: something came back different, and the gradients were computed with it.
        """
        if self.device.type != "cpu" and (text := self._session.judge()):
            raise RecomputeMismatch(text)

    def _warn_of_mismatch(self) -> None:
        """What `_judge` would raise, where another error is on its way; whoever comes next raises it."""
        if self.device.type != "cpu" and (text := self._session.judge(later=True)):
            with contextlib.suppress(Warning):  # where warnings are errors
                warn(text)

    def _begin_alone(self) -> None:
        """Begins a step of which nothing is observed; for what it does, the runtime is not there."""
        self._step_begin_s = time.perf_counter()
        _C.cpu_pool.reset_step_peak()

    def _leave_alone(self, *, whole: bool) -> None:
        seconds = time.perf_counter() - self._step_begin_s
        self._alone, self._depth = False, 0
        self._release()
        peak_bytes = _C.cpu_pool.step_peak_bytes() + self._totals.uncounted_bytes
        totals = self._totals
        self._totals = replace(
            totals,
            steps=totals.steps + 1,
            alone_steps=totals.alone_steps + 1,
            over_budget_steps=totals.over_budget_steps + (peak_bytes > self.budget_bytes),
            peak_bytes=max(totals.peak_bytes, peak_bytes),
        )
        self._planning.trained(seconds)
        if whole:
            self._aside.was_alone(seconds)
        if self.config.report == "step":
            self._tell(f"step {self._totals.steps}: left alone, peak {format_bytes(peak_bytes)}")

    def _begin_step(self) -> None:
        _C.release_repointed()
        self._session.set_taping(True)  # an optimizer that raised has left it off
        missed = self._last is not None and self._last.plan_misses > 0
        went_on = self._last is not None and self._last.managed_unpacks > 0
        self._logged = self._known.wants_log(missed=missed, went_on=went_on)
        self._session.set_logging(self._logged)
        raw_access.take_back()
        self._session.begin_step()
        self._step_begin_s = time.perf_counter()

    def _finish_step(self, *, whole: bool = True) -> None:
        """Closes the step's account, unless nothing was saved in it.

        Args:
            whole: whether there is something to learn from it: it did not raise.
        """
        if self.device.type != "cpu":
            self._session.judge(later=True)
        if self._session.packs() == self._totals.packs:
            return
        counters = self._session.counters()
        self._session.end_step()
        seconds = time.perf_counter() - self._step_begin_s
        self._planning.trained(seconds)
        self._drain()
        step_peak_bytes = counters["step_peak_bytes"]
        over = bool(self.policy.evicts_to) and step_peak_bytes > self.budget_bytes
        before = self._totals
        self._totals = StepTotals.from_counters(
            counters,
            steps=before.steps + 1,
            alone_steps=before.alone_steps,
            over_budget_steps=before.over_budget_steps + over,
            peak_bytes=max(before.peak_bytes, step_peak_bytes),
        )
        self._last = self._totals.since(before, peak_bytes=step_peak_bytes)
        before_s = self._planning.spent_s
        try:
            if whole:
                with self._planning.planning():
                    self._learn(seconds)
        except Interrupted:
            self._known = self._new_known()  # what is left of it is half of a plan
        except Exception:
            # A plan only makes steps faster; without it the filter decides online.
            logger.exception("delta_runtime: no plan could be made for this step")
        self._last_planning_s = self._planning.spent_s - before_s
        self._warn_if_over(step_peak_bytes)
        self._warn_if_failed()
        if self._trace is not None:
            self._trace.add_step(np.frombuffer(self._session.drain_trace(), dtype=TRACE_DTYPE))
        self._step_events.clear()
        if self.config.report == "step":
            self._tell(self.report().one_line())

    def _tell(self, line: str) -> None:
        """To the log; to stderr where nothing is set up that would show it."""
        if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
            logger.info("%s", line)
        else:
            sys.stderr.write(f"delta_runtime: {line}\n")

    def _learn(self, seconds: float) -> None:
        """Takes the step in, with its record if there is one, and tells the extension what comes of it."""
        last = self._last
        assert last is not None
        cost = StepCost(
            fingerprint=int(self._session.fingerprint()),
            ops=last.ops,
            begin_bytes=last.begin_bytes,
            peak_bytes=last.peak_bytes,
            seconds=seconds,
            rebuild_s=last.rebuild_s if self.device.type == "cpu" else 0.0,
            whole=last.managed_unpacks > 0,
            around_s=self._around_s,
        )
        self._known.saw(cost)
        changed = False
        if not self._logged and self._followed_plan():
            changed = self._known.judge(last.rebuild_s, last.out_stall_s + last.in_stall_s)
        graph = None
        if self._logged and self._step_events:
            graph = read_step_graph(self._session, np.concatenate(self._step_events))
        if graph is not None and len(graph.saved) > 0:
            self._graph = self._known.learn(graph, self.budget_bytes, self._links())
            changed = self.policy.plans or self._distance is Distance.NEXT_USE
        elif not self._logged:
            changed |= self._known.tend(self.budget_bytes, self._links())
        if changed:
            follow(self._session, self._known.plans())
        kept_bytes = self._known.kept_bytes(self.budget_bytes)
        if kept_bytes != self._kept_bytes:
            self._kept_bytes = kept_bytes
            self._session.set_budget(kept_bytes)
        if self._may_stand_aside:
            self._aside.saw(cost, settled=self._known.relieved)

    @property
    def _may_stand_aside(self) -> bool:
        """Whether there may be steps that are left alone: their beginning and end have to be told."""
        return (
            self._marked
            and self.device.type == "cpu"
            and not self.config.strict
            and self.policy.stress is Stress.NONE
            and self._trace is None
        )

    def _followed_plan(self) -> bool:
        """Whether the last step was the recorded one, backward included, and its seconds were seen.

        On an accelerator the host does not wait for the lanes: its clock says nothing of them.
        """
        last, graph = self._last, self._graph
        return (
            self.device.type == "cpu"
            and last is not None
            and graph is not None
            and not last.plan_misses
            and last.plan_hits >= len(graph.saved)
            and last.managed_unpacks >= len(graph.uses)
        )

    def _warn_if_over(self, peak_bytes: int) -> None:
        if not self.policy.evicts_to or peak_bytes <= self.budget_bytes:
            return
        if self._warned_over:
            return
        bounds = self._bounds()
        self._steps_over += 1
        if bounds.least_bytes or self._steps_over > 1:
            self._warned_over = True
            numbers = [f"The lower bound of any budget is {format_bytes(bounds.lower_bytes)}"]
            numbers += [f" ({bounds.lower_op})"] if bounds.lower_op else []
            if bounds.least_bytes:
                numbers += [f", the least budget is about {format_bytes(bounds.least_bytes)}"]
            if self._kept_bytes > self.budget_bytes:
                numbers += [
                    f". It cannot be met, and {format_bytes(self._kept_bytes)} is kept to from now on: "
                    "less would make each step half as long again"
                ]
            warn(
                f"delta_runtime: the budget of {format_bytes(self.budget_bytes)} was passed: peak "
                f"{format_bytes(peak_bytes)}. {''.join(numbers)}. "
                "runtime.report() says more; strict=True makes this an error.",
            )

    def _bounds(self) -> Bounds:
        """Of the steps that were recorded whole; else what the last one has shown."""
        known = self._known.bounds
        if known is not None:
            return known
        last = self._last
        return Bounds(last.stuck_bytes, last.stuck_op, 0) if last else Bounds(0, "", 0)

    def _warn_if_failed(self) -> None:
        totals = self._totals
        where = (
            f"the spill file in {self.tiers.spill.directory}" if self.tiers.spill else "the host"
        )
        if totals.failed_writes and "writing" not in self._warned_failed:
            self._warned_failed.add("writing")
            warn(
                f"delta_runtime: copying to {where} failed: {os.strerror(totals.write_error)}. What was "
                "not copied stayed or was recomputed; no more is swapped there.",
            )
        if totals.failed_reads and "reading" not in self._warned_failed:
            self._warned_failed.add("reading")
            what = (
                f"{totals.lost_pages} saved tensors could not be recomputed; backward raised."
                if totals.lost_pages
                else "What could not be read was recomputed."
            )
            warn(
                f"delta_runtime: copying from {where} failed: {os.strerror(totals.read_error)}. {what}",
            )

    def _infeasible(self) -> BudgetInfeasible:
        counters = self._session.counters()
        refused_bytes = _C.cpu_pool.take_refused_bytes() if self.device.type == "cpu" else 0
        bounds = self._bounds()
        stuck_bytes = counters["stuck_bytes"] - DIFFERS_BYTES
        if stuck_bytes > bounds.lower_bytes:
            bounds = Bounds(stuck_bytes, counters["stuck_op"], bounds.least_bytes)
        details = [f"an allocation that makes {format_bytes(refused_bytes)} live"] * bool(
            refused_bytes
        )
        details += [
            f"{format_bytes(counters['exposed_bytes'])} of saved tensors are held by code outside "
            "autograd",
            f"{format_bytes(counters['uncounted_bytes'])} are older than the pool",
        ]
        return BudgetInfeasible(
            self.budget_bytes,
            bounds.lower_bytes,
            bounds.lower_op,
            max(bounds.least_bytes, refused_bytes) if bounds.least_bytes else 0,
            "; ".join(details),
        )

    # ------------------------------------------------------------------ the pump

    def _drain(self) -> list[Any]:
        events = drain_events(self._session)
        if not len(events):
            return []
        if self._session.logging():
            self._step_events.append(events)
        try:
            return self._ledger.handle(events, budget_bytes=self.budget_bytes, links=self._links())
        except LedgerError:
            if self.config.check:
                raise
            logger.exception("delta_runtime: the ledger is spent; a new one starts")
            self._ledger = Ledger(self.policy)
            return []

    def _pump(self, need_bytes: int) -> None:
        """Ranks what is there, when room is needed and no plan says what to drop."""
        self._drain()
        queue: PublishQueue = self._ledger.rank(int(self._session.tick()), self._links())
        distance = queue.distance if not self.policy.plans else self._distance
        self._session.publish(
            np.ascontiguousarray(queue.pages),
            np.ascontiguousarray(queue.weights),
            np.ascontiguousarray(queue.exits),
            _DISTANCE[distance],
        )

    def _links(self) -> Links:
        """What is known of the lanes now: the throttle, or what they were seen to do."""
        if not self._swaps:
            return Links()
        nearest = self._session.tiers()[0]
        throttle = self.tiers.link_bytes_per_s if nearest["tier"] == "host" else 0.0
        speed = {}
        for name in ("out", "in"):
            _, bytes_, busy_s, _ = nearest[name]
            speed[name] = throttle or (bytes_ / busy_s if busy_s > 0 else 0.0)
        graph = self._graph
        return Links(
            out_bytes_per_s=speed["out"],
            in_bytes_per_s=speed["in"],
            out_queued_bytes=nearest["out"][3],
            in_queued_bytes=nearest["in"][3],
            store_bytes=nearest["cap_bytes"],
            tick_s=graph.seconds / graph.n_ops if graph and graph.n_ops else 0.0,
        )

    # ------------------------------------------------------------------ what the user asks

    def report(self) -> StepReport:
        """What happened in the last step, and in all of them."""
        return StepReport(
            budget_bytes=self.budget_bytes if self.policy.evicts_to else 0,
            policy=self.policy.name,
            device=str(self.device),
            last=replace(self._last or StepTotals(), planning_s=self._last_planning_s),
            totals=replace(self._totals, planning_s=self._planning.spent_s),
            activation_bytes=self._graph.activation_bytes if self._graph else 0,
            ordinary_peak_bytes=self._graph.peak_bytes if self._graph else 0,
            bounds=self._bounds(),
            kept_bytes=self._kept_bytes if self._kept_bytes > self.budget_bytes else 0,
            tiers=self._tier_uses(),
            process=_launched().text(),
        )

    def _tier_uses(self) -> tuple[TierUse, ...]:
        spill = self.tiers.spill

        def name(each: dict[str, Any]) -> str:
            if each["tier"] == "host":
                return "pinned host memory" if each["pinned_bytes"] else "host memory"
            return "disk (O_DIRECT)" if spill and spill.direct else "disk (page cache)"

        return tuple(
            TierUse(
                name=name(each),
                cap_bytes=each["cap_bytes"],
                peak_bytes=each["peak_used_bytes"],
                out_bytes=each["out"][1],
                out_s=each["out"][2],
                in_bytes=each["in"][1],
                in_s=each["in"][2],
            )
            for each in self._session.tiers()
        )

    def graph(self) -> StepGraph:
        """The record of the step that was logged last.

        Raises:
            UsageError: no step has been recorded yet.
        """
        if self._graph is None:
            raise UsageError(
                "no step has been recorded yet.", change="Run one forward and backward."
            )
        return self._graph

    def plan(self) -> Plan | None:
        """The plan for steps like the last one that was logged; None as long as there is none."""
        return self._known.plan

    @property
    def settled(self) -> bool:
        """Whether that plan stays, as long as no step waits longer under it than it does now."""
        return self._known.settled

    def mark_written(self, tensor: torch.Tensor) -> None:
        """Says that code outside of the dispatcher wrote to this tensor's storage."""
        self._session.mark_written(tensor)


class _Step(contextlib.ContextDecorator):
    """One step of a runtime; see `Runtime.step`."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @shielded
    def __enter__(self) -> Runtime:
        self._runtime._enter_step()
        return self._runtime

    @shielded
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runtime._leave_step(error)


class BudgetInfeasibleInOp(BudgetInfeasible, torch.OutOfMemoryError):
    """A strict budget cannot be met, found out in the middle of an op.

    It is an OutOfMemoryError too, so that what takes smaller batches when memory runs out does so.

    Args:
        message: what was asked of the allocator.
    """

    def __init__(self, message: str = "") -> None:
        if _entered is None:  # left since then
            BudgetInfeasible.__init__(self, 0, 0, details=message)
            return
        told = _entered._infeasible()
        BudgetInfeasible.__init__(
            self,
            told.asked_bytes,
            told.lower_bound_bytes,
            told.lower_bound_op,
            told.least_budget_bytes,
            f"{message} {told.details}".strip(),
        )


_C.set_budget_error(BudgetInfeasibleInOp)


# ---------------------------------------------------------------------- module functions


def mark_written(tensor: torch.Tensor) -> None:
    """Say that code outside of the dispatcher (numpy, ctypes, a Triton kernel) wrote to a tensor.

    Its storage is kept from here on, and nothing is recomputed from its former content.
    """
    if _entered is not None:
        _entered.mark_written(tensor)


class disable(contextlib.ContextDecorator):  # noqa: N801  used like a function
    """Takes the entered runtime's hooks, observer and soft limit away for the duration of a block."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._entry = 0  # of the runtime, that this is inside of
        self._above: Sequence[HookPair] = ()

    def _recreate_cm(self) -> disable:
        return disable()

    @shielded
    def __enter__(self) -> None:
        runtime = _entered
        if (
            runtime is None
            or runtime._thread is not threading.current_thread()
            or not runtime._attached
        ):
            return
        self._above = runtime._hooks_above() or ()
        self._runtime, self._entry = runtime, runtime._entries
        runtime._detach()

    @shielded
    def __exit__(self, *_: object) -> None:
        runtime, self._runtime = self._runtime, None
        if runtime is None or runtime is not _entered or runtime._entries != self._entry:
            return  # left meanwhile: there is nothing to put back
        if runtime._thread is not threading.current_thread():
            warn(
                "delta_runtime: a block of delta_runtime.disable() ended on another thread than the one "
                "it began on. The runtime stays off until it is left and entered again.",
            )
            return
        for _pair in self._above:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        runtime._attach(self._above)


_torch_disable_saved_tensors_hooks = torch.autograd.graph.disable_saved_tensors_hooks


class _disable_saved_tensors_hooks(contextlib.ContextDecorator):  # noqa: N801  as torch's
    """Stands down for what cannot bear hooks (torch.func), where torch would raise because of ours.

    Hooks that somebody else put on top of ours still make torch raise, as it should.
    """

    def __init__(self, error_message: str) -> None:
        self._message = error_message
        self._stack = contextlib.ExitStack()

    def _recreate_cm(self) -> _disable_saved_tensors_hooks:
        return _disable_saved_tensors_hooks(self._message)

    @shielded
    def __enter__(self) -> None:
        runtime = _entered
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        with contextlib.ExitStack() as stack:
            if runtime is not None and top is not None and top[0] is runtime._hooks[0]:
                stack.enter_context(disable())
            stack.enter_context(_torch_disable_saved_tensors_hooks(self._message))
            self._stack = stack.pop_all()

    @shielded
    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)


def _launched() -> Launched:
    """Which of several processes this is; torch.distributed knows it also where the environment does not."""
    launched = Launched.from_environment()
    group = torch.distributed
    if launched.rank is None and group.is_available() and group.is_initialized():
        return Launched(rank=group.get_rank(), world_size=group.get_world_size())
    return launched


@shielded
def start_ambient() -> Runtime | None:
    """Start the runtime that the environment asks for; called when torch has been imported.

    Returns:
        The entered runtime; None where DELTA_BUDGET is not set.

    Raises:
        DeltaError: the environment asks for something that makes no sense; nothing was started.
    """
    config = Config.from_environment()
    if config is None:
        return None
    if _entered is not None:
        return _entered
    runtime = Runtime.from_config(config)
    runtime._enter()
    atexit.register(_finish_ambient, runtime, os.getpid())
    return runtime


@shielded
def _finish_ambient(runtime: Runtime, process: int) -> None:
    if os.getpid() != process:  # a forked child: what is to be told is the parent's to tell
        return
    runtime.close()
    if runtime.config.report != "off" and runtime._totals.steps:
        sys.stderr.write(f"{runtime.report()}\n")


def _forget_after_fork() -> None:
    """A forked child (a data-loader worker) starts with the runtime off."""
    global _entered, _entered_lock
    _C.set_main_thread(threading.get_ident())  # the thread that forked is the only one here
    _entered_lock = threading.Lock()  # whoever held it does not exist here
    raw_access.forget_lock()
    _C.forget_locks()
    runtime, _entered = _entered, None
    if runtime is None or not runtime._depth:
        return
    if runtime._thread is threading.current_thread():
        runtime._detach()
    runtime._abandon()  # hooks and observer may be of a thread that does not exist here


os.register_at_fork(after_in_child=_forget_after_fork)
_C.set_python_random(python_random.save, python_random.restore)


__all__ = ["DeltaError", "Runtime", "disable", "mark_written", "start_ambient"]

# If importing this module was the first import of torch, the entry point had to wait until here.
import delta_runtime_autoload  # noqa: E402

delta_runtime_autoload.resume()

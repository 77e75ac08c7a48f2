"""The runtime: the context manager around training steps.

It puts the parts together: the session observes and obeys, `steps` learns from what it saw and says what it follows,
`torch_hooks` ties it to torch, and `entered` sees to it that there is one at a time.

Note: interrupts
  1. What is `shielded` is not interrupted by signal handlers, from before its first line to behind its
     last: `with` calls __enter__ and __exit__ in C, with no moment in between. So entering and leaving
     are done whole, and a handler's exception comes up in the program, outside of them.
  2. Other exceptions may come up anywhere (MemoryError, a warning that is an error): entering is
     undone, and leaving goes on to its end. Each of the two is idempotent.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import weakref
from dataclasses import replace
from types import TracebackType

import numpy as np
import torch

from delta_runtime import (
    cpu_pool,
    entered,
    failed_backward,
    python_random,
    raw_access,
    torch_hooks,
)
from delta_runtime.act.pinning import pinning
from delta_runtime.act.tiers import Tiers, open_tiers
from delta_runtime.config import (
    Config,
    Launched,
    check_requested,
    limit_requested,
    planning_requested,
)
from delta_runtime.core.errors import BudgetInfeasible, UsageError
from delta_runtime.core.events import PROFILE_DTYPE, Place
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import RecordedOn, StepGraph
from delta_runtime.core.units import BudgetSpec, BytesSpec, format_bytes
from delta_runtime.device import resolve_budget, resolve_device
from delta_runtime.extension import _C, shielded
from delta_runtime.growing_segments import let_segments_grow, segments_expand
from delta_runtime.online.policies import Policy, Stress, get_policy
from delta_runtime.report.step_figures import metrics, status
from delta_runtime.report.step_plot import LiveBytes
from delta_runtime.report.step_report import StepReport, StepTotals, TierUse
from delta_runtime.reserved_limit import let_allocator_keep_to_limits
from delta_runtime.steps import Steps
from delta_runtime.torch_hooks import TorchHooks

logger = logging.getLogger(__name__)

_WHOLE_DEVICE = 1 << 62
"""Bytes, more than any device has: with ``budget="auto"`` its end is the limit."""
_VERIFY = {"off": 0, "first": 1, "always": 2}
_STRESS = {each: number for number, each in enumerate(Stress)}


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
            (``"pcie3"``, ``"pcie4"``, ``"pcie5"``, ``"c2c"``; see `delta_runtime.act.links`). An accelerator's link
            gets up to 64 times slower, by more bytes that cross it; its disk keeps its speed.
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
            planning=planning_requested(),
            check=check_requested(),
            limit_reserved=limit_requested(),
        )
        self._start(config, chosen or get_policy(config.policy))

    @classmethod
    def from_config(cls, config: Config) -> Runtime:
        """Return a runtime with settings that were read elsewhere, such as from the environment."""
        runtime = cls.__new__(cls)
        runtime._start(config, get_policy(config.policy))
        return runtime

    @shielded
    def _start(self, config: Config, policy: Policy) -> None:
        self.config = config
        self.device = resolve_device(config.device)
        if self.device.type == "cpu":
            cpu_pool.install()
        if policy.evicts_to:
            let_segments_grow(self.device)
            if config.limit_reserved:
                let_allocator_keep_to_limits(self.device)
        self.budget_bytes = resolve_budget(config, self.device)
        self.tiers = tiers = open_tiers(config, self.device)
        try:
            below = {Place.SWAPPED} if tiers else set()
            self.policy = policy = policy.on(frozenset({Place.DROPPED} | below))
            self.session = self._new_session(config, policy, tiers)
        finally:
            tiers.close()  # the session has a descriptor of its own by now
        if self.device.type == "cpu":
            for each in cpu_pool.older_weights():  # else the first step has no room for them
                self.session.take_in(each)
        # Weakly: a runtime that nobody holds any more goes at once, without the garbage collector.
        # Not a WeakMethod: its end runs Python, where an interrupt is lost.
        this = weakref.ref(self)

        def after_step() -> None:
            if runtime := this():
                runtime._after_step()

        def wake(_: int) -> None:
            if runtime := this():
                runtime._wake()

        self.session.set_wake(wake)
        self.steps = Steps(
            self.session,
            config,
            policy,
            self.device,
            self.budget_bytes,
            tiers,
            after_step,
        )
        self.hooks = TorchHooks(
            self.session,
            on_cpu=self.device.type == "cpu",
            strict=config.strict,
            step_over=self.steps.on_step_over,
            pump=self.steps.pump.rank if self.steps.ranks else None,
            drain=self.steps.pump.drain,
            before_optimizer=self.steps.before_optimizer,
            after_optimizer=self.steps.after_optimizer,
        )
        self._depth = 0
        self._entering_s = 0.0
        self._alone = False  # the step that goes on is left alone
        self._idle = False  # or idle, and nothing has woken the runtime up
        self._closed = False

    def _new_session(self, config: Config, policy: Policy, tiers: Tiers) -> _C.Session:
        swaps = Place.SWAPPED in policy.evicts_to
        pins = pinning(self.device) if swaps else None
        return _C.Session(
            device=str(self.device),
            budget_bytes=self.budget_bytes if policy.evicts_to else 0,
            min_bytes=int(config.min_bytes),
            verify=_VERIFY[config.verify],
            stress=_STRESS[policy.stress],
            seed=policy.seed,
            drop=Place.DROPPED in policy.evicts_to,
            swap=swaps,
            reserved_bytes=self._reserved_bytes(policy),
            host_bytes=tiers.host_bytes,
            link_bytes_per_s=tiers.link_bytes_per_s,
            crossings_out=tiers.crossings_out,
            crossings_in=tiers.crossings_in,
            spill_file=tiers.spill.descriptor if tiers.spill and swaps else -1,
            spill_bytes=tiers.spill.budget_bytes if tiers.spill else 0,
            spill_direct=bool(tiers.spill and tiers.spill.direct),
            pin=pins[0] if pins else None,
            unpin=pins[1] if pins else None,
        )

    def _reserved_bytes(self, policy: Policy) -> int:
        """Return the most that an accelerator's allocator is to reserve; 0 where that is left to it."""
        if self.device.type == "cpu" or not policy.evicts_to or not self.config.limit_reserved:
            return 0
        return _WHOLE_DEVICE if self.config.budget == "auto" else self.budget_bytes

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
        try:
            self._leave(error)
        finally:
            self._let_go_of(error)

    def _let_go_of(self, error: BaseException | None) -> None:
        """Free what PyTorch keeps of a backward that raised; nothing where no graph was made."""
        last = self.steps.last
        if error is not None and (last is None or last.packs > 0):
            failed_backward.release_queue()

    def _is_left(self) -> bool:
        """Whether there is nothing to leave: it was closed or left before, maybe by a hook of a backward.

        Raises:
            UsageError: it was entered on another thread, which alone can take the hooks away; it goes
                on as it was.
        """
        if self._closed or self._depth == 0:
            self.hooks.detach_again()
            return True
        if self.hooks.thread is threading.current_thread():
            return False
        if self.hooks.thread.is_alive():
            raise UsageError(
                "this runtime is entered on another thread.",
                found=f"the thread {self.hooks.thread.name!r}",
                change="Leave it there.",
            )
        self.abandon()
        entered.release(self)
        return True

    def step(self) -> _Step:
        """Mark one step: forward and backward inside.

        Returns:
            A context; entering it gives the runtime.

        Raises:
            UsageError: steps are nested, another runtime is entered, or this one is closed.
            BudgetInfeasible: with strict=True, the budget cannot be met. Gradients of this step are
                incomplete; weights and optimizer state are as they were.
            PlannerInfeasible: with strict=True, the planner that the policy names has no plan for the budget. The step
                has not begun.
        """
        return _Step(self)

    def _enter_step(self) -> None:
        if self.steps.in_block:
            raise UsageError("runtime.step() inside runtime.step().", change="Leave the first one.")
        self.steps.raise_refusal()
        called_s = time.perf_counter()
        if self._depth == 0 and not self._closed and self._looks_away():
            self._depth, self.steps.in_block = 1, True
            self.steps.begin_alone()
            return
        self._enter()
        try:
            if self._depth > 1:
                self.steps.end_and_begin()
            self.session.set_step_over(None)
        except BaseException:
            self._leave()
            raise
        self.steps.in_block = True
        self._entering_s = self.steps.begin_s - called_s

    def _looks_away(self) -> bool:
        """Begin a block whose step is not observed, if it need not be; return whether it was begun."""
        # What was dropped in a step before, and is yet to be made again, needs us to see what is written.
        if self.steps.aside.leaves_next and not self.session.levels().dropped_now_bytes:
            entered.claim(self)
            self._alone = True
            return True
        # Who wakes up puts the runtime's hooks below all others: there must not be any yet.
        idle, live_bytes = self.steps.idle, self.session.live_bytes()
        if not idle.may_begin(live_bytes) or torch_hooks.any_hooks():
            return False
        entered.claim(self)
        self._idle = self.session.begin_idle(idle.most_bytes(live_bytes))
        if not self._idle:
            entered.release(self)
        return self._idle

    def _wake(self) -> None:
        """Have the rest of an idle step observed. Called at an op that is not known, or where too much is live."""
        if not self._idle or self._closed:
            return
        self.hooks.entry += 1
        self.hooks.attach_lowest()
        self._idle = False
        self.session.set_step_over(None)
        self.steps.wake()

    def _leave_step(self, error: BaseException | None) -> None:
        if self._is_left():
            self.steps.in_block = False
            return
        self.steps.in_block = False
        if self._alone or self._idle:
            self._leave_alone(whole=error is None)
            return
        called_s = time.perf_counter()
        try:
            self.steps.finish(whole=error is None, marked=self._depth == 1)
            if error is None:
                self.steps.judge()
            elif self._depth > 1:
                self.steps.warn_of_mismatch()
        finally:
            _C.release_repointed()
            self.session.set_step_over(self.hooks.step_over)
            self._leave(error)
        leaving_s = time.perf_counter() - called_s
        self.steps.around_s = self._entering_s + max(0.0, leaving_s - self.steps.last_planning_s)

    def _enter(self) -> None:
        if self._closed:
            raise UsageError("this runtime is closed.", change="Make a new one.")
        if self._depth == 0:
            entered.claim(self)
            self.hooks.entry += 1
            try:
                self.hooks.attach()
                self.steps.begin()
            except BaseException:
                self.hooks.detach()
                entered.release(self)
                raise
        elif self.hooks.thread is not threading.current_thread():
            raise UsageError(
                "this runtime is entered on another thread.", change="Use it on one thread."
            )
        self._depth += 1

    def _leave(self, error: BaseException | None = None) -> None:
        try:
            if self._depth == 1:
                self.steps.finish()
                if error is None:
                    self.steps.judge()
                else:
                    self.steps.warn_of_mismatch()
        finally:
            _C.release_repointed()
            self._depth -= 1
            if self._depth == 0:
                self.hooks.entry += 1
                try:
                    self.hooks.detach()
                finally:
                    self.session.rest()
                    entered.release(self)
        if self.config.strict and isinstance(error, torch.OutOfMemoryError):
            raise self.infeasible() from error

    def _leave_alone(self, *, whole: bool) -> None:
        idle = self._idle
        self._alone, self._idle, self._depth = False, False, 0
        self.session.end_idle()
        entered.release(self)
        self._finish_alone(whole=whole, idle=idle)

    def _finish_alone(self, *, whole: bool, idle: bool) -> None:
        peak_bytes = self.steps.finish_alone(whole=whole, idle=idle)
        if self.config.report == "step":
            steps = self.steps.totals.steps
            how = "idle" if idle else "left alone"
            _tell(f"step {steps}: {how}, peak {format_bytes(peak_bytes)}")

    def abandon(self) -> None:
        """End the runtime from a thread that is not the one it was entered on: that one ended meanwhile."""
        self.steps.in_block = self._alone = self._idle = False
        self._closed = True
        self._depth = 0
        self.session.end_idle()
        self.hooks.entry += 1
        self.hooks.abandon()
        self.steps.stop_planning()

    @shielded
    def close(self) -> None:
        """End the runtime. Idempotent. Backward of what was recorded goes on working.

        Raises:
            UsageError: it is entered on another thread, which alone can take the hooks away; it goes
                on as it was.
        """
        if self._closed:
            self.hooks.detach_again()
            return
        if self._depth > 0 and self.hooks.thread is threading.current_thread():
            self._depth = 1
            try:
                self._leave()
            finally:
                self._end()
            return
        if self._depth > 0 and self.hooks.thread.is_alive():
            raise UsageError(
                "this runtime is entered on another thread.",
                found=f"the thread {self.hooks.thread.name!r}",
                change="Close it there, or when it has been left.",
            )
        if self._depth > 0:
            self.abandon()
            entered.release(self)
        self._end()

    def _end(self) -> None:
        self._closed = True
        raw_access.stop_listening(self.session)
        self.session.stop_lanes()
        self.steps.end()

    def _after_step(self) -> None:
        if self.config.report == "step":
            _tell(self.report().one_line())

    # ------------------------------------------------------------------ what the user asks

    def report(self) -> StepReport:
        """Return what happened in the last step, and in all of them."""
        steps = self.steps
        graph = steps.graph
        direct = bool(self.tiers.spill and self.tiers.spill.direct)
        on_cpu = self.device.type == "cpu"
        return StepReport(
            budget_bytes=self._kept_budget_bytes,
            policy=self.policy.name,
            device=str(self.device),
            last=replace(steps.last or StepTotals(), planning_s=steps.last_planning_s),
            totals=replace(
                steps.totals, planning_s=steps.planning.spent_s + steps.planning.beside_s
            ),
            activation_bytes=graph.activation_bytes if graph else 0,
            ordinary_peak_bytes=graph.peak_bytes if graph else 0,
            bounds=steps.bounds(),
            limit_bytes=steps.limit_bytes if steps.limit_bytes > self.budget_bytes else 0,
            reserved_bytes=0 if on_cpu else self.session.allocator_bytes()[0],
            margin_bytes=0 if steps.plans.yielded else steps.plans.margin_bytes,
            expandable=not on_cpu and segments_expand(),
            tiers=tuple(TierUse.of(each, direct=direct) for each in self.session.tiers()),
            process=_launched().text(),
            shortfall=steps.shortfall,
            live=self._live_bytes(),
        )

    def _live_bytes(self) -> LiveBytes:
        profile = np.frombuffer(self.session.profile(), dtype=PROFILE_DTYPE)
        graph = self.steps.plans.last_graph  # another step's would be another curve
        if graph is None:
            return LiveBytes(profile["op"], profile["peak_bytes"])
        ordinary_bytes = graph.op_ordinary_bytes + graph.op_watermark_bytes
        return LiveBytes(profile["op"], profile["peak_bytes"], ordinary_bytes)

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last step that was observed, as loggers take them.

        One flat dictionary, empty before the first step. Names begin with ``delta/`` and end in their unit:
        ``budget_bytes``, ``peak_bytes``, ``dropped_bytes``, ``swapped_out_bytes``, ``recompute_s``, ``stall_s`` (waited
        for lanes), and ``over_budget_steps``, of all steps.

        Example:
            >>> writer.add_scalar("peak", runtime.metrics()["delta/peak_bytes"], step)   # doctest: +SKIP
            >>> wandb.log({"loss": loss.item(), **runtime.metrics()})                    # doctest: +SKIP
        """
        return metrics(self.steps.last, self.steps.totals, self._kept_budget_bytes)

    def status(self) -> str:
        """Return the last step in a few words.

        Example:
            >>> bar.set_postfix_str(runtime.status())   # doctest: +SKIP
        """
        return status(self.steps.last, self.steps.totals, self._kept_budget_bytes)

    @property
    def _kept_budget_bytes(self) -> int:
        return self.budget_bytes if self.policy.evicts_to else 0

    def graph(self) -> StepGraph:
        """Return the record of the step that was logged last, with the machine that it ran on.

        Raises:
            UsageError: no step has been recorded yet.
        """
        if self.steps.graph is None:
            raise UsageError(
                "no step has been recorded yet.", change="Run one forward and backward."
            )
        links = self.steps.pump.links()
        return replace(
            self.steps.graph,
            recorded_on=RecordedOn(
                device=str(self.device),
                threads=torch.get_num_threads(),
                torch=torch.__version__,
                out_bytes_per_s=links.out_bytes_per_s,
                in_bytes_per_s=links.in_bytes_per_s,
            ),
        )

    def plan(self) -> Plan | None:
        """Return the plan for steps like the last one that was logged; None as long as there is none."""
        return self.steps.plans.plan

    def wait_for_plan(self, timeout: float | None = None) -> bool:
        """Wait for the plan that is being made beside training, if one is: the next step follows it.

        Training needs no plan to go on. This is for tests and measurements, which are to be repeated.

        Args:
            timeout: seconds after which to give up waiting; None waits as long as it takes.

        Returns:
            Whether no plan is being made any more.

        Raises:
            PlannerInfeasible: with strict=True, the planner that the policy names has no plan for the budget.

        Example:
            >>> with runtime.step():                        # doctest: +SKIP
            ...     model(x).loss.backward()
            >>> runtime.wait_for_plan()                     # doctest: +SKIP
            True
        """
        done = self.steps.wait_for_plan(timeout)
        if done:
            self._take_plan()
            self.steps.raise_refusal()
        return done

    @shielded
    def _take_plan(self) -> None:
        if self._depth == 0 or self.hooks.thread is threading.current_thread():
            self.steps.take_plan()

    @property
    def settled(self) -> bool:
        """Whether that plan stays, as long as no step waits longer under it than it does now."""
        return self.steps.plans.settled

    def infeasible(self) -> BudgetInfeasible:
        """Return the error that a budget is which cannot be met, with the numbers that are known by now."""
        return self.steps.infeasible()

    def mark_written(self, tensor: torch.Tensor) -> None:
        """Say that code outside of the dispatcher wrote to this tensor's storage."""
        self.session.mark_written(tensor)


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
        try:
            self._runtime._leave_step(error)
        finally:
            self._runtime._let_go_of(error)


# ---------------------------------------------------------------------- module functions


def mark_written(tensor: torch.Tensor) -> None:
    """Say that code outside of the dispatcher (numpy, ctypes, a Triton kernel) wrote to a tensor.

    Its storage is kept from here on, and nothing is recomputed from its former content.
    """
    runtime = entered.entered()
    if runtime is not None:
        runtime.mark_written(tensor)


def _tell(line: str) -> None:
    """To the log; to stderr where nothing is set up that would show it."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info("%s", line)
    else:
        sys.stderr.write(f"delta_runtime: {line}\n")


def _launched() -> Launched:
    """Which of several processes this is; torch.distributed knows it also where the environment does not."""
    launched = Launched.from_environment()
    group = torch.distributed
    if launched.rank is None and group.is_available() and group.is_initialized():
        return Launched(rank=group.get_rank(), world_size=group.get_world_size())
    return launched


_C.set_python_random(python_random.save, python_random.restore)

# If importing this module was the first import of torch, the entry point had to wait until here.
import delta_runtime_autoload  # noqa: E402

delta_runtime_autoload.resume()

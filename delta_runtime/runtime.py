"""The runtime: the context manager around training steps, and the pump between record and decide.

It puts the parts together and nothing else: the extension observes and obeys, `record` reads what
it saw, `decide` says what to evict, and here the two are connected, once per step and whenever
memory gets tight while no plan is followed.

Note: steps and their boundaries
  1. Inside `runtime.step()` the step is the block. While the runtime is only entered, a step ends
     when something runs after backward, and a new one begins after an optimizer stepped.
  2. An optimizer's step is observed but not taped: it holds nothing evictable. What is still
     dropped when it begins is brought back first, for the recipes read the weights as they were.
  3. A step whose forward has been seen before follows the plan made from it; otherwise the policy's
     filter decides online.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import psutil
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from delta_runtime.config import Config, check_requested
from delta_runtime.core.errors import BudgetInfeasible, DeltaError, UsageError
from delta_runtime.core.graph import StepGraph
from delta_runtime.core.model import Distance, PublishQueue
from delta_runtime.core.units import BudgetSpec, BytesSpec, format_bytes
from delta_runtime.decide.foresight import Foresight, foresee
from delta_runtime.decide.ledger import Ledger, LedgerError
from delta_runtime.decide.policies import Policy, Stress, get_policy
from delta_runtime.extension import _C
from delta_runtime.record.step_log import drain_events, read_step_graph
from delta_runtime.report.step_report import StepReport, StepTotals

logger = logging.getLogger(__name__)

_VERIFY = {"off": 0, "first": 1, "always": 2}
_STRESS = {Stress.NONE: 0, Stress.DROP_ALL: 1, Stress.RANDOM: 2}
_DISTANCE = {Distance.NONE: 0, Distance.STALENESS: 1, Distance.NEXT_USE: 2}
# Until a filter has ranked a page, C++ ranks it by the nearest local formula (DefaultWeight).
_DEFAULT_WEIGHT = {"delta": 1, "largest": 1, "lru": 2, "next_use": 2}

CALIBRATION_STEPS = 3
"""Steps of one graph whose op times are taken (the least of them counts) before its plan is final."""
MOST_PLANS = 16
"""Graphs whose plans are remembered: alternating input shapes keep theirs."""
_AUTO_MARGIN = 0.05

HookPair: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_entered: Runtime | None = None
_entered_lock = threading.Lock()


@dataclass
class _Known:
    """What is known of one repeating step."""

    graph: StepGraph
    foresight: Foresight | None
    runs: int = 1


class Runtime:
    """Trains inside a byte budget: evicts what autograd saved, and brings it back when it is asked for.

    Args:
        budget: most bytes that the device may hold for this process: weights, gradients, optimizer
            state, activations, temporaries. Bytes, ``"10GiB"``, ``"50%"``, a float in (0, 1] of the
            device's capacity, or ``"auto"``: what is free now, less a margin.
        device: the device to manage; None for the current accelerator, or the CPU where there is none.
        policy: how to decide; see `delta_runtime.decide.policies`.
        verify: ``"first"`` rebuilds and compares, once, what is not certain to repeat by
            construction; ``"always"`` compares a hash at every rebuild; ``"off"`` trusts all ops.
        min_bytes: smaller saved tensors are left alone.
        strict: raise BudgetInfeasible where the budget cannot be met, instead of running over it.
        host_budget, disk_budget, spill_dir, link_bytes_per_s, trace: of the swapping tiers.

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

    def _start(self, config: Config, policy: Policy) -> None:
        _refuse_what_is_not_there(config)
        self.config = config
        self.policy = policy
        self.device = _resolve_device(config.device)
        if self.device.type == "cpu":
            _C.cpu_pool.install()
        self.budget_bytes = _resolve_budget(config, self.device)
        self._session = _C.Session(
            device=str(self.device),
            budget_bytes=self.budget_bytes if policy.evicts_to else 0,
            min_bytes=int(config.min_bytes),
            verify=_VERIFY[config.verify],
            stress=_STRESS[policy.stress],
            seed=policy.seed,
            drop=bool(policy.evicts_to),
        )
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
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._step_events: list[Any] = []
        self._last: StepTotals | None = None
        self._totals = StepTotals()
        self._mark = StepTotals()
        self._graph: StepGraph | None = None
        self._peak_bytes = 0
        self._depth = 0
        self._in_step = False
        self._closed = False
        self._warned_over = False
        self._attached = False
        self._thread = 0
        self._hook_handles: list[Any] = []

    # ------------------------------------------------------------------ entering and leaving

    def __enter__(self) -> Runtime:
        self._enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._closed:
            self._leave(error)

    @contextlib.contextmanager
    def step(self) -> Iterator[Runtime]:
        """Marks one step: forward and backward inside.

        Raises:
            UsageError: steps are nested, another runtime is entered, or this one is closed.
            BudgetInfeasible: with strict=True, the budget cannot be met. Gradients of this step are
                incomplete; weights and optimizer state are as they were.
        """
        if self._in_step:
            raise UsageError("runtime.step() inside runtime.step().", change="Leave the first one.")
        self._enter()
        self._in_step = True
        error: BaseException | None = None
        try:
            self._boundary()
            self._session.set_boundary(None)
            yield self
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._in_step = False
            if not self._closed:  # else close() has left already
                try:
                    self._finish_step()
                finally:
                    self._session.set_boundary(self._on_boundary)
                    self._leave(error)

    def _enter(self) -> None:
        global _entered
        if self._closed:
            raise UsageError("this runtime is closed.", change="Make a new one.")
        if self._depth == 0:
            with _entered_lock:
                if _entered is not None:
                    raise UsageError(
                        "another runtime is entered already.",
                        found=f"a runtime with a budget of {format_bytes(_entered.budget_bytes)}",
                        change="Leave it first; one runtime manages the whole process.",
                    )
                _entered = self
            self._thread = threading.get_ident()
            self._attach()
            self._begin_step()
        elif threading.get_ident() != self._thread:
            raise UsageError(
                "this runtime is entered on another thread.", change="Use it on one thread."
            )
        self._depth += 1

    def _leave(self, error: BaseException | None = None) -> None:
        global _entered
        self._depth -= 1
        if self._depth == 0:
            try:
                self._finish_step()
            finally:
                self._detach()
                with _entered_lock:
                    _entered = None
            if self.config.strict and isinstance(error, torch.OutOfMemoryError):
                raise self._infeasible() from error

    def _attach(self, above: Sequence[HookPair] = ()) -> None:
        """Puts hooks, observer and soft limit in place, below the hooks in `above`."""
        self._attached = True
        self._session.set_pump(None if self.policy.plans and not self._pumps else self._pump)
        self._session.set_boundary(self._on_boundary)
        self._session.enter()
        if self.device.type == "cpu":
            _C.cpu_pool.set_soft_limit_is_hard(self.config.strict)
        for pair in (self._hooks, *above):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensors_hooks
        self._hook_handles = [
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]

    def _detach(self) -> None:
        if not self._attached:
            return
        self._attached = False
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles = []
        torch.autograd.graph.disable_saved_tensors_hooks = _torch_disable_saved_tensors_hooks
        above = self._hooks_above()
        for _ in (self._hooks, *above):
            torch._C._autograd._pop_saved_tensors_default_hooks()
        for pair in above:
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        self._session.leave()
        self._session.set_pump(None)
        self._session.set_boundary(None)
        if self.device.type == "cpu":
            _C.cpu_pool.set_soft_limit_is_hard(False)

    def _hooks_above(self) -> list[HookPair]:
        """The hooks that others put on top of ours and have not taken away yet, lowest first."""
        above: list[HookPair] = []
        while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
            if top[0] is self._hooks[0]:
                break
            torch._C._autograd._pop_saved_tensors_default_hooks()
            above.append(top)
        above.reverse()
        for pair in above:
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        return above

    @property
    def _pumps(self) -> bool:
        """Whether Python ranks online: there is a filter and no stress."""
        return self.policy.filter is not None and self.policy.stress is Stress.NONE

    def close(self) -> None:
        """Ends the runtime. Idempotent. Backward of what was recorded goes on working."""
        global _entered
        if self._closed:
            return
        if self._depth > 0 and threading.get_ident() == self._thread:
            self._depth = 1
            self._leave()
        self._closed = True

    # ------------------------------------------------------------------ steps

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if any(callable(a) for a in args[1:]) or callable(kwargs.get("closure")):
            return  # a closure runs forward and backward inside the optimizer's step
        if self._session.counters()["dropped_now_bytes"]:
            self._session.restore_all()
        self._session.forget_past()
        self._session.set_taping(False)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._session.set_taping(True)
        if not self._in_step:
            self._boundary()

    def _on_boundary(self, _: int) -> None:
        if not self._in_step:
            self._boundary()

    def _boundary(self) -> None:
        self._finish_step()
        self._begin_step()

    def _begin_step(self) -> None:
        self._session.set_taping(True)  # an optimizer that raised has left it off
        self._session.set_logging(self._wants_log())
        self._session.begin_step()
        if self.device.type == "cpu":
            _C.cpu_pool.reset_step_peak()

    def _wants_log(self) -> bool:
        """Log until every graph seen lately is calibrated."""
        if not self._known:
            return True
        latest = next(reversed(self._known.values()))
        return latest.runs < CALIBRATION_STEPS or bool(
            self._last is not None and self._last.plan_misses
        )

    def _finish_step(self) -> None:
        """Closes the step's account, unless nothing was saved in it."""
        counters = self._session.counters()
        if counters["packs"] == self._mark.packs:
            return
        self._session.end_step()
        self._drain()
        step_peak_bytes = (
            _C.cpu_pool.step_peak_bytes() + counters["uncounted_bytes"]
            if self.device.type == "cpu"
            else int(torch.accelerator.max_memory_allocated())
        )
        now = StepTotals.from_counters(
            counters, peak_bytes=step_peak_bytes, steps=self._totals.steps + 1
        )
        self._last = now.since(self._mark)
        self._mark = now
        self._totals = replace(now, peak_bytes=max(self._totals.peak_bytes, step_peak_bytes))
        try:
            self._learn()
        except Exception:
            # Foresight only makes steps faster; without it the filter decides online.
            logger.exception("delta_runtime: no plan could be made for this step")
        self._warn_if_over(step_peak_bytes)
        self._step_events.clear()
        if self.config.report == "step":
            logger.info("%s", self.report().one_line())

    def _learn(self) -> None:
        """Takes the logged graph in and makes or improves its plan."""
        if not self._wants_log() or not self._step_events:
            return
        events = np.concatenate(self._step_events)
        graph = read_step_graph(self._session, events)
        if graph is None or len(graph.saved) == 0:
            return
        known = self._known.pop(graph.fingerprint, None)
        if known is not None and known.graph.op_name == graph.op_name:
            graph = replace(
                graph,
                op_seconds=np.minimum(known.graph.op_seconds, graph.op_seconds),
                op_watermark_bytes=np.maximum(
                    known.graph.op_watermark_bytes, graph.op_watermark_bytes
                ),
            )
            known = _Known(graph, known.foresight, known.runs + 1)
        else:
            known = _Known(graph, None)
        self._known[graph.fingerprint] = known
        while len(self._known) > MOST_PLANS:
            self._known.popitem(last=False)
        self._graph = graph
        if self.policy.plans or self._distance is Distance.NEXT_USE:
            known.foresight = foresee(graph, self.budget_bytes)
            self._publish_plans()

    def _publish_plans(self) -> None:
        tables = []
        for known in reversed(self._known.values()):
            graph, foresight = known.graph, known.foresight
            if foresight is None:
                continue
            counts = np.zeros(graph.n_values + 1, dtype=np.int64)
            counts[graph.saved + 1] = np.diff(graph.use_offsets)
            by_value = np.argsort(graph.saved, kind="stable")
            uses = [
                graph.uses[graph.use_offsets[page] : graph.use_offsets[page + 1]]
                for page in by_value
            ]
            weights = foresight.weights if self.policy.plans else np.ones(graph.n_values)
            rebuilt = foresight.rebuilt_weights if self.policy.plans else weights
            tables.append(
                (
                    np.ascontiguousarray(graph.value_fingerprint),
                    np.ascontiguousarray(weights),
                    np.ascontiguousarray(rebuilt),
                    np.cumsum(counts).astype(np.int32),
                    np.concatenate([np.empty(0, np.int64), *uses]).astype(np.int64),
                )
            )
        self._session.set_plans(tables)

    def _warn_if_over(self, peak_bytes: int) -> None:
        if not self.policy.evicts_to or peak_bytes <= self.budget_bytes:
            return
        if not self._warned_over:
            self._warned_over = True
            last = self._last
            warnings.warn(
                f"delta_runtime: the budget of {format_bytes(self.budget_bytes)} was passed: peak "
                f"{format_bytes(peak_bytes)}. The smallest budget that would do is about "
                f"{format_bytes(last.floor_bytes if last else 0)}, set by {last.floor_op if last else '?'}. "
                "runtime.report() says more; strict=True makes this an error.",
                RuntimeWarning,
                stacklevel=3,
            )

    def _infeasible(self) -> BudgetInfeasible:
        counters = self._session.counters()
        refused_bytes = _C.cpu_pool.take_refused_bytes() if self.device.type == "cpu" else 0
        outside = refused_bytes > counters["floor_bytes"]
        return BudgetInfeasible(
            self.budget_bytes,
            max(refused_bytes, counters["floor_bytes"]),
            "an allocation between ops" if outside else counters["floor_op"],
            f"{format_bytes(counters['exposed_bytes'])} of saved tensors are held by code outside "
            f"autograd; {format_bytes(counters['uncounted_bytes'])} are older than the pool",
        )

    # ------------------------------------------------------------------ the pump

    def _drain(self) -> list[Any]:
        events = drain_events(self._session)
        if not len(events):
            return []
        self._step_events.append(events)
        try:
            return self._ledger.handle(events, budget_bytes=self.budget_bytes)
        except LedgerError:
            if self.config.check:
                raise
            logger.exception("delta_runtime: the ledger is spent; a new one starts")
            self._ledger = Ledger(self.policy)
            return []

    def _pump(self, need_bytes: int) -> None:
        """Ranks what is there, when room is needed and no plan says what to drop."""
        self._drain()
        queue: PublishQueue = self._ledger.rank(int(self._session.tick()))
        distance = queue.distance if not self.policy.plans else self._distance
        self._session.publish(
            np.ascontiguousarray(queue.pages),
            np.ascontiguousarray(queue.weights),
            _DISTANCE[distance],
        )

    # ------------------------------------------------------------------ what the user asks

    def report(self) -> StepReport:
        """What happened in the last step, and in all of them."""
        return StepReport(
            budget_bytes=self.budget_bytes if self.policy.evicts_to else 0,
            policy=self.policy.name,
            device=str(self.device),
            last=self._last or StepTotals(),
            totals=self._totals,
            activation_bytes=self._graph.activation_bytes if self._graph else 0,
            ordinary_peak_bytes=self._graph.peak_bytes if self._graph else 0,
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

    def mark_written(self, tensor: torch.Tensor) -> None:
        """Says that code outside of the dispatcher wrote to this tensor's storage."""
        self._session.mark_written(tensor)


# ---------------------------------------------------------------------- module functions


def mark_written(tensor: torch.Tensor) -> None:
    """Say that code outside of the dispatcher (numpy, ctypes, a Triton kernel) wrote to a tensor.

    Its storage is kept from here on, and nothing is recomputed from its former content.
    """
    if _entered is not None:
        _entered.mark_written(tensor)


@contextlib.contextmanager
def disable() -> Iterator[None]:
    """Takes the entered runtime's hooks, observer and soft limit away for the duration of a block."""
    runtime = _entered
    if runtime is None or threading.get_ident() != runtime._thread or not runtime._attached:
        yield
        return
    above = runtime._hooks_above()
    runtime._detach()
    try:
        yield
    finally:
        if above:
            for _ in above:
                torch._C._autograd._pop_saved_tensors_default_hooks()
        if not runtime._closed:
            runtime._attach(above)


_torch_disable_saved_tensors_hooks = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
    """Stands down for what cannot bear hooks (torch.func), where torch would raise because of ours.

    Hooks that somebody else put on top of ours still make torch raise, as it should.
    """
    runtime = _entered
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if runtime is None or top is None or top[0] is not runtime._hooks[0]:
        with _torch_disable_saved_tensors_hooks(error_message):
            yield
        return
    with disable(), _torch_disable_saved_tensors_hooks(error_message):
        yield


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
    atexit.register(_finish_ambient, runtime)
    os.register_at_fork(after_in_child=_forget_after_fork)
    return runtime


def _finish_ambient(runtime: Runtime) -> None:
    runtime.close()
    if runtime.config.report != "off" and runtime._totals.steps:
        sys.stderr.write(f"{runtime.report()}\n")


def _forget_after_fork() -> None:
    """A forked child (a data-loader worker) starts with the runtime off."""
    global _entered
    runtime, _entered = _entered, None
    if runtime is not None and runtime._depth:
        runtime._detach()
        runtime._depth = 0
        runtime._closed = True


def _refuse_what_is_not_there(config: Config) -> None:
    """Names settings of parts that this version does not have, rather than ignoring them."""
    absent = {
        "host_budget": config.host_budget,
        "disk_budget": config.disk_budget,
        "spill_dir": config.spill_dir,
        "link_bytes_per_s": config.link_bytes_per_s,
        "trace": config.trace,
    }
    for name, value in absent.items():
        if value is not None:
            raise UsageError(
                f"{name}: swapping tiers and traces are not part of this version.",
                asked=f"{name}={value!r}",
                change="Leave it out: this version makes room by recomputation.",
            )


def _resolve_device(name: str | None) -> torch.device:
    if name is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    try:
        device = torch.device(name)
        if device.type != "cpu" and device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        torch.empty(0, device=device)
    except Exception as error:
        raise UsageError(
            f"device: {name!r} cannot be used.", found=f"{type(error).__name__}: {error}"
        ) from error
    return device


def _cgroup_limit_bytes() -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _resolve_budget(config: Config, device: torch.device) -> int:
    """The budget in bytes on this device.

    Raises:
        UsageError: more than the device has.
    """
    if device.type == "cpu":
        memory = psutil.virtual_memory()
        total_bytes = min(memory.total, _cgroup_limit_bytes() or memory.total)
        capacity_bytes = _C.cpu_pool.capacity_bytes() or total_bytes
        free_bytes = min(memory.available, total_bytes)
        if _C.cpu_pool.capacity_bytes():
            free_bytes = capacity_bytes - _C.cpu_pool.live_bytes()
        held_bytes = _C.cpu_pool.live_bytes()
    else:
        free_bytes, capacity_bytes = torch.accelerator.get_memory_info(device)
        held_bytes = torch.accelerator.memory_allocated(device)
    given = config.budget_bytes(capacity_bytes)
    if given is not None:
        return given
    if device.type == "cpu" and _C.cpu_pool.capacity_bytes():
        return int(capacity_bytes)  # a pool's capacity is all ours
    return int((free_bytes + held_bytes) * (1 - _AUTO_MARGIN))


__all__ = ["DeltaError", "Runtime", "disable", "mark_written", "start_ambient"]

# If importing this module was the first import of torch, the entry point had to wait until here.
import delta_runtime_autoload  # noqa: E402

delta_runtime_autoload.resume()

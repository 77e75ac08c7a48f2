"""A recorded step under a plan and a budget, on a virtual clock.

What goes and comes is decided by the code that the runtime decides by (csrc/walk), called from csrc/simulate; without a
plan by the ranking of a policy, which is the runtime's too (online). csrc/simulate/virtual_step.h says what is thought
of such a step, and what is not.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_runtime.core import compiled
from delta_runtime.core.errors import UsageError
from delta_runtime.core.events import EVENT_DTYPE, TRACE_DTYPE, Place
from delta_runtime.core.plan import Plan
from delta_runtime.core.plan_columns import columns_of
from delta_runtime.core.recipes import Recipes, recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.online.ledger import Ledger
from delta_runtime.online.policies import Policy, get_policy
from delta_runtime.planners.presence import behind_ops, gone_ops

_BOTH = get_policy("auto")
WITHOUT_LIMIT = 1 << 62
"""Bytes of host memory, where that is no matter."""

LOG_DTYPE = np.dtype(
    [
        ("kind", "<i8"),
        ("number", "<i8"),
        ("tick", "<i8"),
        ("bytes", "<i8"),
        ("dropped_bytes", "<i8"),
        ("swapped_bytes", "<i8"),
        ("begin_s", "<f8"),
        ("end_s", "<f8"),
    ]
)
"""One row of what happened; `LogRow` in csrc/simulate/virtual_step.h."""
_OP, _COPY_IN = 0, 3  # of what takes time; the same numbers as in the runtime's trace


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """What a step came to that was only thought of.

    Args:
        seconds: of the step.
        rebuild_s: of that for recomputing.
        out_stall_s, in_stall_s: of that for waiting, for copies out and for copies back.
        peak_bytes: highest live bytes.
        dropped_bytes, swapped_out_bytes: bytes that left, by either way; each time that they did.
        drops, swap_outs, rebuilds, swap_ins: how often that happened.
        shortfall_bytes: the most that a request for room was short of; 0 where all were met.
        log: what happened, in that order, as rows of LOG_DTYPE.
    """

    seconds: float
    rebuild_s: float
    out_stall_s: float
    in_stall_s: float
    peak_bytes: int
    dropped_bytes: int
    swapped_out_bytes: int
    drops: int
    swap_outs: int
    rebuilds: int
    swap_ins: int
    shortfall_bytes: int
    log: npt.NDArray[Any]

    @property
    def stall_s(self) -> float:
        """Seconds of waiting for lanes."""
        return self.out_stall_s + self.in_stall_s

    @property
    def evicted_bytes(self) -> int:
        """Bytes that left, each time that they did."""
        return self.dropped_bytes + self.swapped_out_bytes


def trace_of(step: SimulatedStep, graph: StepGraph) -> tuple[npt.NDArray[Any], dict[int, str]]:
    """Return what took time as rows for `report.trace.chrome_trace`, and the names of ops in them.

    Args:
        step: of `graph`.
        graph: the recorded step.
    """
    number = {name: index for index, name in enumerate(dict.fromkeys(graph.op_name))}
    log = step.log[step.log["kind"] <= _COPY_IN]
    rows = np.zeros(len(log), TRACE_DTYPE)
    rows["kind"] = log["kind"]
    for column in ("bytes", "dropped_bytes", "swapped_bytes", "begin_s", "end_s"):
        rows[column] = log[column]
    names = [number[name] for name in graph.op_name]
    is_op = log["kind"] == _OP
    rows["name"] = log["number"]
    rows["name"][is_op] = [names[op] for op in log["number"][is_op].tolist()]
    return rows, {index: name for name, index in number.items()}


class VirtualStep:
    """One step after the other, as the record has them.

    Args:
        graph: the recorded step; its seconds are those that ops take.
        plan: that it follows; None where there is none.
        budget_bytes: what may be live at any moment; 0: without limit.
        policy: says whether anything may be dropped, and swapped; and without a plan, what leaves first.
        links: speed of the lanes; None where nothing is swapped.
        host_bytes: the most that is swapped to.
        min_bytes: smaller values stay, as under a runtime that was told so.
        recipes: of `graph`; made where None is given.

    Raises:
        UsageError: the extension is not loaded, or the step was contracted, which no runtime carries out.
        ValueError: the plan is of another step, or cannot be carried out.

    Example:
        >>> VirtualStep(graph, plan, 10 << 30).run().seconds             # doctest: +SKIP
        1.234
    """

    def __init__(
        self,
        graph: StepGraph,
        plan: Plan | None,
        budget_bytes: int,
        *,
        policy: Policy = _BOTH,
        links: Links | None = None,
        host_bytes: int = WITHOUT_LIMIT,
        min_bytes: int = 0,
        recipes: Recipes | None = None,
    ) -> None:
        if compiled.simulate is None:
            raise UsageError(
                "Simulating needs the extension, which is not loaded.",
                change="Import delta_runtime.extension: that loads it, or says what is missing.",
            )
        if graph.contracted:
            raise UsageError(
                "A contracted step cannot be simulated.", change="Take the step that it came from."
            )
        may_swap = Place.SWAPPED in policy.evicts_to and links is not None
        self._links = links if links is not None and may_swap else Links()
        known = self._links.out_bytes_per_s > 0 and self._links.in_bytes_per_s > 0
        self._host_bytes = host_bytes if known else 0
        self._step = compiled.simulate.VirtualStep(
            _columns(graph, recipes or recipes_of(graph)),
            None if plan is None else compiled.simulate.Plan(**columns_of(graph, plan)),
            budget_bytes=budget_bytes,
            drops=Place.DROPPED in policy.evicts_to,
            out_bytes_per_s=self._links.out_bytes_per_s if known else 0.0,
            in_bytes_per_s=self._links.in_bytes_per_s if known else 0.0,
            host_bytes=self._host_bytes,
            min_bytes=min_bytes,
            is_cpu=graph.recorded_on is not None and graph.recorded_on.device == "cpu",
            distance=int(policy.distance),
            default_weight=int(policy.default_weight),
        )
        self._ledger = Ledger(policy)
        self._tick_s = graph.seconds / max(graph.n_ops, 1)
        self._is_ranked = plan is None and not policy.plans and policy.filter is not None
        if self._is_ranked:
            rank = weakref.WeakMethod(self._rank)  # the device must not keep this alive
            self._step.set_pump(lambda need_bytes: _ask(rank, need_bytes))

    def run(self) -> SimulatedStep:
        """Go through one step; lanes and clock go on from the one before."""
        totals = self._step.run()
        if self._is_ranked:
            self._take_in()
        log = np.frombuffer(self._step.log(), LOG_DTYPE)
        told = {name: getattr(totals, name) for name in SimulatedStep.__slots__ if name != "log"}
        return SimulatedStep(**told, log=log)

    def _rank(self, _: int) -> None:
        """Rank what is there, as the runtime's pump does when room is needed and no plan says what leaves."""
        self._take_in()
        out_bytes, in_bytes = self._step.queued_bytes()
        links = replace(
            self._links,
            out_queued_bytes=out_bytes,
            in_queued_bytes=in_bytes,
            store_bytes=self._host_bytes,
            tick_s=self._tick_s,
        )
        queue = self._ledger.rank(self._step.tick(), links)
        self._step.publish(queue.pages, queue.weights, queue.exits, int(queue.distance))

    def _take_in(self) -> None:
        self._ledger.handle(np.frombuffer(self._step.drain_events(), EVENT_DTYPE))


def _ask(rank: weakref.WeakMethod[Any], need_bytes: int) -> None:
    asked = rank()
    if asked is not None:
        asked(need_bytes)


def _columns(graph: StepGraph, recipes: Recipes) -> Any:
    assert compiled.simulate is not None
    ordinary = graph.op_ordinary_bytes
    behind = behind_ops(
        ordinary + graph.op_watermark_bytes, ordinary, gone_ops(graph), graph.saved_bytes
    )
    return compiled.simulate.StepColumns(
        op_tick=graph.op_tick,
        op_seconds=np.maximum(np.nan_to_num(graph.op_seconds), 0.0),
        again_seconds=np.maximum(np.nan_to_num(graph.rerun_seconds), 0.0),
        ordinary_bytes=ordinary,
        behind_bytes=behind,
        watermark_bytes=graph.op_watermark_bytes,
        backward=graph.op_backward,
        read_offsets=graph.input_offsets,
        reads=graph.inputs,
        value_op=graph.value_op,
        value_bytes=graph.value_bytes,
        saved=graph.saved,
        saved_at=graph.saved_at,
        alone_at=graph.alone_at,
        released_at=graph.released_at,
        use_offsets=graph.use_offsets,
        uses=graph.uses,
        possible=recipes.possible,
        recipe_op_offsets=recipes.op_lists.offsets,
        recipe_ops=recipes.op_lists.items,
        parent_offsets=recipes.parent_lists.offsets,
        parents=recipes.parent_lists.items,
        ticks=graph.ticks,
    )

"""What a step would come to on a card that is not there: whether it fits, the least budget, seconds at budgets.

From the record of a step (real or dry) and a card. Covers the figures and the table of them; `dry_step` records a step
without computing it, `card` says how long ops take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from delta_runtime.core.events import Place
from delta_runtime.core.recipes import recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.online.policies import Policy, get_policy
from delta_runtime.planners.bounds import bounds_of
from delta_runtime.planners.registry import PLANNERS
from delta_runtime.simulate.card import FAST, LIKELY, SLOW, Card, on_card
from delta_runtime.simulate.under_policy import (
    check_policy,
    planner_of,
    simulate,
    under_policy,
    within_under_policy,
)
from delta_runtime.simulate.virtual_step import SimulatedStep

_OP = 0  # LogKind in csrc/simulate/virtual_step.h
_AT_ONCE = Links(1e18, 1e18)
_LESS, _MORE = 0.8, 1.25  # of seconds that were measured: what another batch may take
_FINE = 0.01  # the search for the least budget ends there
_ABOVE_LEAST = 1.02  # the lowest of the budgets where none is named


@dataclass(frozen=True, slots=True)
class Seconds:
    """An estimate of time.

    Args:
        likely: with ops that reach what they commonly do.
        least, most: between what the truth may be expected.
    """

    likely: float
    least: float
    most: float

    def __str__(self) -> str:
        """As "1.2 s (0.9 s to 2 s)"."""
        return f"{format_seconds(self.likely)} ({format_seconds(self.least)} to {format_seconds(self.most)})"


@dataclass(frozen=True, slots=True)
class AtBudget:
    """A step within one budget.

    Args:
        budget_bytes: what may be live at any moment.
        fits: whether the step trains within it.
        why_not: why it does not; "" where it does.
        peak_bytes: highest live bytes; 0 where it does not fit.
        seconds: of the step; None where it does not fit.
        rebuild_s, stall_s: of `seconds.likely`, for recomputing and for waiting.
        dropped_bytes, swapped_bytes: that leave in a step, by either way.
        kept_bytes: of what autograd saves, that stay.
    """

    budget_bytes: int
    fits: bool
    why_not: str = ""
    peak_bytes: int = 0
    seconds: Seconds | None = None
    rebuild_s: float = 0.0
    stall_s: float = 0.0
    dropped_bytes: int = 0
    swapped_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a step would come to on a card.

    Args:
        card: the card.
        graph: the step, with the seconds that its ops would take there.
        peak_bytes: highest live bytes with nothing evicted.
        seconds: of a step with nothing evicted, whether it fits or not.
        least_budget_bytes: below which the step does not train.
        least_op: what needs most at that budget: the name of an op, or "optimizer".
        optimizer_peak_bytes: highest live bytes while the optimizer steps, when nothing can be evicted; 0 where no
            optimizer was seen.
        budgets: the step within each of the budgets.
    """

    card: Card
    graph: StepGraph
    peak_bytes: int
    seconds: Seconds
    least_budget_bytes: int
    least_op: str
    optimizer_peak_bytes: int
    budgets: tuple[AtBudget, ...]

    @property
    def fits(self) -> bool:
        """Whether the step trains on the card at all."""
        return self.least_budget_bytes <= self.card.usable_bytes

    def __str__(self) -> str:
        """As a few lines and a table."""
        lines = [
            f"{self.card.title}: {format_bytes(self.card.usable_bytes)} for tensors. The step "
            + (
                "fits as it is."
                if self.peak_bytes <= self.card.usable_bytes
                else "fits under a budget."
                if self.fits
                else "does not fit."
            ),
            f"With nothing evicted it peaks at {format_bytes(self.peak_bytes)} and takes {self.seconds}.",
            f"The least budget is {format_bytes(self.least_budget_bytes)}, set by {self.least_op}.",
            "",
            f"{'budget':>11}{'peak':>12}  {'step':<32}{'recompute':>10}{'wait':>10}"
            f"{'swapped':>12}{'dropped':>12}{'kept':>12}",
        ]
        lines += [_line(each) for each in self.budgets]
        lines.append("")
        lines.append(
            "An estimate: seconds by the card's roofline, bytes without kernels' workspaces, no time for the runtime."
        )
        return "\n".join(lines)


def _line(row: AtBudget) -> str:
    budget = f"{format_bytes(row.budget_bytes):>11}"
    if row.seconds is None:
        return f"{budget}{'':>12}  {row.why_not}"
    return (
        f"{budget}{format_bytes(row.peak_bytes):>12}  {row.seconds!s:<32}"
        f"{format_seconds(row.rebuild_s):>10}{format_seconds(row.stall_s):>10}"
        f"{format_bytes(row.swapped_bytes):>12}{format_bytes(row.dropped_bytes):>12}"
        f"{format_bytes(row.kept_bytes):>12}"
    )


def estimate_of(
    graph: StepGraph,
    card: Card,
    budgets_bytes: Sequence[int] = (),
    *,
    policy: str = "auto",
    optimizer_peak_bytes: int = 0,
    measured: StepGraph | None = None,
) -> Estimate:
    """Return what a recorded step would come to on a card.

    Args:
        graph: the recorded step; it must say what its ops have to do.
        card: the card.
        budgets_bytes: what may be live at any moment, of each row. Where there is none: what tensors can have,
            the least budget and 2 %, and what lies half-way.
        policy: by which values leave.
        optimizer_peak_bytes: highest live bytes while the optimizer steps.
        measured: a record that was made on the card; see `card.op_seconds`.

    Raises:
        UsageError: the record does not say what its ops have to do, or the policy is not one that evicts.
    """
    check_policy(policy)
    on = _On(graph, card, get_policy(policy), measured)
    least_bytes, least_op = on.least()
    if optimizer_peak_bytes > least_bytes:
        least_bytes, least_op = optimizer_peak_bytes, "the optimizer's step"
    budgets = budgets_bytes or _usual_budgets(card, least_bytes)
    return Estimate(
        card=card,
        graph=on.there,
        peak_bytes=max(graph.peak_bytes, optimizer_peak_bytes),
        seconds=on.seconds(lambda graph: graph.seconds),
        least_budget_bytes=least_bytes,
        least_op=least_op,
        optimizer_peak_bytes=optimizer_peak_bytes,
        budgets=tuple(on.at_budget(each, optimizer_peak_bytes) for each in budgets),
    )


def _usual_budgets(card: Card, least_bytes: int) -> list[int]:
    low = int(_ABOVE_LEAST * least_bytes)
    if low >= card.usable_bytes:
        return [card.usable_bytes]
    return [card.usable_bytes, (card.usable_bytes + low) // 2, low]


class _On:
    """A step on a card, under a policy.

    Args:
        graph: the recorded step.
        card: the card.
        policy: by which values leave.
        measured: a record that was made on the card.
    """

    def __init__(
        self, graph: StepGraph, card: Card, policy: Policy, measured: StepGraph | None
    ) -> None:
        self._card = card
        self._policy = policy
        self.there = on_card(graph, card, LIKELY, measured)
        if measured is None:
            self._fast, self._slow = on_card(graph, card, FAST), on_card(graph, card, SLOW)
        else:  # what ops reach is known; how far from it this step may be is not
            self._fast = replace(self.there, op_seconds=_LESS * self.there.op_seconds)
            self._slow = replace(self.there, op_seconds=_MORE * self.there.op_seconds)
        self._recipes = recipes_of(self.there)

    def seconds(self, of: Callable[[StepGraph], float]) -> Seconds:
        """Return what `of` comes to with ops as fast as is likely, at most and at least."""
        return Seconds(of(self.there), of(self._fast), of(self._slow))

    def least(self) -> tuple[int, str]:
        """Return the least budget that is known to do, and the op that needs most then.

        A planner that is asked for too little says what it would need; by halves less is found.
        """
        policy, graph = self._policy, self.there
        planner = PLANNERS[planner_of(policy) if policy.plans else "joint"]
        # What waits for a copy fits as well as if there was nothing to wait for.
        lanes = (_AT_ONCE, None) if Place.SWAPPED in policy.evicts_to else (None,)
        least = [planner.plan(graph, 1, each).least_budget_bytes for each in lanes]
        least_bytes = min(each or graph.peak_bytes for each in least)
        step = self._within(least_bytes)
        too_low = min(bounds_of(graph).lower_bytes, least_bytes) - 1
        if step is None:  # simulated, what the planner thought of does not fit
            too_low, least_bytes = least_bytes, graph.peak_bytes
        while least_bytes - too_low > _FINE * least_bytes:
            middle = (too_low + least_bytes) // 2
            tried = self._within(middle)
            if tried is None:
                too_low = middle
            else:
                step, least_bytes = tried, middle
        if step is None:
            needs = graph.op_ordinary_bytes + graph.op_watermark_bytes
            return graph.peak_bytes, graph.op_name[int(np.argmax(needs))]
        ops = step.log[step.log["kind"] == _OP]
        needs = ops["bytes"] + graph.op_watermark_bytes[ops["number"]]
        op = int(ops["number"][int(np.argmax(needs))])
        return least_bytes, graph.op_name[op]

    def _within(self, budget_bytes: int) -> SimulatedStep | None:
        """Return the step within a budget; None where it does not fit."""
        name, links = self._policy.name, self._card.links
        return within_under_policy(name, self.there, budget_bytes, links, recipes=self._recipes)

    def at_budget(self, budget_bytes: int, optimizer_peak_bytes: int) -> AtBudget:
        """Return the step within a budget."""
        links, recipes = self._card.links, self._recipes
        found = under_policy(self._policy.name, self.there, budget_bytes, links, recipes=recipes)
        step = found.step
        if step is None:
            return AtBudget(budget_bytes, fits=False, why_not=found.why_not)
        peak_bytes = max(step.peak_bytes, optimizer_peak_bytes)
        if peak_bytes > budget_bytes:
            named = f"the step peaks at {format_bytes(peak_bytes)}"
            return AtBudget(budget_bytes, fits=False, why_not=named)

        def again(graph: StepGraph) -> float:
            if graph is self.there:
                return step.seconds
            return simulate(
                graph, found.plan, budget_bytes, self._policy, links, recipes=recipes
            ).seconds

        return AtBudget(
            budget_bytes,
            fits=True,
            peak_bytes=peak_bytes,
            seconds=self.seconds(again),
            rebuild_s=step.rebuild_s,
            stall_s=step.stall_s,
            dropped_bytes=step.dropped_bytes,
            swapped_bytes=step.swapped_out_bytes,
            kept_bytes=max(0, self.there.activation_bytes - step.evicted_bytes),
        )

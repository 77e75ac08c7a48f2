"""What a step would come to on a card that is not there: whether it fits, the least budget, seconds at budgets.

From the record of a step (real or dry) and a card. Covers the figures and the table of them; `dry_step` records a step
without computing it, `card` says how long ops take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_runtime.core.recipes import Recipes, recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.online.policies import Policy, get_policy
from delta_runtime.planners import joint
from delta_runtime.simulate.card import FAST, SLOW, Card, Reach, on_card, op_seconds
from delta_runtime.simulate.under_policy import UnderPolicy, simulate, under_policy

_OP = 0  # LogKind in csrc/simulate/virtual_step.h
_AT_ONCE = Links(1e18, 1e18)
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
            "An estimate: seconds by the roofline of the card, workspaces as on the CPU, the runtime's own work none."
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
) -> Estimate:
    """Return what a recorded step would come to on a card.

    Args:
        graph: the recorded step; it must say what its ops have to do.
        card: the card.
        budgets_bytes: what may be live at any moment, of each row. Where there is none: what tensors can have,
            the least budget and 2 %, and what lies half-way.
        policy: by which values leave.
        optimizer_peak_bytes: highest live bytes while the optimizer steps.

    Raises:
        UsageError: the record does not say what its ops have to do, or the policy is not one that evicts.
    """
    there = on_card(graph, card)
    recipes = recipes_of(there)
    least = _Least.of(there, card, recipes)
    budgets = budgets_bytes or _usual_budgets(card, max(least.budget_bytes, optimizer_peak_bytes))
    by_optimizer = optimizer_peak_bytes > least.budget_bytes
    return Estimate(
        card=card,
        graph=there,
        peak_bytes=max(graph.peak_bytes, optimizer_peak_bytes),
        seconds=Seconds(
            there.seconds,
            float(op_seconds(graph, card, FAST).sum()),
            float(op_seconds(graph, card, SLOW).sum()),
        ),
        least_budget_bytes=max(least.budget_bytes, optimizer_peak_bytes),
        least_op="the optimizer's step" if by_optimizer else least.op,
        optimizer_peak_bytes=optimizer_peak_bytes,
        budgets=tuple(
            _at_budget(there, card, each, policy, recipes, optimizer_peak_bytes) for each in budgets
        ),
    )


def _usual_budgets(card: Card, least_bytes: int) -> list[int]:
    low = int(_ABOVE_LEAST * least_bytes)
    if low >= card.usable_bytes:
        return [card.usable_bytes]
    return [card.usable_bytes, (card.usable_bytes + low) // 2, low]


@dataclass(frozen=True, slots=True)
class _Least:
    budget_bytes: int
    op: str

    @classmethod
    def of(cls, graph: StepGraph, card: Card, recipes: Recipes) -> _Least:
        """Return the least budget that `joint` knows a plan for, and the op that needs most then."""
        lanes = (
            _AT_ONCE,
            None,
        )  # what waits for a copy fits as well as if there was nothing to wait for
        least_bytes = min(
            joint.plan(graph, 1, each).least_budget_bytes or graph.peak_bytes for each in lanes
        )
        found = under_policy("auto", graph, least_bytes, card.links, recipes=recipes)
        if found.step is None:
            return cls(
                graph.peak_bytes,
                graph.op_name[int(np.argmax(graph.op_ordinary_bytes + graph.op_watermark_bytes))],
            )
        step = found.step
        ops = step.log[step.log["kind"] == _OP]
        needs = ops["bytes"] + graph.op_watermark_bytes[ops["number"]]
        op = int(ops["number"][int(np.argmax(needs))])
        return cls(max(least_bytes, step.peak_bytes), graph.op_name[op])


def _at_budget(
    graph: StepGraph,
    card: Card,
    budget_bytes: int,
    policy: str,
    recipes: Recipes,
    optimizer_peak_bytes: int,
) -> AtBudget:
    found = under_policy(policy, graph, budget_bytes, card.links, recipes=recipes)
    if found.step is None:
        return AtBudget(budget_bytes, fits=False, why_not=found.why_not)
    peak_bytes = max(found.step.peak_bytes, optimizer_peak_bytes)
    if peak_bytes > budget_bytes:
        named = f"the step peaks at {format_bytes(peak_bytes)}"
        return AtBudget(budget_bytes, fits=False, why_not=named)
    return _row(graph, card, budget_bytes, get_policy(policy), found, recipes, peak_bytes)


def _row(
    graph: StepGraph,
    card: Card,
    budget_bytes: int,
    policy: Policy,
    found: UnderPolicy,
    recipes: Recipes,
    peak_bytes: int,
) -> AtBudget:
    step = found.step
    assert step is not None

    def seconds(reach: Reach) -> float:
        there = on_card(graph, card, reach)
        return simulate(
            there, found.plan, budget_bytes, policy, card.links, recipes=recipes
        ).seconds

    return AtBudget(
        budget_bytes,
        fits=True,
        peak_bytes=peak_bytes,
        seconds=Seconds(step.seconds, seconds(FAST), seconds(SLOW)),
        rebuild_s=step.rebuild_s,
        stall_s=step.stall_s,
        dropped_bytes=step.dropped_bytes,
        swapped_bytes=step.swapped_out_bytes,
        kept_bytes=max(0, graph.activation_bytes - step.evicted_bytes),
    )

"""What a recorded step comes to under a policy by name: its plan, where it follows one, and the simulated step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from delta_runtime.core.errors import UsageError
from delta_runtime.core.events import Place
from delta_runtime.core.plan import Plan
from delta_runtime.core.recipes import Recipes, recipes_of
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.core.units import format_bytes
from delta_runtime.online.policies import POLICIES, Policy, Stress, get_policy
from delta_runtime.planners.linear_program import SolverFailed
from delta_runtime.planners.registry import PLANNERS, Planner
from delta_runtime.simulate.virtual_step import WITHOUT_LIMIT, SimulatedStep, VirtualStep

_PLANNER_OF: Mapping[str, str] = MappingProxyType({"recompute": "recompute", "swap": "swap"})
"""Of policies that follow joint's plans, but not with all that it does."""
_WAITING = frozenset(("joint", "swap"))
"""Planners that do not plan for waiting."""
_NEVER_WAITED_FOR = 1e9
_LANES_TIMES = (2.0, 4.0, _NEVER_WAITED_FOR)
_LITTLE = 0.02  # of a step: to gain less, no other plan is looked for


def simulated_policies() -> list[str]:
    """Return the names of the policies that can be simulated: all that evict, and only when there is need."""
    return [name for name, each in POLICIES.items() if each.filter and each.stress is Stress.NONE]


def check_policy(name: str) -> None:
    """Raise UsageError where a policy cannot be simulated, or there is none of that name."""
    if name not in simulated_policies():
        raise UsageError(
            "This policy cannot be simulated.",
            asked=name,
            change=f"Choose among {', '.join(simulated_policies())}.",
        )


def planner_of(policy: Policy) -> str:
    """Return the name of the planner whose plans a policy follows, with what the policy may do."""
    return _PLANNER_OF.get(policy.name, policy.planner)


@dataclass(frozen=True, slots=True)
class UnderPolicy:
    """A step under a policy and a budget, or why there is none.

    Args:
        step: the second of two simulated ones, in which lanes are as the first left them; None where there is none.
        plan: that it follows; None where the policy makes none.
        why_not: why there is no step; "" where there is one.
        least_budget_bytes: without a step, the least budget that the planner is known to have a plan for; else None.
    """

    step: SimulatedStep | None
    plan: Plan | None = None
    why_not: str = ""
    least_budget_bytes: int | None = None

    def costs_little(self, budget_bytes: int) -> bool:
        """Whether the step is within the budget, and next to nothing of it is recomputing or waiting."""
        step = self.step
        if step is None or step.peak_bytes > budget_bytes:
            return False
        return step.rebuild_s + step.stall_s < _LITTLE * step.seconds

    def rank(self, budget_bytes: int) -> tuple[int, float]:
        """Return what is less of a better one: bytes above the budget, then seconds."""
        if self.step is None:
            return (self.least_budget_bytes or 1 << 62) - budget_bytes, float("inf")
        return max(0, self.step.peak_bytes - budget_bytes), self.step.seconds


def under_policy(
    name: str,
    graph: StepGraph,
    budget_bytes: int,
    links: Links | None,
    *,
    host_bytes: int = WITHOUT_LIMIT,
    recipes: Recipes | None = None,
) -> UnderPolicy:
    """Simulate a step under a policy.

    Args:
        name: one of `simulated_policies()`.
        graph: the recorded step.
        budget_bytes: what may be live at any moment.
        links: speed of the lanes; None where nothing can be swapped.
        host_bytes: the most that is swapped to.
        recipes: of `graph`; made where None is given.
    """
    policy = get_policy(name)
    if links is None and policy.evicts_to == (Place.SWAPPED,):
        return UnderPolicy(None, why_not="no speed of a lane is known")
    at = _At(graph, budget_bytes, policy, links, host_bytes, recipes or recipes_of(graph))
    if not policy.plans:
        return UnderPolicy(at.simulated(None))
    by = planner_of(policy)
    planner = PLANNERS[by]
    found = at.planned(planner, 1.0)
    if by not in _WAITING or links is None or found.costs_little(budget_bytes):
        return found
    others = [at.planned(planner, times) for times in _LANES_TIMES]
    if Place.DROPPED in policy.evicts_to:
        others.append(at.planned(planner, None))
    return min([found, *others], key=lambda each: each.rank(budget_bytes))


def within_under_policy(
    name: str, graph: StepGraph, budget_bytes: int, links: Links | None, *, recipes: Recipes
) -> SimulatedStep | None:
    """Return a step under a policy that stays within a budget, not the fastest; None where none was found.

    A budget that only a plan for slower lanes fits is not found; `under_policy` looks for those too.

    Args:
        name, graph, budget_bytes, links: see `under_policy`.
        recipes: of `graph`.
    """
    policy = get_policy(name)
    if links is None and policy.evicts_to == (Place.SWAPPED,):
        return None
    at = _At(graph, budget_bytes, policy, links, WITHOUT_LIMIT, recipes)

    def steps() -> Iterator[SimulatedStep | None]:
        if not policy.plans:
            yield at.simulated(None)
            return
        planner = PLANNERS[planner_of(policy)]
        if links is None or planner_of(policy) not in _WAITING:
            yield at.planned(planner, 1.0).step
            return
        # What waits for a copy fits as well as if there was nothing to wait for.
        yield at.planned(planner, _NEVER_WAITED_FOR).step
        if Place.DROPPED in policy.evicts_to:
            yield at.planned(planner, None).step

    fitting = (step for step in steps() if step is not None and step.peak_bytes <= budget_bytes)
    return next(fitting, None)


@dataclass(frozen=True, slots=True)
class _At:
    """What is simulated, but for the plan."""

    graph: StepGraph
    budget_bytes: int
    policy: Policy
    links: Links | None
    host_bytes: int
    recipes: Recipes

    def simulated(self, plan: Plan | None) -> SimulatedStep:
        return simulate(
            self.graph,
            plan,
            self.budget_bytes,
            self.policy,
            self.links,
            host_bytes=self.host_bytes,
            recipes=self.recipes,
        )

    def planned(self, planner: Planner, times: float | None) -> UnderPolicy:
        """Return the step by a plan that was made for lanes so many times as fast; None: for none.

        Planners let no step wait for a copy. Lanes that are imagined faster let them copy more; in the simulated step,
        whose lanes are as fast as they are, it waits.
        """
        lanes = None
        if self.links is not None and times is not None and Place.SWAPPED in self.policy.evicts_to:
            lanes = replace(
                self.links,
                out_bytes_per_s=times * self.links.out_bytes_per_s,
                in_bytes_per_s=times * self.links.in_bytes_per_s,
                store_bytes=self.host_bytes,
            )
        try:
            found = planner.plan(self.graph, self.budget_bytes, lanes)
        except ImportError as error:
            return UnderPolicy(None, why_not=str(error))
        except SolverFailed:
            return UnderPolicy(None, why_not="its solver failed")
        if found.plan is not None:
            return UnderPolicy(self.simulated(found.plan), found.plan)
        least = found.least_budget_bytes
        named = "" if least is None else f"; the least budget is {format_bytes(least)}"
        return UnderPolicy(None, why_not="no plan" + named, least_budget_bytes=least)


def simulate(
    graph: StepGraph,
    plan: Plan | None,
    budget_bytes: int,
    policy: Policy,
    links: Links | None,
    *,
    host_bytes: int = WITHOUT_LIMIT,
    recipes: Recipes | None = None,
) -> SimulatedStep:
    """Return the second of two simulated steps, in which lanes are as the first one left them."""
    virtual = VirtualStep(
        graph,
        plan,
        budget_bytes,
        policy=policy,
        links=links,
        host_bytes=host_bytes,
        recipes=recipes,
    )
    virtual.run()
    return virtual.run()

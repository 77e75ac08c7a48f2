"""The default planner, seeded: it searches from the plans of others, and never does worse than they do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from delta_runtime.core.plan import Plan
from delta_runtime.core.transfer import Links
from delta_runtime.planners import joint, joint_heuristic, presence_search
from delta_runtime.planners.plan_result import judged
from delta_runtime.planners.registry import PLANNERS
from delta_runtime.planners.validate import InvalidPlan
from tests.support.step_graphs import chain

MIB = 1024**2
FAST = Links(1e12, 1e12)
GRAPH = chain([8 * MIB] * 12, [0.01] * 12)
BUDGET_BYTES = GRAPH.peak_bytes * 3 // 4
SEEDS = [PLANNERS[name].plan(GRAPH, BUDGET_BYTES).plan for name in ("drop_all", "chen")]


@dataclass
class Searches:
    """What the planner itself searched from: plans, budgets, units of work. Where there is `found`, each finds that."""

    found: Plan | None = None
    calls: list[tuple[Plan, int, int]] = field(default_factory=list)

    def search(self, graph, budget_bytes, begin, *, most_work, recipes):
        """Note the call."""
        self.calls.append((begin, budget_bytes, most_work))
        if self.found is not None:
            return self.found
        return presence_search.search(
            graph, budget_bytes, begin, most_work=most_work, recipes=recipes
        )


@pytest.fixture
def searches(monkeypatch) -> Searches:
    """Listen to the searches, with a plan of its own that moves nothing."""
    listening = Searches()
    monkeypatch.setattr(joint, "search", listening.search)
    return listening


def has_none_of_its_own(monkeypatch):
    monkeypatch.setattr(joint_heuristic, "plan", lambda *_, **__: Plan.moving_nothing(GRAPH))


def test_it_searches_from_each_seed_that_copies_nothing(searches):
    copies = joint_heuristic.plan(GRAPH, BUDGET_BYTES, drops=False, links=FAST)
    joint.plan(GRAPH, BUDGET_BYTES, FAST, seeds=[*SEEDS, copies])
    most = joint_heuristic.MOST_TO_SEARCH
    assert searches.calls == [(each, BUDGET_BYTES, most) for each in SEEDS]


def test_what_it_finds_from_a_seed_is_the_result_where_it_is_better(searches, monkeypatch):
    searches.found = joint.plan(GRAPH, BUDGET_BYTES).plan
    has_none_of_its_own(monkeypatch)
    seconds = [judged(each, GRAPH).seconds for each in (searches.found, *SEEDS)]
    assert seconds[0] < min(seconds[1:])
    found = joint.plan(GRAPH, BUDGET_BYTES, seeds=SEEDS)
    assert found.seconds == seconds[0]
    assert found.plan.intervals() == searches.found.intervals()


def test_a_seed_that_nothing_is_better_than_is_the_result(searches, monkeypatch):
    best = joint.plan(GRAPH, BUDGET_BYTES).plan
    searches.found = Plan.moving_nothing(GRAPH)  # which does not fit
    has_none_of_its_own(monkeypatch)
    found = joint.plan(GRAPH, BUDGET_BYTES, seeds=[*SEEDS, best]).plan
    assert found.intervals() == best.intervals()
    assert joint.plan(GRAPH, BUDGET_BYTES).plan is None


@pytest.mark.parametrize("ops", [5, 20])
def test_a_seed_for_another_graph_is_refused(ops):
    other = Plan.moving_nothing(chain([8 * MIB] * ops, [0.01] * ops))
    with pytest.raises(InvalidPlan, match="are not those of the values of this graph"):
        joint.plan(GRAPH, BUDGET_BYTES, seeds=[other])


@pytest.mark.parametrize("bytes_per_s", [1e8, 3e8, 1e9, 3e9, 1e10])
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_with_lanes_it_is_no_worse_than_swapping_alone_or_dropping_alone(bytes_per_s, share):
    links = Links(bytes_per_s, bytes_per_s)
    budget_bytes = int(share * GRAPH.peak_bytes)
    found = joint.plan(GRAPH, budget_bytes, links)
    for name in ("swap", "recompute"):
        other = PLANNERS[name].plan(GRAPH, budget_bytes, links)
        assert not other.feasible or found.seconds <= other.seconds * (1 + 1e-9)

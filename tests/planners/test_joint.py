"""The default planner, seeded: it searches from the plans of others, and never does worse than they do."""

from __future__ import annotations

import pytest

from delta_runtime.core.plan import Plan
from delta_runtime.core.transfer import Links
from delta_runtime.planners import chen, joint, joint_heuristic, presence_search, rotor
from delta_runtime.planners.plan_result import judged
from tests.support.step_graphs import chain

MIB = 1024**2
FAST = Links(1e12, 1e12)


@pytest.fixture
def begins(monkeypatch) -> list[Plan]:
    """Plans that the planner itself searched from."""
    begun: list[Plan] = []

    def search(graph, budget_bytes, begin, **options):
        begun.append(begin)
        return presence_search.search(graph, budget_bytes, begin, **options)

    monkeypatch.setattr(joint, "search", search)
    return begun


def test_it_searches_from_each_seed_that_copies_nothing(begins):
    graph = chain([8 * MIB] * 12, [0.01] * 12)
    budget_bytes = graph.peak_bytes * 3 // 4
    seeds = [each.plan(graph, budget_bytes).plan for each in (rotor, chen)]
    copies = joint_heuristic.plan(graph, budget_bytes, drops=False, links=FAST)
    found = joint.plan(graph, budget_bytes, FAST, seeds=[*seeds, copies])
    assert begins == seeds
    assert found.peak_bytes <= budget_bytes
    assert found.seconds <= min(judged(each, graph).seconds for each in seeds)


def test_a_seed_that_nothing_is_better_than_is_the_result(monkeypatch):
    graph = chain([8 * MIB] * 12, [0.01] * 12)
    budget_bytes = graph.peak_bytes // 2
    best = joint.plan(graph, budget_bytes).plan
    monkeypatch.setattr(joint_heuristic, "plan", lambda *_, **__: Plan.moving_nothing(graph))
    monkeypatch.setattr(joint, "search", lambda *_, **__: None)
    found = joint.plan(graph, budget_bytes, seeds=[best]).plan
    assert found.intervals() == best.intervals()
    assert joint.plan(graph, budget_bytes).plan is None

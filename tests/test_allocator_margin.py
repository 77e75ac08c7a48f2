"""How much of a budget is left to an accelerator's allocator: which steps count, by how much, and where it ends.

By numbers alone. Does not cover: a real allocator (tests/accelerator/test_fragments.py).
"""

from __future__ import annotations

import pytest

from delta_runtime.allocator_margin import AllocatorMargin

BUDGET = 1_000_000


def run(
    margin: AllocatorMargin, plan: object, *reserved: int, retries: int = 0, least: int = 0
) -> list[bool]:
    """Steps that follow a plan, one for each number; whether the cache was to be given back behind each."""
    return [
        margin.saw(reserved_bytes=each, retries=retries, least_bytes=least, plan=plan)
        for each in reserved
    ]


def test_what_fits_changes_nothing():
    margin = AllocatorMargin(BUDGET)
    assert run(margin, "plan", *[BUDGET] * 10) == [False] * 10
    assert margin.bytes == 0 and not margin.is_looked_for


def test_the_first_steps_of_a_plan_do_not_count_but_the_cache_goes():
    margin = AllocatorMargin(BUDGET)
    assert run(margin, "plan", 1_250_000, 1_250_000) == [True, False]
    assert margin.bytes == 0 and margin.is_looked_for


def test_live_bytes_are_to_shrink_in_proportion():
    margin = AllocatorMargin(BUDGET)
    run(margin, "plan", *[1_250_000] * 3)
    assert margin.bytes == 200_000
    run(margin, "next", *[1_100_000] * 3)
    assert margin.bytes == pytest.approx(BUDGET - 800_000 / 1.1, abs=2)
    run(margin, "third", *[990_000] * 3)
    assert margin.bytes == pytest.approx(BUDGET - 800_000 / 1.1, abs=2) and not margin.is_looked_for


def test_nothing_more_is_kept_away_until_there_is_a_plan_for_it():
    margin = AllocatorMargin(BUDGET)
    run(margin, "plan", *[1_250_000] * 6)
    assert margin.bytes == 200_000
    assert True in run(margin, "plan", *[1_250_000] * 9)  # no plan comes
    run(margin, "plan", *[1_250_000] * 2)
    assert margin.bytes > 200_000


def test_a_device_that_is_full_counts_by_its_retries():
    few, many = AllocatorMargin(BUDGET), AllocatorMargin(BUDGET)
    for step in range(4):
        few.saw(reserved_bytes=BUDGET, retries=step, least_bytes=0, plan="plan")
        many.saw(reserved_bytes=BUDGET, retries=100 * step, least_bytes=0, plan="plan")
    assert few.bytes == pytest.approx(0.02 * BUDGET, abs=2)
    assert many.bytes == pytest.approx(0.1 * BUDGET, abs=2)


def test_steps_without_a_plan_count_where_they_go_on():
    margin = AllocatorMargin(BUDGET)
    for step in range(1, 9):
        margin.saw(reserved_bytes=BUDGET, retries=step, least_bytes=0, plan=None)
    assert margin.bytes == 0
    margin.saw(reserved_bytes=BUDGET, retries=9, least_bytes=0, plan=None)
    assert margin.bytes == pytest.approx(0.02 * BUDGET, abs=2)
    quiet = AllocatorMargin(BUDGET)
    for _ in range(100):
        quiet.saw(reserved_bytes=2 * BUDGET, retries=0, least_bytes=0, plan=None)
    assert quiet.bytes == 0


@pytest.mark.parametrize(("least", "ends_at"), [(0, 500_000), (900_000, 91_000)])
def test_it_ends_at_the_least_and_at_half(least: int, ends_at: int):
    margin = AllocatorMargin(BUDGET)
    for number in range(10):
        run(margin, f"plan {number}", *[3_000_000] * 3, least=least)
    assert margin.bytes == pytest.approx(ends_at, abs=2)
    assert not margin.is_looked_for


def test_a_search_has_an_end():
    margin = AllocatorMargin(BUDGET)
    for _ in range(100):
        margin.saw(reserved_bytes=0, retries=0, least_bytes=0, plan=None)
    assert not margin.is_looked_for

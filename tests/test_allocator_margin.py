"""How much of a budget is left to an accelerator's allocator: which steps count, by how much, and where it ends.

By numbers alone. Does not cover: a real allocator (tests/accelerator/test_fragments.py).
"""

from __future__ import annotations

import pytest

from delta_runtime.allocator_margin import AllocatorMargin

BUDGET = 1_000_000


class Steps:
    """Steps of an allocator that reserves so many times what lives, and finds out what a margin does to that."""

    def __init__(self, times: float, *, least: int = 0, foreign: int = 0) -> None:
        self.margin = AllocatorMargin(BUDGET)
        self.times = times
        self.least = least
        self.foreign = foreign  # cached by others before each step
        self.pinned = 0  # and what they hold on to
        self.emptied = 0
        self.retries = 0
        self.plan = 0
        self._planned_for = -1

    def run(
        self, steps: int, *, followed: bool = True, retries: int = 0, dear: bool = False
    ) -> None:
        for _ in range(steps):
            if self.margin.bytes != self._planned_for:
                self.plan += 1
                self._planned_for = self.margin.bytes
            empty = self.margin.measures
            if empty:
                self.margin.measure()
                self.emptied += 1
            self.retries += retries
            live = BUDGET - self.margin.bytes
            self.margin.saw(
                reserved_bytes=max(
                    self.pinned, int(live * self.times) + (0 if empty else self.foreign)
                ),
                peak_bytes=live,
                retries=self.retries,
                least_bytes=lambda: self.least,
                plan=self.plan if followed else None,
                dear=dear,
            )


def test_what_fits_changes_nothing():
    steps = Steps(1.0)
    steps.run(30)
    assert steps.margin.bytes == 0 and steps.emptied == 0 and not steps.margin.is_looked_for


def test_live_bytes_shrink_until_what_is_reserved_fits():
    steps = Steps(1.3)
    steps.run(30)
    assert BUDGET * (1 - 1 / 1.3) <= steps.margin.bytes <= 0.26 * BUDGET
    assert 0 < steps.emptied <= 6


def test_the_first_steps_of_a_plan_do_not_count():
    steps = Steps(1.3)
    steps.run(2)
    assert steps.margin.bytes == 0 and steps.margin.is_looked_for
    steps.run(2)
    assert steps.margin.bytes > 0


def test_what_others_have_left_in_the_cache_does_not_count():
    steps = Steps(0.9, foreign=2 * BUDGET)
    steps.run(100)
    assert steps.margin.bytes == 0 and steps.emptied == 2


def test_a_margin_that_does_not_help_is_taken_back():
    """Others hold on to more than the budget."""
    steps = Steps(0.9)
    steps.pinned = 3 * BUDGET
    steps.run(8)
    assert steps.margin.bytes > 0
    steps.run(100)
    assert steps.margin.bytes == 0 and not steps.margin.is_looked_for


def test_nothing_more_is_kept_away_until_there_is_a_plan_for_it():
    margin = AllocatorMargin(BUDGET)

    def run(steps: int) -> None:
        for _ in range(steps):
            if margin.measures:
                margin.measure()
            margin.saw(
                reserved_bytes=1_250_000,
                peak_bytes=BUDGET,
                retries=0,
                least_bytes=lambda: 0,
                plan="plan",
            )

    run(4)
    assert margin.bytes == 200_000
    run(8)
    assert margin.bytes == 200_000, "no plan has come"
    run(8)
    assert margin.bytes == 0.2 * BUDGET + 0.2 * 0.8 * BUDGET


@pytest.mark.parametrize(("retries", "part"), [(1, 0.04), (2, 0.08), (100, 0.1)])
def test_a_device_that_is_full_counts_by_its_retries(retries: int, part: float):
    steps = Steps(1.0)
    steps.run(3, retries=retries)
    assert steps.margin.bytes == pytest.approx(part * BUDGET, abs=2)


def test_what_does_not_help_is_taken_back():
    """Retries that come from others: less that lives makes them no fewer."""
    steps = Steps(0.9)
    steps.run(200, retries=1)
    assert steps.margin.bytes == 0 and not steps.margin.is_looked_for


def test_what_costs_too_much_goes_no_further():
    steps = Steps(1.6)
    steps.run(5)
    assert steps.margin.bytes == 200_000
    steps.run(50, dear=True)
    assert steps.margin.bytes == 0, "the last margin that was not"


def test_a_counter_that_is_set_back_is_no_retry():
    steps = Steps(1.0)
    steps.retries = 50
    steps.run(10)
    steps.retries = 0
    steps.run(10)
    assert steps.margin.bytes == 0


def test_steps_without_a_plan_count_where_they_go_on():
    steps = Steps(1.0)
    steps.run(9, followed=False, retries=1)
    assert steps.margin.bytes == 0 and not steps.margin.is_looked_for
    steps.run(1, followed=False, retries=1)
    assert steps.margin.bytes == pytest.approx(0.04 * BUDGET, abs=2)
    quiet = Steps(2.0)
    quiet.run(100, followed=False)
    assert quiet.margin.bytes == 0


@pytest.mark.parametrize(("least", "most"), [(0, 500_000), (900_000, 91_000)])
def test_it_ends_at_the_least_and_at_half(least: int, most: int):
    steps = Steps(3.0, least=least)
    steps.run(100)
    assert steps.margin.bytes == pytest.approx(most, abs=2)
    assert not steps.margin.is_looked_for


def test_policies_whose_plans_nobody_can_shrink_wait_for_nothing():
    """None are made, or a planner that was asked for by name may have none for less."""
    steps = Steps(2.0)
    steps.margin = AllocatorMargin(BUDGET, plans=False)
    steps.run(50)
    assert steps.margin.bytes == 0 and steps.emptied == 0 and not steps.margin.is_looked_for

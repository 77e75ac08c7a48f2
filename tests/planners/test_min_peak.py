"""The planners of equal-time chains: least-peak checkpoints, Chen's rule, and revolve."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.planners import chen, min_peak, revolve
from tests.planners.exhaustive import least_of_all_subsets
from tests.planners.reference import CASES

CHECKPOINTS = CASES["ntu_reconstruction"]["cases"]
every_case = pytest.mark.parametrize("case", CHECKPOINTS, ids=lambda case: f"n={case['n']}")


@every_case
@pytest.mark.parametrize("objective", ["A", "B"])
def test_reference_values(case, objective):
    found = min_peak.solve(case["y"], objective=objective)
    assert found.objective == case[f"{objective}_opt"]
    assert found.peak == found.objective


sizes = st.lists(st.integers(0, 12), min_size=2, max_size=10)


@settings(max_examples=150, deadline=None)
@given(sizes, st.data())
def test_no_subset_peaks_lower(y, data):
    g = data.draw(st.lists(st.integers(0, 12), min_size=len(y), max_size=len(y)))
    n = len(y) - 1
    a = least_of_all_subsets(n, lambda kept: min_peak.peak_a(y, kept))
    assert min_peak.solve(y, g, "A").objective == a
    b = least_of_all_subsets(n, lambda kept: _peak_while_backward(y, g, kept))
    assert min_peak.solve(y, g, "B").objective == b


def _peak_while_backward(y, g, kept) -> float:
    """Objective B, step by step: rebuild a segment, then let go of it value by value."""
    breaks = [0, *kept, len(y) - 1]
    worst = 0.0
    for at in range(len(breaks) - 1, 0, -1):
        i, k = breaks[at - 1], breaks[at]
        held = sum(y[c] for c in breaks[:at])
        inside = list(y[i + 1 : k + 1])
        worst = max(worst, held + sum(inside) + g[k])
        for j in range(k, i, -1):
            worst = max(worst, held + sum(inside) + g[j] + g[j - 1])
            inside.pop()
    return worst


@pytest.mark.parametrize(("n", "peak"), [(4, 6), (9, 7), (16, 9), (25, 10), (36, 11), (64, 14)])
def test_equal_layers_under_objective_b(n, peak):
    found = min_peak.solve([1] * (n + 1))
    assert found.objective == peak
    segments = np.diff([0, *found.schedule, n])
    assert (np.diff(segments[1:]) <= 0).all(), "segments shrink towards the end"


def test_a_segment_that_holds_something_else():
    """W is what the caller says: here a segment holds one more for each of its values."""
    y = np.array([2.0, 3.0, 1.0, 4.0, 2.0, 5.0])
    plain = min_peak.within_segments(y, y)

    def dearer(i: int, begin: int, end: int) -> np.ndarray:
        return plain(i, begin, end) + np.arange(begin, end) - i

    found = min_peak.solve(y, segment_peaks=dearer)
    best = least_of_all_subsets(5, lambda kept: min_peak.peak_b(y, kept, dearer))
    assert found.objective == best > min_peak.solve(y).objective


def test_segments_may_be_asked_for_in_any_order():
    rng = np.random.default_rng(1)
    y, g = rng.integers(0, 50, (2, 40)).astype(np.float64)
    within = min_peak.within_segments(y, g)
    cuts = [(i, begin) for i in range(39) for begin in range(i + 1, 40)]
    rng.shuffle(cuts)
    for i, begin in cuts:
        whole = min_peak.within_segments(y, g)(i, i + 1, 40)
        assert within(i, begin, 40).tolist() == whole[begin - i - 1 :].tolist()


@pytest.mark.parametrize("falling", [False, True])
def test_ten_thousand_layers_take_two_seconds(falling):
    y = np.random.default_rng(5).random(10_001)
    # Where the first outputs are the largest, longer segments are looked at.
    y = np.sort(y)[::-1] if falling else y
    begin = time.process_time()
    min_peak.solve(y, objective="B")
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([1.0],), "two or more"),
        (([1.0, 2.0], [1.0]), "two or more"),
        (([1.0, -2.0],), "negative"),
        (([1.0, float("nan")],), "finite"),
        (([1.0, 2.0], None, "C"), "objective"),
    ],
)
def test_what_is_no_chain_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        min_peak.solve(*arguments)


# ---------------------------------------------------------------- Chen


@pytest.mark.parametrize(("n", "peak"), [(int(n), peak) for n, peak in CASES["chen"]["n"].items()])
def test_chen_on_equal_layers_is_the_closed_form(n, peak):
    assert chen.solve([1] * (n + 1)).objective == peak == 2 * n**0.5 - 2


@settings(max_examples=100, deadline=None)
@given(sizes)
def test_chen_is_never_below_the_least_and_never_above_keeping_all_or_nothing(y):
    found = chen.solve(y)
    assert found.objective == min_peak.peak_a(y, found.schedule)
    assert found.objective >= min_peak.solve(y, objective="A").objective
    assert found.objective <= min(min_peak.peak_a(y, []), min_peak.peak_a(y, range(1, len(y) - 1)))


# ---------------------------------------------------------------- revolve

REVOLVE = [(*map(int, key.split(",")), t) for key, t in CASES["revolve"]["t_l_s"].items()]


@pytest.mark.parametrize(("steps", "places", "extra"), REVOLVE)
def test_revolve_reference_values(steps, places, extra):
    assert revolve.solve(steps, places).objective == extra


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9))
def test_revolve_schedules_do_what_they_say(steps, places):
    found = revolve.solve(steps, places)
    stored: set[int] = set()
    at, forwards, left = 0, 0, steps
    for kind, step in found.schedule:
        if kind is revolve.Kind.STORE:
            assert at == step and len(stored) < places
            stored.add(step)
        elif kind is revolve.Kind.LOAD:
            assert step in stored
            at = step
        elif kind is revolve.Kind.ADVANCE:
            assert at == step
            at, forwards = at + 1, forwards + 1
        elif kind is revolve.Kind.REVERSE:
            assert at == step == left - 1
            left -= 1
        else:
            stored.remove(step)
    assert (left, stored) == (0, set())
    assert forwards == found.objective
    assert found.peak <= places


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6))
def test_revolve_is_the_optimum_of_its_recurrence(steps, places):
    best = {(1, s): 0 for s in range(1, places + 1)}
    for length in range(2, steps + 1):
        best[length, 1] = length * (length - 1) // 2
        for s in range(2, places + 1):
            best[length, s] = min(
                m + best[length - m, s - 1] + best[m, s] for m in range(1, length)
            )
    assert revolve.extra_forwards(steps, places) == best[steps, places]

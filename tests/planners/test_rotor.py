"""Rotor on plain numbers: the optimum, what its schedules hold, and how long it takes."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.planners import rotor
from delta_runtime.planners.chain import Action, Chain, Kind, replay
from tests.planners.exhaustive import fastest_persistent
from tests.planners.reference import CASES

REFERENCE = [
    pytest.param(case, budget, id=f"{case['name']}-{budget['M']}")
    for case in CASES["rotor"]["cases"]
    for budget in case["budgets"]
]


def _columns(case: dict) -> list[list[float]]:
    return [case[name] for name in ("f", "b", "a", "abar", "f_tmp", "b_tmp")]


@pytest.mark.parametrize(("case", "budget"), REFERENCE)
def test_reference_values(case, budget):
    found = rotor.solve(*_columns(case), memory=budget["M"])
    expected = budget["exact_persistent"]
    assert (found and found.objective) == (None if expected is None else pytest.approx(expected))
    if found:
        assert found.peak <= budget["M"]
        assert replay(Chain(*_columns(case)), found.schedule) == (found.objective, found.peak)
    assert (budget["M"] >= rotor.least_memory(*_columns(case)[2:])) == (found is not None)


@st.composite
def chains(draw: st.DrawFn, longest: int = 4, most: int = 6) -> Chain:
    n = draw(st.integers(1, longest))

    def column(length: int, least: int = 0) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=length, max_size=length))

    a = column(n + 1, 1)
    more = column(n + 1)
    abar = [size + extra for size, extra in zip(a, more, strict=True)]
    return Chain(column(n), column(n + 1), a, abar, column(n), column(n + 1))


def _solve(chain: Chain, memory: float, slots: int | None = None):
    columns = (chain.f, chain.b, chain.a, chain.abar, chain.f_tmp, chain.b_tmp)
    return rotor.solve(*columns, memory=memory, slots=slots)


@settings(max_examples=150, deadline=None)
@given(chains(), st.integers(0, 45))
def test_no_persistent_schedule_is_faster(chain, memory):
    found = _solve(chain, memory)
    assert (found and found.objective) == fastest_persistent(chain, memory)


@settings(max_examples=100, deadline=None)
@given(chains(longest=9), st.data())
def test_more_room_is_never_slower_and_the_least_is_the_least(chain, data):
    least = rotor.least_memory(chain.a, chain.abar, chain.f_tmp, chain.b_tmp)
    assert _solve(chain, least - 1) is None
    memory = data.draw(st.integers(int(least), int(least) + 40))
    tight, roomy = _solve(chain, memory), _solve(chain, memory + 1)
    assert roomy.objective <= tight.objective
    assert tight.objective >= sum(chain.f) + sum(chain.b)
    # With room for all, nothing runs twice.
    everything = _solve(chain, sum(chain.a) * 2 + sum(chain.abar) + max(*chain.b_tmp, *chain.f_tmp))
    assert everything.objective == sum(chain.f) + sum(chain.b)


@settings(max_examples=60, deadline=None)
@given(chains(longest=8), st.integers(0, 40), st.integers(1, 60))
def test_rounded_sizes_never_hold_more_than_there_is(chain, memory, slots):
    scaled = Chain(*([1000.5 * each for each in column] for column in _all(chain)))
    found = _solve(scaled, memory * 1000.5, slots)
    if found:
        assert found.peak <= memory * 1000.5
        assert found.objective >= _solve(chain, memory).objective * 1000.5 - 1e-6


def _all(chain: Chain) -> tuple:
    return chain.f, chain.b, chain.a, chain.abar, chain.f_tmp, chain.b_tmp


@pytest.mark.parametrize("memory", [0, -1])
def test_no_room_holds_what_takes_none(memory):
    nothing, half = [0.0, 0.0], [0.5, 0.5]
    fits = rotor.solve([1], [2, 2], nothing, nothing, [0], nothing, memory)
    assert (fits is None) == (memory < 0)
    assert rotor.solve([1], [2, 2], nothing, half, [0], nothing, memory) is None


def test_unit_chain():
    columns = [1] * 4, [2] * 4 + [0], [1] * 5, [3] * 5, [0] * 4, [0] * 5
    found = {m: rotor.solve(*columns, memory=m) for m in (6, 7, 8, 9, 15)}
    assert {m: each and each.objective for m, each in found.items()} == {
        **{6: None, 7: 18, 8: 16, 9: 15, 15: 12},
    }


def test_a_schedule_that_reads_what_is_gone_is_refused():
    chain = Chain([1, 1], [1, 1, 0], [1] * 3, [1] * 3, [0] * 2, [0] * 3)
    with pytest.raises(ValueError, match="not there"):
        replay(chain, [Action(Kind.SAVE, 1)])
    forward = [Action(Kind.SKIP, 0), Action(Kind.CHECKPOINT, 1), Action(Kind.LOSS, 2)]
    with pytest.raises(ValueError, match="lacks"):
        replay(chain, [*forward, Action(Kind.BACKWARD, 1)])
    with pytest.raises(ValueError, match="does not reach"):
        replay(chain, [Action(Kind.SAVE, 0)])


@pytest.mark.parametrize("name", ["a", "f_tmp"])
def test_what_is_no_chain_is_refused(name):
    columns = {
        "f": [1.0],
        "b": [1.0, 1.0],
        "a": [1, 1],
        "abar": [1, 1],
        "f_tmp": [0],
        "b_tmp": [0, 0],
    }
    with pytest.raises(ValueError, match=name):
        rotor.solve(**{**columns, name: [1, 1, 1]}, memory=10)
    with pytest.raises(ValueError, match=name):
        rotor.solve(**{**columns, name: [-1] * len(columns[name])}, memory=10)


def test_a_hundred_stages_take_a_second():
    rand = random.Random(3)
    a = [rand.randint(1, 50) for _ in range(101)]
    f = [rand.random() for _ in range(100)]
    abar = [3 * size for size in a]
    begin = time.process_time()
    found = rotor.solve(
        f, [*f, 0.1], a, abar, [0] * 100, [0] * 101, memory=sum(abar) // 3, slots=500
    )
    assert found is not None
    assert time.process_time() - begin < 5  # 0.4 s on an idle core; this one may be shared

"""Each filter on tiny named cases: its order by its paper's formula, and the units of weights."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from delta_runtime.core.events import UNKNOWN_TICK, Distance
from delta_runtime.online.filters import FILTERS, Column, Columns, distances

NOW = 1000

FORMULAS = {  # page -> score, from the papers, one page at a time
    "delta": lambda m, c, e, s, n: 1 / (m * s),
    "dtr": lambda m, c, e, s, n: (c + e) / (m * s),
    "dtr_local": lambda m, c, e, s, n: c / (m * s),
    "msps": lambda m, c, e, s, n: c / m,
    "lru": lambda m, c, e, s, n: 1 / s,
    "largest": lambda m, c, e, s, n: 1 / m,
    "next_use": lambda m, c, e, s, n: 1 / (s if n is None else n),
}

# name: bytes, seconds, neighbourhood seconds, staleness, ticks until the next use (None: unknown)
CASES = {
    "one giant": [(1 << 30, 1e-3, 0, 5, 9), (4096, 1e-3, 0, 5, 8), (8192, 1e-3, 0, 5, 7)],
    "chain": [(1 << 20, 1e-3, 0, age, 2 * age) for age in (9, 7, 5, 3, 1)],
    "chain, half dropped": [(1 << 20, 1e-3, near, 4, 4) for near in (0, 7e-3, 2e-3, 1e-3)],
    "matmul beside relu": [(1 << 22, 9e-3, 0, 2, 6), (1 << 22, 2e-4, 0, 1, 7)],
    "cheap but small": [(4096, 1e-5, 0, 3, 3), (1 << 24, 1e-3, 0, 3, 4), (1 << 16, 1e-5, 0, 3, 5)],
    "free to rebuild": [(4096, 0.0, 0, 1, None), (1 << 24, 0.5, 0, 50, None)],
    "used just now": [(4096, 1e-3, 0, 1, 1), (8192, 1e-3, 1e-3, 1, 40)],
    "some next uses unknown": [
        (4096, 1e-3, 0, 30, None),
        (4096, 1e-3, 0, 2, 20),
        (4096, 0, 0, 9, 40),
    ],
}


def columns_of(case):
    bytes_, seconds, near, staleness, ahead = zip(*case)
    return Columns(
        np.array(bytes_, np.int64),
        np.array(seconds, float),
        np.array(near, float),
        NOW - np.array(staleness, np.int64),
        np.array([UNKNOWN_TICK if each is None else NOW + each for each in ahead], np.int64),
        NOW,
    )


def test_every_filter_has_a_formula():
    assert FORMULAS.keys() == FILTERS.keys()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("name", FILTERS)
def test_scores_are_those_of_the_formula(name, case):
    expected = [FORMULAS[name](*page) for page in case]
    got = FILTERS[name].scores(columns_of(case))
    assert got == pytest.approx(expected, rel=1e-12, abs=0)
    assert np.argsort(got, kind="stable").tolist() == sorted(
        range(len(case)), key=lambda page: expected[page]
    )


ORDERS = {  # who goes first, told in words
    ("one giant", "largest"): [0, 2, 1],
    ("one giant", "delta"): [0, 2, 1],
    ("chain", "lru"): [0, 1, 2, 3, 4],
    ("chain", "next_use"): [0, 1, 2, 3, 4],
    ("chain, half dropped", "dtr"): [0, 3, 2, 1],
    ("chain, half dropped", "dtr_local"): [0, 1, 2, 3],
    ("matmul beside relu", "msps"): [1, 0],
    ("matmul beside relu", "delta"): [0, 1],
    ("cheap but small", "msps"): [1, 2, 0],
    ("cheap but small", "largest"): [1, 2, 0],
    ("free to rebuild", "msps"): [0, 1],
    ("free to rebuild", "dtr_local"): [0, 1],
    ("free to rebuild", "delta"): [1, 0],
    ("some next uses unknown", "next_use"): [2, 0, 1],
}


@pytest.mark.parametrize(("case", "name"), ORDERS)
def test_who_goes_first(case, name):
    scores = FILTERS[name].scores(columns_of(CASES[case]))
    assert np.argsort(scores, kind="stable").tolist() == ORDERS[case, name]


def test_distances_are_ticks():
    columns = columns_of(CASES["some next uses unknown"])
    assert distances(Distance.NONE, columns).tolist() == [1, 1, 1]
    assert distances(Distance.STALENESS, columns).tolist() == [30, 2, 9]
    assert distances(Distance.NEXT_USE, columns).tolist() == [30, 20, 40]


def test_a_distance_below_one_tick_counts_as_one():
    columns = columns_of([(4096, 1.0, 0, 1, 1)] * 3)
    columns = dataclasses.replace(
        columns,
        last_use=np.array([NOW, NOW - 1, NOW + 3]),
        next_use=np.array([NOW, NOW + 1, NOW - 3]),
    )
    for name in ("lru", "next_use"):
        assert FILTERS[name].scores(columns).tolist() == [1, 1, 1]


UNITS = {  # weights scale as 1/bytes and as seconds
    "delta": (-1, 0),
    "dtr": (-1, 1),
    "dtr_local": (-1, 1),
    "msps": (-1, 1),
    "lru": (0, 0),
    "largest": (-1, 0),
    "next_use": (0, 0),
}


@pytest.mark.parametrize("name", FILTERS)
def test_units_of_weights(name):
    columns = columns_of(CASES["chain, half dropped"])
    of_bytes, of_seconds = UNITS[name]
    weights = FILTERS[name].weights(columns)
    larger = FILTERS[name].weights(dataclasses.replace(columns, bytes=columns.bytes * 1024))
    slower = FILTERS[name].weights(
        dataclasses.replace(
            columns,
            seconds=columns.seconds * 1000,
            neighbourhood_seconds=columns.neighbourhood_seconds * 1000,
        )
    )
    assert larger == pytest.approx(weights * 1024.0**of_bytes)
    assert slower == pytest.approx(weights * 1000.0**of_seconds)


def test_needs_include_what_the_distance_reads():
    assert FILTERS["lru"].needs == Column.LAST_USE
    assert FILTERS["next_use"].needs == Column.LAST_USE | Column.NEXT_USE
    assert FILTERS["msps"].needs == Column.BYTES | Column.SECONDS
    assert Column.NEIGHBOURHOOD_SECONDS in FILTERS["dtr"].needs
    assert Column.NEIGHBOURHOOD_SECONDS not in FILTERS["dtr_local"].needs

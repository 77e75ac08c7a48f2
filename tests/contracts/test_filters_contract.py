"""What every filter must keep, whatever the columns: one suite over the whole registry."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from delta_runtime.core.events import Distance
from delta_runtime.online.filters import FILTERS, Column, Columns
from delta_runtime.online.policies import POLICIES

NAMES = {
    Column.BYTES: "bytes",
    Column.SECONDS: "seconds",
    Column.NEIGHBOURHOOD_SECONDS: "neighbourhood_seconds",
    Column.LAST_USE: "last_use",
    Column.NEXT_USE: "next_use",
}

every_filter = pytest.mark.parametrize("each", FILTERS.values(), ids=FILTERS)


@st.composite
def some_columns(draw, min_pages=0):
    pages = draw(st.integers(min_pages, 12))
    now = draw(st.integers(0, 2**40))

    def column(dtype, elements):
        return draw(hnp.arrays(dtype, pages, elements=elements))

    return Columns(
        column(np.int64, st.integers(0, 2**50)),
        column(np.float64, st.floats(0, 1e6)),
        column(np.float64, st.floats(0, 1e9)),
        column(np.int64, st.integers(0, now)),
        column(np.int64, st.integers(-1, 2**41)),
        now,
    )


def taken(columns, rows):
    picked = {name: getattr(columns, name)[rows] for name in NAMES.values()}
    return dataclasses.replace(columns, **picked)


def frozen(columns):
    for name in NAMES.values():
        getattr(columns, name).flags.writeable = False
    return columns


@every_filter
@settings(deadline=None, max_examples=50)
@given(columns=some_columns())
def test_weights_and_scores_are_finite_and_not_negative(each, columns):
    columns = frozen(columns)  # and a filter writes to none of them
    for result in (each.weights(columns), each.scores(columns)):
        assert result.dtype == np.float64
        assert result.shape == columns.bytes.shape
        assert np.all(np.isfinite(result)) and np.all(result >= 0)


@every_filter
@settings(deadline=None, max_examples=50)
@given(columns=some_columns(), data=st.data())
def test_a_page_is_judged_by_its_own_row(each, columns, data):
    rows = np.array(data.draw(st.permutations(range(len(columns.bytes)))), np.int64)
    keep = rows[: data.draw(st.integers(0, len(rows)))]
    assert np.array_equal(each.weights(taken(columns, rows)), each.weights(columns)[rows])
    assert np.array_equal(each.scores(taken(columns, keep)), each.scores(columns)[keep])


@every_filter
@settings(deadline=None, max_examples=50)
@given(columns=some_columns(), factor=st.integers(2, 1000))
def test_weights_move_as_declared(each, columns, factor):
    before = each.weights(columns)
    for column, name in NAMES.items():
        values = getattr(columns, name)
        after = each.weights(dataclasses.replace(columns, **{name: values * factor + 1}))
        if column in each.falls_with:
            assert np.all(after <= before)
        elif column in each.rises_with:
            assert np.all(after >= before)
        else:
            assert np.array_equal(after, before), f"{each.name} looks at {name} unsaid"


@every_filter
@settings(deadline=None, max_examples=50)
@given(columns=some_columns(), factor=st.integers(2, 1000))
def test_scores_look_only_at_what_is_needed(each, columns, factor):
    before = each.scores(columns)
    for column, name in NAMES.items():
        if column not in each.needs:
            changed = dataclasses.replace(columns, **{name: getattr(columns, name) * factor + 1})
            assert np.array_equal(each.scores(changed), before)


@every_filter
def test_declared_directions_are_strict_on_an_ordinary_page(each):
    def weight(**changed):
        page = {"bytes": 1 << 20, "seconds": 1e-3, "neighbourhood_seconds": 1e-3}
        page |= {"last_use": 50, "next_use": 200} | changed
        rows = {name: np.array([page[name]]) for name in NAMES.values()}
        return float(each.weights(Columns(**rows, now=100))[0])

    assert not each.falls_with & each.rises_with
    for column in each.falls_with:
        assert weight(**{NAMES[column]: 1 << 30}) < weight()
    for column in each.rises_with:
        assert weight(**{NAMES[column]: 1.0}) > weight()


@every_filter
@settings(deadline=None, max_examples=50)
@given(columns=some_columns(min_pages=1), later=st.integers(1, 2**30))
def test_scores_fall_with_the_distance(each, columns, later):
    before = each.scores(columns)
    if each.distance is Distance.NONE:
        assert np.array_equal(
            each.scores(dataclasses.replace(columns, now=columns.now + later)), before
        )
    elif each.distance is Distance.STALENESS:
        after = each.scores(dataclasses.replace(columns, now=columns.now + later))
        assert np.all(after <= before)
    else:
        known = columns.next_use >= 0
        far = np.where(known, columns.next_use + later, columns.next_use)
        after = each.scores(dataclasses.replace(columns, next_use=far))
        assert np.all(after <= before)
        assert np.array_equal(after[~known], before[~known])


def test_the_registry_is_in_order():
    assert all(name == each.name for name, each in FILTERS.items())
    used = {policy.filter.name for policy in POLICIES.values() if policy.filter is not None}
    assert used == set(FILTERS)

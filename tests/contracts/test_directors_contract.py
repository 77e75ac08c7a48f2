"""What every director must keep: pure, one exit for each page, and seconds compared with seconds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime.core.events import Exit
from delta_runtime.core.transfer import Links
from delta_runtime.online.directors import DIRECTORS
from delta_runtime.online.filters import Columns

ROWS = st.lists(
    st.tuples(
        st.integers(1, 1 << 34),
        st.floats(0, 10),
        st.integers(0, 999),
        st.integers(-1, 3000),
    ),
    min_size=0,
    max_size=12,
)
SPEEDS = st.one_of(st.just(0.0), st.floats(1e6, 1e12))
LINKS = st.builds(
    Links,
    out_bytes_per_s=SPEEDS,
    in_bytes_per_s=SPEEDS,
    out_queued_bytes=st.integers(0, 1 << 34),
    in_queued_bytes=st.integers(0, 1 << 34),
    tick_s=st.one_of(st.just(0.0), st.floats(1e-6, 1e-1)),
)


def columns(rows, now=1000) -> Columns:
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)
    return Columns(
        bytes=table[:, 0].astype(np.int64),
        seconds=table[:, 1].copy(),
        neighbourhood_seconds=np.zeros(len(table)),
        last_use=table[:, 2].astype(np.int64),
        next_use=table[:, 3].astype(np.int64),
        now=now,
    )


@pytest.mark.parametrize("name", DIRECTORS)
@settings(max_examples=60, deadline=None)
@given(rows=ROWS, links=LINKS)
def test_one_exit_for_each_page_and_nothing_changed(name, rows, links):
    given_columns = columns(rows)
    before = [np.copy(getattr(given_columns, each)) for each in ("bytes", "seconds", "next_use")]
    exits = DIRECTORS[name](given_columns, links)
    assert exits.dtype == np.int8 and exits.shape == (len(rows),)
    assert set(exits.tolist()) <= {Exit.DROP, Exit.SWAP}
    after = [getattr(given_columns, each) for each in ("bytes", "seconds", "next_use")]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    assert np.array_equal(exits, DIRECTORS[name](given_columns, links))


@pytest.mark.parametrize("name", sorted(set(DIRECTORS) - {"always_swap", "always_drop"}))
@settings(max_examples=60, deadline=None)
@given(rows=ROWS.filter(len), links=LINKS, factor=st.floats(1, 1000))
def test_dearer_ops_and_faster_lanes_speak_for_swapping(name, rows, links, factor):
    base = columns(rows)
    before = DIRECTORS[name](base, links)
    dearer = DIRECTORS[name](replace(base, seconds=base.seconds * factor), links)
    faster = DIRECTORS[name](
        base,
        replace(
            links,
            out_bytes_per_s=links.out_bytes_per_s * factor,
            in_bytes_per_s=links.in_bytes_per_s * factor,
        ),
    )
    assert (dearer >= before).all()
    assert (faster >= before).all()


@pytest.mark.parametrize("name", sorted(set(DIRECTORS) - {"always_swap", "always_drop"}))
def test_the_units_are_seconds(name):
    """10 MB at 10 GB/s take 1 ms each way: less than an op of 10 ms, more than one of 10 us.

    A director that mistakes milliseconds for seconds, or bytes for megabytes, fails here.
    """
    links = Links(out_bytes_per_s=1e10, in_bytes_per_s=1e10, tick_s=1e-6)
    dear, cheap = (10_000_000, 1e-2, 990, 1010), (10_000_000, 1e-5, 990, 1010)
    assert DIRECTORS[name](columns([dear, cheap]), links).tolist() == [Exit.SWAP, Exit.DROP]


def test_what_compute_hides_is_swapped_however_cheap_the_op():
    """2 ms of copies between uses that are 100 ms apart."""
    links = Links(out_bytes_per_s=1e10, in_bytes_per_s=1e10, tick_s=1e-3)
    far, near = (10_000_000, 1e-6, 999, 1099), (10_000_000, 1e-6, 999, 1000)
    for name in ("free_time", "stall"):
        assert DIRECTORS[name](columns([far, near]), links).tolist() == [Exit.SWAP, Exit.DROP]
    # DELTA's own rule does not look at that.
    assert DIRECTORS["delta_rule"](columns([far, near]), links).tolist() == [Exit.DROP, Exit.DROP]


def test_a_busy_lane_speaks_for_dropping():
    links = Links(out_bytes_per_s=1e9, in_bytes_per_s=1e9, tick_s=1e-3)
    page = columns([(1_000_000, 1e-3, 990, 1010)])
    busy = replace(links, out_queued_bytes=1_000_000_000)
    for name in ("free_time", "stall"):
        assert DIRECTORS[name](page, links).tolist() == [Exit.SWAP]
        assert DIRECTORS[name](page, busy).tolist() == [Exit.DROP]

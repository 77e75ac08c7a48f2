"""The text forms of bytes, budgets and seconds."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_runtime.core.errors import UsageError
from delta_runtime.core.units import (
    UNIT_BYTES,
    format_bytes,
    format_seconds,
    parse_budget,
    parse_bytes,
)

GIB = 1024**3


@pytest.mark.parametrize(
    ("spec", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        (4096.0, 4096),
        (np.int64(7), 7),
        (np.float32(8.0), 8),
        ("0", 0),
        ("17", 17),
        ("1_000", 1000),
        ("1e3", 1000),
        ("512MB", 512_000_000),
        ("512 mib", 512 * 1024**2),
        (" 1.5 GiB ", 3 * GIB // 2),
        ("2g", 2 * GIB),
        ("2G", 2 * GIB),
        (".5kB", 500),
        ("1.0000001 B", 1),
        ("3 bytes", 3),
    ],
)
def test_parse_bytes_reads(spec, size_bytes):
    assert parse_bytes(spec) == size_bytes
    assert type(parse_bytes(spec)) is int


@pytest.mark.parametrize(
    "spec",
    ["", "GiB", "-1", "-1GiB", "10 parsecs", "10 GiB free", "nan", "inf", "1e999", "9EiB", "1,5GiB"]
    + ["10%", "0.1 B", "\u0661", 1.5, -1, float("nan"), float("inf"), True, None, [1], 2**63],
)
def test_parse_bytes_refuses_and_says_what(spec):
    with pytest.raises(UsageError, match="^min_bytes: ") as caught:
        parse_bytes(spec, name="min_bytes")
    assert repr(spec) in str(caught.value)


def test_parse_bytes_refuses_zero_only_where_asked():
    assert parse_bytes("0 KiB") == 0
    with pytest.raises(UsageError, match="at least one byte"):
        parse_bytes("0 KiB", allow_zero=False)


def test_unknown_unit_is_named_with_the_known_ones():
    with pytest.raises(UsageError, match="unknown unit 'parsecs'") as caught:
        parse_bytes("10 parsecs")
    assert "10GiB" in str(caught.value)


@given(st.integers(0, 2**63 - 1), st.sampled_from(["", "B", " bytes"]))
def test_whole_bytes_come_back_exactly(size_bytes, unit):
    assert parse_bytes(f"{size_bytes}{unit}") == size_bytes


@given(st.integers(0, 7000), st.integers(0, 999), st.sampled_from(sorted(UNIT_BYTES)))
def test_fractions_are_exact_and_rounded_down(whole, thousandths, unit):
    expected = (whole * 1000 + thousandths) * UNIT_BYTES[unit] // 1000
    text = f"{whole}.{thousandths:03d} {unit.swapcase()}"
    if expected == 0 and thousandths or expected >= 2**63:
        with pytest.raises(UsageError):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == expected


@given(st.integers(0, 2**62))
def test_format_bytes_is_read_back(size_bytes):
    text = format_bytes(size_bytes)
    # Two decimals of a number from 1 on, and whole bytes.
    assert parse_bytes(text) == pytest.approx(size_bytes, abs=0.005 * size_bytes + 1)
    assert re.fullmatch(r"\d{1,4} B|(1|\d{1,4})\.\d\d [KMGTPE]iB", text)
    assert float(text.split()[0]) < 1024
    assert format_bytes(-size_bytes) == (f"-{text}" if size_bytes else text)


def test_format_bytes_at_the_edges():
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1024) == "1.00 KiB"
    assert format_bytes(1024**2 - 1) == "1.00 MiB"
    assert format_bytes(2**70) == "1024.00 EiB"
    assert format_bytes(1536.4) == "1.50 KiB"
    assert format_bytes(math.inf) == "inf B"


@pytest.mark.parametrize(
    ("spec", "budget_bytes"),
    [
        (4 * GIB, 4 * GIB),
        ("4GiB", 4 * GIB),
        ("1e9", 10**9),
        (0.25, 2 * GIB),
        (np.float32(0.25), 2 * GIB),
        (1.0, 8 * GIB),
        ("0.25", 2 * GIB),
        ("1.0", 8 * GIB),
        ("25%", 2 * GIB),
        ("100 %", 8 * GIB),
        ("12.5%", GIB),
        (" Auto ", None),
    ],
)
def test_parse_budget_reads(spec, budget_bytes):
    assert parse_budget(spec, 8 * GIB) == budget_bytes


@pytest.mark.parametrize(
    "spec",
    [0, 0.0, "0", "0%", -1, -0.5, "-0.5", "-10%", "101%", 1.5, "1.5", "1", "10 parsecs", "9GiB"]
    + [9 * GIB, "", "half", "nan", float("nan"), float("inf"), True, None],
)
def test_parse_budget_refuses_and_says_what_to_write(spec):
    with pytest.raises(UsageError, match="^budget: ") as caught:
        parse_budget(spec, 8 * GIB)
    assert repr(spec) in str(caught.value)


def test_parse_budget_without_capacity_judges_the_form_alone():
    assert parse_budget("50%") is None
    assert parse_budget("1TiB") == 1024 * GIB
    with pytest.raises(UsageError):
        parse_budget("150%")


@given(st.integers(1, 2**62), st.integers(1, 100))
def test_a_percentage_is_a_floor_of_the_capacity(capacity_bytes, percent):
    budget_bytes = parse_budget(f"{percent}%", capacity_bytes)
    assert budget_bytes == max(1, capacity_bytes * percent // 100)


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 s"),
        (2.5e-9, "2.50 ns"),
        (999.6e-9, "1.00 us"),
        (1.234e-3, "1.23 ms"),
        (0.9996, "1.00 s"),
        (-12.34, "-12.3 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (3725, "1 h 02 min"),
        (math.inf, "inf s"),
    ],
)
def test_format_seconds(duration_s, text):
    assert format_seconds(duration_s) == text


@given(st.floats(1e-9, 3e6))
def test_format_seconds_keeps_the_quantity(duration_s):
    scales = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
    words = format_seconds(duration_s).split()
    told_s = sum(
        float(number) * scales[unit] for number, unit in zip(words[::2], words[1::2], strict=True)
    )
    assert told_s == pytest.approx(duration_s, rel=0.01)

"""Bytes, budgets and seconds, read from and written for people.

Covers the text forms of quantities. Inside the package sizes are integer bytes and durations are
seconds as float; nothing else reads or writes another unit.
"""

from __future__ import annotations

import math
import numbers
import re
from decimal import ROUND_FLOOR, Decimal
from typing import TYPE_CHECKING, SupportsFloat, TypeAlias

if TYPE_CHECKING:
    from delta_runtime.core.errors import UsageError

BytesSpec: TypeAlias = int | float | str
"""A number of bytes: an integer, a whole float, or a text such as ``"1.5 GiB"``."""

BudgetSpec: TypeAlias = int | float | str
"""A budget: bytes as integer or text, a fraction as float or text, or ``"auto"``."""

_BINARY = {letter: 1024 ** (power + 1) for power, letter in enumerate("kmgtpe")}
_DECIMAL = {letter: 1000 ** (power + 1) for power, letter in enumerate("kmgtpe")}
UNIT_BYTES: dict[str, int] = (
    {"": 1, "b": 1, "byte": 1, "bytes": 1}
    | _BINARY
    | {f"{letter}ib": scale for letter, scale in _BINARY.items()}
    | {f"{letter}b": scale for letter, scale in _DECIMAL.items()}
)
"""Bytes per unit, keyed by the unit in lower case."""

_FORMS = 'Write bytes as a number, "512MB" (x 1000), "10GiB" or "10G" (x 1024).'
_BUDGET_FORMS = 'Write "10GiB" or "512MB", a share of the device as "50%" or 0.5, or "auto".'
_QUANTITY = re.compile(
    r"\s*([+-]?(?:[0-9][0-9_]*(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?)\s*([a-z%]*)\s*",
    re.IGNORECASE | re.ASCII,
)
_MOST_BYTES = 2**63 - 1  # what a tensor's size and every counter in C++ can hold


def parse_bytes(spec: BytesSpec, *, allow_zero: bool = True, name: str = "size") -> int:
    """Read a number of bytes.

    Units are matched without regard to case. ``kB MB GB TB PB EB`` are powers of 1000; ``KiB MiB
    GiB TiB PiB EiB`` are powers of 1024, and so are the bare letters ``K M G T P E``, as in
    ``docker --memory=2g``. Fractions of a byte are rounded down.

    Args:
        spec: an integer, a float that is whole, or text: a number and a unit, blanks allowed. Text
            without a unit means bytes.
        allow_zero: whether 0 is accepted.
        name: what is read, for the error's text.

    Returns:
        Bytes, from 0 or 1 up to 2**63 - 1.

    Raises:
        UsageError: not a number, an unknown unit, negative, or 0 where that is not allowed.

    Example:
        >>> parse_bytes("1.5 GiB"), parse_bytes("512MB"), parse_bytes("2g")
        (1610612736, 512000000, 2147483648)
    """
    return _read_bytes(spec, allow_zero=allow_zero, name=name, forms=_FORMS)


def parse_budget(
    spec: BudgetSpec, capacity_bytes: int | None = None, *, name: str = "budget"
) -> int | None:
    """Read a budget against the capacity of a device.

    Args:
        spec: bytes as an integer or text (``"10GiB"``); a share of the capacity as ``"50%"``, or
            as a float in (0, 1], which may be text with a decimal point (``"0.5"``); or ``"auto"``.
        capacity_bytes: what the device has, in bytes. None checks the spec alone: a share is then
            judged but cannot be resolved.
        name: what is read, for the error's text.

    Returns:
        The budget in bytes; None for ``"auto"``, and for a share when there is no capacity.

    Raises:
        UsageError: zero, negative, not readable, or more than the capacity.

    Example:
        >>> parse_budget("50%", 8 * 1024**3), parse_budget("auto", 8 * 1024**3)
        (4294967296, None)
    """
    if isinstance(spec, str) and spec.strip().lower() == "auto":
        return None
    share = _share(spec, name)
    if share is not None:
        if not 0 < share <= 1:
            raise _usage(
                f"{name}: a share of the device's memory lies above 0 and at most at 100 %.",
                spec,
                change=_BUDGET_FORMS,
            )
        if capacity_bytes is None:
            return None
        budget_bytes = int((share * capacity_bytes).to_integral_value(ROUND_FLOOR))
        return max(budget_bytes, 1)
    budget_bytes = _read_bytes(spec, allow_zero=False, name=name, forms=_BUDGET_FORMS)
    if capacity_bytes is not None and budget_bytes > capacity_bytes:
        raise _usage(
            f"{name}: {format_bytes(budget_bytes)} is more than the device has.",
            spec,
            found=f"{format_bytes(capacity_bytes)} on the device",
            change='Ask for less, or for "auto".',
        )
    return budget_bytes


def format_bytes(size_bytes: float) -> str:
    """Write a number of bytes with a binary unit and at least three significant digits.

    Args:
        size_bytes: bytes; a negative number is a difference, a float (a mean) is rounded.

    Returns:
        Text that `parse_bytes` reads back to within half a percent (exactly, below 1 KiB).

    Example:
        >>> format_bytes(10 * 1024**3), format_bytes(1000), format_bytes(-1536)
        ('10.00 GiB', '1000 B', '-1.50 KiB')
    """
    if not math.isfinite(size_bytes):
        return f"{size_bytes} B"
    number = round(size_bytes)
    sign, magnitude = "-" * (number < 0), abs(number)
    if magnitude < 1024:
        return f"{sign}{magnitude} B"
    units = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
    # The unit under which two decimals do not round up to 1024.00.
    power = min((magnitude.bit_length() - 1) // 10, len(units))
    if power < len(units) and round(magnitude / 1024**power, 2) >= 1024:
        power += 1
    return f"{sign}{magnitude / 1024**power:.2f} {units[power - 1]}"


def format_seconds(duration_s: SupportsFloat) -> str:
    """Write a duration with three significant digits and a unit from nanoseconds to hours.

    Args:
        duration_s: seconds; negative for a difference; inf and nan are written as such.

    Example:
        >>> format_seconds(0.00123), format_seconds(42), format_seconds(3725)
        ('1.23 ms', '42.0 s', '1 h 02 min')
    """
    seconds = float(duration_s)
    if not math.isfinite(seconds):
        return f"{seconds} s"
    sign, magnitude = "-" * (seconds < 0), abs(seconds)
    if magnitude == 0:
        return "0 s"
    for scale, unit in ((1e-9, "ns"), (1e-6, "us"), (1e-3, "ms"), (1.0, "s")):
        limit = 59.95 if unit == "s" else 999.5
        if magnitude / scale < limit:
            return f"{sign}{_three_digits(magnitude / scale)} {unit}"
    whole_seconds = round(magnitude)
    if whole_seconds < 3600:
        return f"{sign}{whole_seconds // 60} min {whole_seconds % 60:02d} s"
    whole_minutes = round(magnitude / 60)
    return f"{sign}{whole_minutes // 60} h {whole_minutes % 60:02d} min"


def _three_digits(number: float) -> str:
    """Three significant digits of a number in [0, 1000), without an exponent."""
    if number < 9.995:
        return f"{number:.2f}"
    return f"{number:.1f}" if number < 99.95 else f"{number:.0f}"


def _read_bytes(spec: BytesSpec, *, allow_zero: bool, name: str, forms: str) -> int:
    """`parse_bytes`, with the forms to recommend when it cannot be read."""
    if isinstance(spec, str):
        value, unit = _split_quantity(spec, name, forms)
        if unit not in UNIT_BYTES:
            raise _usage(
                f"{name}: unknown unit {unit!r}.",
                spec,
                change=f"{forms} The units are B, KB to EB, KiB to EiB, K to E.",
            )
        exact = value * UNIT_BYTES[unit]
    elif isinstance(spec, bool) or not isinstance(spec, numbers.Real):
        raise _usage(f"{name}: {type(spec).__name__} is not a size.", spec, change=forms)
    else:
        exact = _whole(spec, name)
    if exact < 0:
        raise _usage(f"{name}: must not be negative.", spec, change=forms)
    if exact > _MOST_BYTES:
        raise _usage(f"{name}: more than 2**63 - 1 bytes.", spec)
    size_bytes = int(exact.to_integral_value(ROUND_FLOOR))
    if size_bytes == 0 and (exact > 0 or not allow_zero):
        raise _usage(f"{name}: must be at least one byte.", spec, change=forms)
    return size_bytes


def _split_quantity(text: str, name: str, forms: str) -> tuple[Decimal, str]:
    """Split a text into a number and its unit in lower case; the text must hold nothing else."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise _usage(f"{name}: not a number with a unit.", text, change=forms)
    return Decimal(match[1].replace("_", "")), match[2].lower()


def _share(spec: BudgetSpec, name: str) -> Decimal | None:
    """Return the share of the capacity that a budget means, or None if it means bytes."""
    if isinstance(spec, str):
        value, unit = _split_quantity(spec, name, _BUDGET_FORMS)
        if unit == "%":
            return value / 100
        if unit == "" and 0 < abs(value) <= 1:
            if value == 1 and not set(spec) & set(".eE"):
                raise _usage(
                    f"{name}: 1 may mean one byte or all of the device.",
                    spec,
                    change='Write "100%", or bytes with a unit such as "10GiB".',
                )
            return value
        if unit == "" and value != value.to_integral_value():
            raise _usage(
                f"{name}: {spec.strip()} of what?",
                spec,
                change='Write a share as "50%" or 0.5, bytes with a unit such as "1.5GiB".',
            )
        return None
    if isinstance(spec, numbers.Real) and not isinstance(spec, numbers.Integral):
        value_f = float(spec)
        if not math.isfinite(value_f):
            raise _usage(f"{name}: must be finite.", spec)
        return Decimal(value_f)
    return None


def _whole(number: numbers.Real, name: str) -> Decimal:
    if isinstance(number, numbers.Integral):
        return Decimal(int(number))
    value = float(number)
    if not math.isfinite(value) or not value.is_integer():
        raise _usage(f"{name}: bytes are whole numbers.", number)
    return Decimal(int(value))


def _usage(problem: str, asked: object, *, found: str = "", change: str = "") -> UsageError:
    # Imported here because errors.py writes its sizes with format_bytes.
    from delta_runtime.core.errors import UsageError

    return UsageError(problem, asked=f"{asked!r}", found=found, change=change)

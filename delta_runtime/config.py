"""What the user asked for, checked, in one frozen object.

`Config` holds `Runtime`'s keyword arguments and the settings that only the environment has. This
module is the only reader of the ``DELTA_*`` variables (delta_runtime_autoload.py looks whether
DELTA_BUDGET is there, so that nothing of the package is imported when it is not). What depends on
the machine is left to the runtime: whether the budget fits the device, whether there is such a
device, whether there is such a policy. Imports no torch.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, TypeVar

from delta_runtime.core.errors import UsageError
from delta_runtime.core.units import BudgetSpec, BytesSpec, parse_budget, parse_bytes

VERIFY_MODES = ("always", "first", "off")
REPORT_MODES = ("off", "summary", "step")
PLANNING_MODES = ("beside", "between")
BUDGET_VARIABLE = "DELTA_BUDGET"
LEAST_BUDGET_BYTES = 1 << 20
"""A budget from the environment below this was meant in another unit: no training fits into it."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The settings of one runtime.

    Every field may also be given as the text that its environment variable would hold; it is
    checked and brought to its own type at construction.

    Args:
        budget: what the device may hold: bytes, ``"10GiB"``, ``"50%"``, a float in (0, 1], or
            ``"auto"``. Resolve it with `budget_bytes`.
        device: name of the device to manage; None for the accelerator if there is one, else the
            CPU.
        policy: name of a policy in the registry.
        host_budget: most bytes of host memory to swap to; None for the default of the device.
        disk_budget: most bytes of disk to swap to; None for no disk, unless spill_dir is given.
        spill_dir: directory of the spill file; None for the default.
        link_bytes_per_s: throttle of the lanes between a device and host memory: bytes per second, or
            the name of a profile. None for no throttle.
        verify: which rebuilt values are compared with what was dropped: always | first | off.
        min_bytes: smaller saved tensors are left alone.
        strict: raise BudgetInfeasible where the budget cannot be met, instead of running over it.
        trace: file to write the trace to; None for none.
        report: what is reported without being asked: off | summary (once, at exit) | step.
        planning: when plans are made: beside (beside training, on a thread of their own) | between (between steps,
            which wait for them: equal runs have equal plans at equal steps).
        check: check every invariant after every event (slow).
        limit_reserved: keep what an accelerator's allocator reserves inside the budget too, where that can be done.

    Raises:
        UsageError: a setting makes no sense by itself.

    Example:
        >>> Config(budget="50%", min_bytes="64KiB").min_bytes
        65536
    """

    budget: BudgetSpec = "auto"
    device: str | None = None
    policy: str = "auto"
    host_budget: BytesSpec | None = None
    disk_budget: BytesSpec | None = None
    spill_dir: str | None = None
    link_bytes_per_s: float | str | None = None
    verify: str = "first"
    min_bytes: BytesSpec = 4096
    strict: bool = False
    trace: str | None = None
    report: str = "off"
    planning: str = "beside"
    check: bool = False
    limit_reserved: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            checked = _CHECKS[field.name](field.name, getattr(self, field.name))
            object.__setattr__(self, field.name, checked)

    def budget_bytes(self, capacity_bytes: int | None = None) -> int | None:
        """Return the budget in bytes on a device of `capacity_bytes`; None stands for ``"auto"``.

        Without a capacity None stands for a share too.

        Raises:
            UsageError: the budget is more than the capacity.
        """
        return parse_budget(self.budget, capacity_bytes)

    @property
    def host_budget_bytes(self) -> int | None:
        """`host_budget` as an integer."""
        return None if self.host_budget is None else parse_bytes(self.host_budget)

    @property
    def disk_budget_bytes(self) -> int | None:
        """`disk_budget` as an integer."""
        return None if self.disk_budget is None else parse_bytes(self.disk_budget)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Config | None:
        """Read the ``DELTA_*`` variables.

        Empty variables count as unset. `report` is ``summary`` unless DELTA_REPORT says otherwise,
        for a script that runs unmodified has no other way to show what was done.

        Args:
            environ: the variables; None for the process's own.

        Returns:
            The settings; None when DELTA_BUDGET is not set, empty, or ``off``.

        Raises:
            UsageError: a variable cannot be read; the message names it.
        """
        environ = os.environ if environ is None else environ
        given = {
            name: text
            for name, variable in VARIABLES.items()
            if (text := environ.get(variable, "").strip())
        }
        if given.get("budget", "off").lower() == "off":
            return None
        _check_unit(given["budget"])
        return cls(
            **{"report": "summary"}
            | {name: _CHECKS[name](VARIABLES[name], text) for name, text in given.items()}
        )


def unknown_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that begin with ``DELTA_`` but are none of ours: probably misspelt.

    Returns:
        Each with the nearest of ours; with "" where none is near. Those of git-delta, a pager of the
        same name, are left out.
    """
    environ = os.environ if environ is None else environ
    ours = {variable.removeprefix("DELTA_"): variable for variable in VARIABLES.values()}
    found = {}
    for name in sorted(environ):
        rest = name.removeprefix("DELTA_")
        if rest in (name, *ours) or rest.startswith(_GIT_DELTA):
            continue
        near = difflib.get_close_matches(rest, ours, n=1)
        found[name] = ours[near[0]] if near else ""
    return found


def told_of_unknown(environ: Mapping[str, str] | None = None) -> str:
    """Return what to say of the unknown variables; empty where there is none.

    Without a budget the others have no effect anyway: then only a misspelt budget is told.
    """
    environ = os.environ if environ is None else environ
    has_budget = bool(environ.get(BUDGET_VARIABLE, "").strip())
    told = [
        f"there is no variable {name}" + (f"; did you mean {near}?" if near else ".")
        for name, near in unknown_variables(environ).items()
        if has_budget or near == BUDGET_VARIABLE
    ]
    return " ".join(f"{each[:1].upper()}{each[1:]}" for each in told)


@dataclass(frozen=True, slots=True)
class Launched:
    """Which of the processes this is that a launcher started together.

    Args:
        rank: its number among all; None where nobody says so.
        world_size: how many there are.
        local_rank, local_world_size: the same on this machine.
    """

    rank: int | None = None
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launched:
        """As torchrun and the launchers that follow it say, or Open MPI's."""
        environ = os.environ if environ is None else environ

        def number(*names: str) -> int | None:
            texts = (environ.get(name, "") for name in names)
            return next((int(text) for text in texts if text.strip().isdecimal()), None)

        mpi = "OMPI_COMM_WORLD_"
        world_size = max(1, number("WORLD_SIZE", f"{mpi}SIZE") or 1)
        return cls(
            rank=number("RANK", f"{mpi}RANK"),
            world_size=world_size,
            local_rank=number("LOCAL_RANK", f"{mpi}LOCAL_RANK"),
            local_world_size=max(1, number("LOCAL_WORLD_SIZE", f"{mpi}LOCAL_SIZE") or 1),
        )

    def text(self) -> str:
        """Its rank and its process id; empty where it is the only one."""
        if self.rank is None or self.world_size <= 1:
            return ""
        here = (
            f" ({self.local_rank} of {self.local_world_size} on this machine)"
            if self.local_rank is not None and 1 < self.local_world_size < self.world_size
            else ""
        )
        return f"rank {self.rank} of {self.world_size}{here}, process {os.getpid()}"


def check_requested(environ: Mapping[str, str] | None = None) -> bool:
    """Whether DELTA_CHECK asks for invariant checks, for runtimes made in code.

    Raises:
        UsageError: DELTA_CHECK is neither true nor false.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(VARIABLES["check"], "").strip()
    return bool(text) and _check_bool(VARIABLES["check"], text)


def limit_requested(environ: Mapping[str, str] | None = None) -> bool:
    """Whether reserved bytes are to be kept inside the budget, for runtimes made in code: unless DELTA_LIMIT_RESERVED
    is false.

    Raises:
        UsageError: DELTA_LIMIT_RESERVED is neither true nor false.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(VARIABLES["limit_reserved"], "").strip()
    return not text or _check_bool(VARIABLES["limit_reserved"], text)


def planning_requested(environ: Mapping[str, str] | None = None) -> str:
    """When DELTA_PLANNING says that plans are to be made, for runtimes made in code.

    Raises:
        UsageError: it is none of PLANNING_MODES.
    """
    environ = os.environ if environ is None else environ
    name = VARIABLES["planning"]
    return _one_of(*PLANNING_MODES)(name, environ.get(name, "").strip() or PLANNING_MODES[0])


VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "budget": BUDGET_VARIABLE,
        "policy": "DELTA_POLICY",
        "device": "DELTA_DEVICE",
        "host_budget": "DELTA_HOST_BUDGET",
        "disk_budget": "DELTA_DISK_BUDGET",
        "spill_dir": "DELTA_SPILL_DIR",
        "verify": "DELTA_VERIFY",
        "min_bytes": "DELTA_MIN_BYTES",
        "strict": "DELTA_STRICT",
        "trace": "DELTA_TRACE",
        "report": "DELTA_REPORT",
        "planning": "DELTA_PLANNING",
        "check": "DELTA_CHECK",
        "limit_reserved": "DELTA_LIMIT_RESERVED",
    }
)
"""The environment variable of each field that has one."""


_GIT_DELTA = ("FEATURES", "PAGER", "NAVIGATE", "EXPERIMENTAL_")


def _check_unit(text: str) -> None:
    """Refuse a budget that cannot have been meant."""
    budget_bytes = parse_budget(text, name=BUDGET_VARIABLE)
    if budget_bytes is None or budget_bytes >= LEAST_BUDGET_BYTES:
        return
    number = re.match(r"\s*(\d+(\.\d+)?)", text)
    digits = number[1] if number else ""
    meant = f'"{digits}GiB"' if float(digits or 0) < 1024 else f'"{digits}MiB"'
    if float(digits or 0) <= 100:
        meant += f' or "{digits}%"'
    raise UsageError(
        f"{BUDGET_VARIABLE}: {budget_bytes:,} bytes are too few for any training.",
        asked=repr(text),
        change=f"Did you mean {meant}?",
    )


# --- one check per field: takes the name to blame and the value, returns it in its own type -------


def _check_budget(name: str, value: Any) -> BudgetSpec:
    parse_budget(value, name=name)
    spec: BudgetSpec = value.strip() if isinstance(value, str) else value
    return spec


def _check_bytes(name: str, value: Any) -> int:
    return parse_bytes(value, name=name)


def _check_positive_bytes(name: str, value: Any) -> int:
    return parse_bytes(value, allow_zero=False, name=name)


def _check_link(name: str, value: Any) -> float | str:
    """Read a speed, or the name of a profile (which only the lanes know)."""
    if isinstance(value, str) and re.fullmatch(r"\s*[A-Za-z][\w.-]*\s*", value):
        return value.strip()
    if isinstance(value, str):
        return float(_check_positive_bytes(name, re.sub(r"/s\s*$", "", value)))
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise UsageError(f"{name}: must be bytes per second above 0.", asked=repr(value))
    if not math.isfinite(value):
        raise UsageError(f"{name}: must be finite; None means no throttle.", asked=repr(value))
    return float(value)


def _check_bool(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text not in _TRUE | _FALSE:
        raise UsageError(
            f"{name}: neither true nor false.",
            asked=repr(value),
            change="Write 1, true, yes or on; or 0, false, no or off.",
        )
    return text in _TRUE


def _check_path(name: str, value: Any) -> str:
    try:
        path = os.fspath(value)
    except TypeError:
        raise UsageError(f"{name}: not a path.", asked=repr(value)) from None
    if not isinstance(path, str) or not path.strip():
        raise UsageError(f"{name}: an empty path, or one of bytes.", asked=repr(value))
    return path


def _check_name(name: str, value: Any) -> str:
    text = str(value).strip()  # a torch.device prints as its name
    if not text:
        raise UsageError(f"{name}: an empty name.", asked=repr(value))
    return text


def _one_of(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        text = value.strip().lower() if isinstance(value, str) else ""
        if text not in choices:
            raise UsageError(
                f"{name}: no such choice.",
                asked=repr(value),
                change=f"Choose one of {', '.join(choices)}.",
            )
        return text

    return check


def _optional(check: Callable[[str, Any], T]) -> Callable[[str, Any], T | None]:
    return lambda name, value: None if value is None else check(name, value)


_CHECKS: Mapping[str, Callable[[str, Any], Any]] = MappingProxyType(
    {
        "budget": _check_budget,
        "device": _optional(_check_name),
        "policy": _check_name,
        "host_budget": _optional(_check_positive_bytes),
        "disk_budget": _optional(_check_positive_bytes),
        "spill_dir": _optional(_check_path),
        "link_bytes_per_s": _optional(_check_link),
        "verify": _one_of(*VERIFY_MODES),
        "min_bytes": _check_bytes,
        "strict": _check_bool,
        "trace": _optional(_check_path),
        "report": _one_of(*REPORT_MODES),
        "planning": _one_of(*PLANNING_MODES),
        "check": _check_bool,
        "limit_reserved": _check_bool,
    }
)

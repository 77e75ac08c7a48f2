"""The verb `run`: a script or a module under a budget, run as Python itself would.

It sets the DELTA_* variables from its options, where child processes find them too, and starts the ambient runtime.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import delta_runtime_autoload
from delta_runtime.cli import PROGRAM
from delta_runtime.config import (
    BUDGET_VARIABLE,
    PLANNING_MODES,
    REPORT_MODES,
    VARIABLES,
    VERIFY_MODES,
    Config,
)
from delta_runtime.core.errors import DeltaError

if TYPE_CHECKING:
    from delta_runtime.runtime import Runtime

_USAGE = f"{PROGRAM} run --budget 10GiB [options] (script.py | -m module) [its arguments]"
_FLAGS = ("strict", "check")
_HELP = {
    "budget": "what the device may hold: 10GiB, 50%%, 0.5 or auto",
    "policy": "name of the policy that decides what leaves the device; auto if not given",
    "device": "cpu, cuda, cuda:1, ...",
    "host_budget": "most bytes of host memory to swap to",
    "disk_budget": "most bytes of disk to swap to",
    "spill_dir": "directory of the spill file",
    "verify": "which rebuilt values are compared: " + ", ".join(VERIFY_MODES),
    "min_bytes": "smaller saved tensors are left alone",
    "strict": "raise where the budget cannot be met",
    "trace": "file to write the trace to",
    "report": ", ".join(REPORT_MODES),
    "planning": "when plans are made: " + ", ".join(PLANNING_MODES),
    "check": "check every invariant after every event (slow)",
    "limit_reserved": "0: the budget is about what lives, and not about all that a GPU's allocator reserves",
}


def add_parser(commands: Any) -> None:
    """Add the verb and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "run", help="run a training script under a budget", usage=_USAGE, allow_abbrev=False
    )
    for name, variable in VARIABLES.items():
        option = "--" + name.replace("_", "-")
        text = f"{_HELP[name]} (default: ${variable})"
        if name in _FLAGS:
            parser.add_argument(option, action="store_const", const="1", help=text)
        else:
            parser.add_argument(option, metavar="X", help=text)


def run(options: argparse.Namespace, target: list[str]) -> str:
    """Start the runtime and run the target.

    Args:
        options: of the verb.
        target: a script, or ``-m`` and a module, and its arguments.

    Returns:
        What is wrong with the call; "" when the target has run.
    """
    if problem := wrong_target(target, "run", _USAGE):
        return problem
    try:
        start_runtime({name: getattr(options, name) for name in VARIABLES})
    except (DeltaError, ImportError) as error:
        return cannot_start("run", error)
    run_target(target)
    return ""


def wrong_target(target: list[str], verb: str, usage: str) -> str:
    """Say what is wrong with a script, or ``-m`` and a module, and its arguments; "" if nothing is."""
    if not target or target == ["-m"]:
        return f"usage: {usage}\n{PROGRAM} {verb}: name a script, or -m and a module\n"
    if target[0] != "-m" and not os.path.exists(target[0]):
        return f"{PROGRAM} {verb}: there is no {target[0]!r}\n"
    return ""


def cannot_start(verb: str, error: Exception) -> str:
    """Say why the runtime did not start."""
    hint = f"\nSee `{PROGRAM} doctor`." if isinstance(error, ImportError) else ""
    return f"{PROGRAM} {verb}: {error}{hint}\n"


def find_target(arguments: list[str]) -> int:
    """Index of the script or of ``-m`` among the arguments of a verb that runs one, or their number."""
    flags = {f"--{name}" for name in _FLAGS}
    index = 1
    while index < len(arguments):
        argument = arguments[index]
        if argument == "-m" or not argument.startswith("-"):
            return index
        takes_next = argument.startswith("--") and "=" not in argument and argument not in flags
        index += 2 if takes_next else 1
    return len(arguments)


def start_runtime(options: Mapping[str, str | None]) -> Runtime | None:
    """Put the options into the environment, where child processes find them too, and start.

    Returns:
        The entered runtime; None where the budget is off.

    Raises:
        DeltaError: an option makes no sense, or the runtime cannot start.
        ImportError: torch or the extension is missing.
    """
    for name, text in options.items():
        if text is not None:
            os.environ[VARIABLES[name]] = text
    if not os.environ.get(BUDGET_VARIABLE, "").strip():
        raise DeltaError("There is no budget.", change="Give --budget 10GiB, 50%, or auto.")
    if Config.from_environment() is None:
        return None  # --budget off: the script as it is
    delta_runtime_autoload.tell_of_unknown()
    delta_runtime_autoload.hold()  # errors are told here, not as a warning in the middle of torch
    from delta_runtime.ambient import start_ambient

    return start_ambient()


def run_target(target: list[str]) -> None:
    """Run a script or a module as ``__main__``, with its own arguments and import path."""
    is_module = target[0] == "-m"
    sys.argv = target[1:] if is_module else target
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target[0]))
    if is_module:
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(target[0], run_name="__main__")

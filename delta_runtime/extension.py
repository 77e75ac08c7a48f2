"""Loads the extension, or says in one sentence what is missing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch  # noqa: F401  the extension links against its libraries, which must be loaded first

from delta_runtime.core import compiled
from delta_runtime.core.errors import (
    DeltaError,
    InplaceModification,
    RecomputeMismatch,
    SwapFailed,
)
from delta_runtime.core.interrupts import ask_with

try:
    from delta_runtime import _C
except ImportError as error:  # pragma: no cover - the build is broken
    raise DeltaError(
        "The extension delta_runtime._C cannot be loaded.",
        found=f"{type(error).__name__}: {error}",
        change=(
            "Build it against the torch that is installed: "
            "pip install --no-build-isolation -e . (needs g++ and the Python headers)."
        ),
    ) from error

_C.set_error_types(InplaceModification, RecomputeMismatch, SwapFailed)
_C.set_main_thread(threading.main_thread().ident)
ask_with(_C.asked_to_stop)
compiled.offer(_C.planners, _C.simulate)

Function = TypeVar("Function", bound=Callable[..., Any])


def shielded(function: Function) -> Function:
    """Return a function or method that no signal handler interrupts.

    What keeps the runtime's state together (entering, leaving, what runs at the boundaries of steps)
    must not stop half-way because somebody presses Ctrl-C. The signal is not lost: its handler runs
    when the function has returned, in the code that called it. Works on the main thread, where
    Python handles signals; see csrc/util/signals.h.
    """
    return cast(Function, _C.Shielded(function))


__all__ = ["_C", "shielded"]

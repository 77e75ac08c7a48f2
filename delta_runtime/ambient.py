"""The runtime that the environment asks for: started when torch has been imported, reported when Python ends."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING

from delta_runtime.config import Config
from delta_runtime.entered import entered
from delta_runtime.extension import shielded

if TYPE_CHECKING:
    from delta_runtime.runtime import Runtime


@shielded
def start_ambient() -> Runtime | None:
    """Start the runtime that the environment asks for; called when torch has been imported.

    Returns:
        The entered runtime; None where DELTA_BUDGET is not set.

    Raises:
        DeltaError: the environment asks for something that makes no sense; nothing was started.
    """
    config = Config.from_environment()
    if config is None:
        return None
    from delta_runtime.runtime import Runtime

    already = entered()
    if isinstance(already, Runtime):
        return already
    runtime = Runtime.from_config(config)
    runtime.__enter__()
    atexit.register(_finish, runtime, os.getpid())
    return runtime


@shielded
def _finish(runtime: Runtime, process: int) -> None:
    if os.getpid() != process:  # a forked child: what is to be told is the parent's to tell
        return
    runtime.close()
    if runtime.config.report != "off" and runtime.steps.totals.steps:
        sys.stderr.write(f"{runtime.report()}\n")


# If importing this module was the first import of torch, the entry point had to wait until here.
import delta_runtime_autoload  # noqa: E402

delta_runtime_autoload.resume()

"""Warnings that point at the program's own line.

What the runtime has to say comes up inside of an op, at the end of a block, in a trainer's loop: the
line to be shown is the one that the reader wrote.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from pathlib import Path

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep


def warn(message: str) -> None:
    """Give a RuntimeWarning on the innermost line of the program that is running.

    Lines of this package, of torch and of contextlib do not count; lines of other installed packages
    and of the standard library only where there is nothing else (a trainer that runs as a program).
    """
    passed_over, libraries = _prefixes()
    level = fallback = 0
    frame = sys._getframe(1)
    depth = 1
    while frame is not None:
        name = frame.f_code.co_filename
        depth += 1
        if not name.startswith(passed_over):
            if not name.startswith(libraries):
                level = depth
                break
            fallback = fallback or depth
        frame = frame.f_back  # type: ignore[assignment]
    warnings.warn(message, RuntimeWarning, stacklevel=level or fallback or 2)


def _prefixes() -> tuple[tuple[str, ...], tuple[str, ...]]:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    passed_over = (_OWN, "<frozen", *((str(Path(torch).parent) + os.sep,) if torch else ()))
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    contextlib = str(Path(warnings.__file__).with_name("contextlib.py"))
    return (*passed_over, contextlib), tuple(path for path in paths if path)

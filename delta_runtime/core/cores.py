"""How many cores this process may use. Does not cover what else runs on the machine."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return on how many cores this process may run: hardware threads that its affinity names."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

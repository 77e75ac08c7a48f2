"""Where the extension leaves what it computes faster, for parts that live without it.

Each of these has a twin in Python that gives equal results, and is used where there is nothing here.
"""

from __future__ import annotations

from types import ModuleType

planners: ModuleType | None = None
"""Inner loops of the planners (csrc/planners); None where the extension was not loaded."""


def offer(inner_loops: ModuleType) -> None:
    """Have the planners use these from now on."""
    global planners
    planners = inner_loops

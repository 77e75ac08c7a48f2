"""Where the extension leaves what parts use that import no torch.

The planners' inner loops have twins in Python that give equal results, and are used where there is nothing here. The
simulator has none: it decides by the very code that the runtime decides by.
"""

from __future__ import annotations

from types import ModuleType

planners: ModuleType | None = None
"""Inner loops of the planners (csrc/planners); None where the extension was not loaded."""
simulate: ModuleType | None = None
"""The virtual device (csrc/simulate); None where the extension was not loaded."""


def offer(inner_loops: ModuleType, virtual: ModuleType) -> None:
    """Have the planners and the simulator use these from now on."""
    global planners, simulate
    planners, simulate = inner_loops, virtual

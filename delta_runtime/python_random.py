"""Keeps the random generators of Python and numpy where the program left them.

Ops written in Python may draw from these. When the runtime runs such an op again, or imports a package
that draws while it is imported, the program's own numbers must not change.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any


def save() -> tuple[Any, Any]:
    """Return the states of both generators; None for numpy's where numpy is not imported."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def restore(states: tuple[Any, Any]) -> None:
    """Put both generators back into states that `save` returned."""
    ours, numpy_state = states
    random.setstate(ours)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Whatever runs in the block moves neither generator."""
    states = save()
    try:
        yield
    finally:
        restore(states)

"""A plot of one step: the highest live bytes during each op, and what they would have been with nothing evicted.

Covers the picture, and the numbers behind it. Does not cover where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_MIB = 1 << 20


def _none() -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class LiveBytes:
    """The device's live bytes over a step.

    Args:
        ops: numbers of ops, rising from 0; a step of more than 8,192 has one point for several.
        peak_bytes: highest live bytes during each of these, as it was.
        ordinary_bytes: during each op of the step that was recorded, with nothing evicted; empty where none was.
    """

    ops: npt.NDArray[np.int64] = field(default_factory=_none)
    peak_bytes: npt.NDArray[np.int64] = field(default_factory=_none)
    ordinary_bytes: npt.NDArray[np.int64] = field(default_factory=_none)


def draw(live: LiveBytes, budget_bytes: int, title: str, path: Path | None) -> Any:
    """Draw the plot.

    Args:
        live: what is drawn.
        budget_bytes: a line across; 0 for none.
        title: above it.
        path: where the picture is written, in the format of its ending; None: nowhere.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a plot needs matplotlib: pip install "delta-runtime[plots]"') from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    if len(live.ordinary_bytes):
        axes.plot(live.ordinary_bytes / _MIB, color="0.6", lw=1, label="with nothing evicted")
    axes.plot(live.ops, live.peak_bytes / _MIB, lw=1, label="last step")
    if budget_bytes:
        axes.axhline(budget_bytes / _MIB, color="black", ls=":", lw=1, label="budget")
    axes.set_xlabel("op of the step")
    axes.set_ylabel("live MiB")
    axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=9)
    axes.legend(fontsize=8)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure

"""A plot of step time against budget: a line for each planner, and one for each bound.

Covers the picture. Does not cover where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the plot.

    Args:
        name: in the legend.
        budgets_bytes: where there is a point, rising.
        ratios: step time at each, over that of the ordinary step.
        bound: whether it is a bound rather than a planner.
    """

    name: str
    budgets_bytes: Sequence[int]
    ratios: Sequence[float]
    bound: bool = False


def plot(lines: Sequence[Line], peak_bytes: int, path: Path) -> None:
    """Write the plot.

    Args:
        lines: those without a point are left out.
        peak_bytes: of the ordinary step; drawn as a vertical line.
        path: of the picture; its ending says which kind.

    Raises:
        ImportError: matplotlib is not installed.
        OSError, ValueError: the picture cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('a plot needs matplotlib: pip install "delta-runtime[plots]"') from error
    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line in lines:
        if line.budgets_bytes:
            style = "--" if line.bound else "o-"
            budgets = [each / _GIB for each in line.budgets_bytes]
            axes.plot(budgets, line.ratios, style, markersize=4, label=line.name)
    axes.axvline(peak_bytes / _GIB, color="grey", linewidth=0.8)
    axes.set_xlabel("budget (GiB); grey: peak of the ordinary step")
    axes.set_ylabel("step time over the ordinary step's")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)

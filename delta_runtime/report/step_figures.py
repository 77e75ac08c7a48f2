"""The last step in a few figures, for those who ask after every step: loggers, progress bars."""

from __future__ import annotations

from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.report.step_report import StepTotals


def metrics(last: StepTotals | None, totals: StepTotals, budget_bytes: int) -> dict[str, float]:
    """Return the last step as one flat dictionary, as loggers take it.

    Args:
        last: of the step that was observed last; None where there was none: nothing is returned then.
        totals: of all steps.
        budget_bytes: 0 where none is kept.

    Returns:
        Figures by names that begin with ``delta/`` and end in their unit: ``budget_bytes`` (where one is kept),
        ``peak_bytes``, ``dropped_bytes``, ``swapped_out_bytes``, ``recompute_s``, ``stall_s`` (waited for lanes), and
        ``over_budget_steps``, of all steps.
    """
    if last is None:
        return {}
    figures = {
        "peak_bytes": last.peak_bytes,
        "dropped_bytes": last.dropped_bytes,
        "swapped_out_bytes": last.swapped_out_bytes,
        "recompute_s": last.rebuild_s,
        "stall_s": last.out_stall_s + last.in_stall_s,
        "over_budget_steps": totals.over_budget_steps,
    }
    budget = {"budget_bytes": budget_bytes} if budget_bytes else {}
    return {f"delta/{name}": float(figure) for name, figure in (budget | figures).items()}


def status(last: StepTotals | None, totals: StepTotals, budget_bytes: int) -> str:
    """Return the last step in a few words, for a progress bar; arguments as of `metrics`."""
    if last is None:
        return "no step yet"
    of = f" of {format_bytes(budget_bytes)}" if budget_bytes else ""
    words = [f"peak {format_bytes(last.peak_bytes)}{of}"]
    if last.rebuild_s:
        words.append(f"recompute {format_seconds(last.rebuild_s)}")
    if stall_s := last.out_stall_s + last.in_stall_s:
        words.append(f"waits {format_seconds(stall_s)}")
    if totals.over_budget_steps:
        words.append(f"over the budget in {totals.over_budget_steps:,} steps")
    return ", ".join(words)

"""The verb `simulate`: what a recorded step would come to under each policy, without running it.

What goes and comes is decided by the code that the runtime decides by. Told is the second of two steps, in which lanes
are as the first one left them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_runtime.cli import PROGRAM
from delta_runtime.cli.bound_lines import bound_lines, budgets_to_plot
from delta_runtime.cli.recorded import add_step_options, load_extension, read_asked
from delta_runtime.core.errors import DeltaError, UsageError
from delta_runtime.core.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:  # numpy is imported where it is needed
    from delta_runtime.core.step_graph import StepGraph
    from delta_runtime.core.transfer import Links
    from delta_runtime.simulate.virtual_step import SimulatedStep

_COLUMNS = ("policy", "fits", "peak", "step", "rebuilds", "stalls", "dropped", "swapped")


def add_parser(commands: Any) -> None:
    """Add the verb and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "simulate", help="show what a recorded step comes to under each policy", allow_abbrev=False
    )
    add_step_options(parser)
    parser.add_argument(
        "--policies",
        metavar="A,B",
        default="auto,recompute,swap",
        help="of delta_runtime, such as auto,recompute,swap,delta,dtr,rotor (default: %(default)s)",
    )
    parser.add_argument(
        "--host-budget", metavar="X", help="the most that is swapped to host memory; else no limit"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="what happened under the first of them, for Perfetto"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="step time against budget, as a picture; takes a minute"
    )


def simulate(options: argparse.Namespace) -> str:
    """Print the table.

    Returns:
        What is wrong with the call; "" when the table is printed.
    """
    load_extension()
    try:
        asked = read_asked(options)
        policies = _chosen(options.policies)
        at = _At(asked.graph, asked.links, _host_bytes(options.host_budget))
        steps = {name: at.simulated(name, asked.budget_bytes) for name in policies}
    except DeltaError as error:
        return f"{PROGRAM} simulate: {error}\n"
    _print(asked.graph, asked.budget_bytes, steps)
    if options.trace:
        problem = _write_trace(asked.graph, steps[policies[0]], Path(options.trace))
        if problem:
            return problem
    return _plot(at, policies, Path(options.plot)) if options.plot else ""


def _chosen(names: str) -> list[str]:
    from delta_runtime.simulate.under_policy import simulated_policies

    wanted = [name.strip() for name in names.split(",")]
    known = simulated_policies()
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(
            "These policies cannot be simulated.",
            asked=", ".join(unknown),
            change=f"Choose among {', '.join(known)}.",
        )
    return wanted


def _host_bytes(asked: str | None) -> int:
    from delta_runtime.simulate.virtual_step import WITHOUT_LIMIT

    if asked is None:
        return WITHOUT_LIMIT
    return int(parse_bytes(asked, allow_zero=False, name="--host-budget"))


@dataclass(frozen=True, slots=True)
class _At:
    """What all policies are simulated with."""

    graph: StepGraph
    links: Links | None
    host_bytes: int

    def simulated(self, name: str, budget_bytes: int) -> SimulatedStep | str:
        """Return the step under a policy, or why there is none."""
        from delta_runtime.simulate.under_policy import under_policy

        found = under_policy(name, self.graph, budget_bytes, self.links, host_bytes=self.host_bytes)
        return found.why_not if found.step is None else found.step


def _plot(at: _At, policies: Sequence[str], path: Path) -> str:
    """Simulate budgets from the least to the peak, and draw what comes of it; say what went wrong, if anything did."""
    from delta_runtime.report.plan_plot import Line, plot

    budgets = budgets_to_plot(at.graph)
    lines = []
    for name in policies:
        found = [(budget, at.simulated(name, budget)) for budget in budgets]
        fits = [
            (budget, each)
            for budget, each in found
            if not isinstance(each, str) and each.peak_bytes <= budget
        ]
        ratios = [each.seconds / max(at.graph.seconds, 1e-12) for _, each in fits]
        lines.append(Line(name, [budget for budget, _ in fits], ratios))
    try:
        plot([*lines, *bound_lines(at.graph, budgets, at.links)], at.graph.peak_bytes, path)
    except (ImportError, OSError, ValueError) as error:
        return f"{PROGRAM} simulate: {path}: {error}\n"
    return ""


def _print(graph: StepGraph, budget_bytes: int, steps: Mapping[str, SimulatedStep | str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{format_bytes(budget_bytes)} for a step that peaks at {format_bytes(graph.peak_bytes)}, simulated",
        padding=(0, 0, 0, 1),
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for name, step in steps.items():
        if not isinstance(step, str):
            fits = step.peak_bytes <= budget_bytes
            ratio = f"{step.seconds / graph.seconds:.3f}" if graph.seconds > 0 else ""
            table.add_row(
                name,
                "yes" if fits else "no",
                format_bytes(step.peak_bytes),
                ratio,
                format_seconds(step.rebuild_s),
                format_seconds(step.stall_s),
                format_bytes(step.dropped_bytes),
                format_bytes(step.swapped_out_bytes),
            )
    console = Console()
    console.print(table)
    for name, step in steps.items():
        if isinstance(step, str):
            console.print(f"Left out: {name} ({step}).", highlight=False)
    console.print(
        "An estimate: ops take their recorded seconds, and the runtime's own work none.",
        highlight=False,
    )


def _write_trace(graph: StepGraph, step: SimulatedStep | str, path: Path) -> str:
    from delta_runtime.report.trace import chrome_trace
    from delta_runtime.simulate.virtual_step import trace_of

    if isinstance(step, str):
        return f"{PROGRAM} simulate: there is nothing to trace: {step}\n"
    try:
        path.write_text(json.dumps(chrome_trace(*trace_of(step, graph))), encoding="utf-8")
    except OSError as error:
        return f"{PROGRAM} simulate: {path}: {error}\n"
    return ""

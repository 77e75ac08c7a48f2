"""The verb `plan`: what each planner makes of a recorded step under a budget, as a table.

Needs no torch; where the extension is installed, planning is many times faster.

What the table shows of a plan is what the judge of plans finds, not what the planner says of itself.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_runtime.cli import PROGRAM
from delta_runtime.cli.bound_lines import BOUNDS, bound_lines, budgets_to_plot
from delta_runtime.cli.recorded import add_step_options, load_extension, read_asked
from delta_runtime.core.errors import DeltaError, UsageError
from delta_runtime.core.units import format_bytes, format_seconds

if TYPE_CHECKING:  # numpy is imported where it is needed: the other verbs work without it
    from delta_runtime.core.step_graph import StepGraph
    from delta_runtime.core.transfer import Links
    from delta_runtime.planners.plan_result import PlanResult
    from delta_runtime.planners.registry import Planner
    from delta_runtime.report.plan_plot import Line

_COLUMNS = ("planner", "peak", "fits", "rebuilds", "stalls", "step", "bound", "planning")


def add_parser(commands: Any) -> None:
    """Add the verb and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="show what the planners make of a recorded step", allow_abbrev=False
    )
    add_step_options(parser)
    parser.add_argument(
        "--planners",
        metavar="A,B",
        default="all",
        help="all, or some of: keep, drop_all, recompute, swap, joint, rotor, checkmate, min_peak, min_peak_a, chen",
    )
    parser.add_argument(
        "--seed",
        action="store_true",
        help="have joint search from the plans of the others in the table, too",
    )
    parser.add_argument(
        "--merged", action="store_true", help="show what contraction and chain put together"
    )
    parser.add_argument(
        "--bound-seconds",
        metavar="N",
        type=_seconds,
        default=10.0,
        help="how long to look for a closer bound on plans that drop; 0: not at all (default: 10)",
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="step time against budget, as a picture; takes minutes"
    )


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")


def plan(options: argparse.Namespace) -> str:
    """Print the table.

    Returns:
        What is wrong with the call; "" when the table is printed.
    """
    try:
        asked = read_asked(options)
        chosen = _chosen(options.planners)
    except DeltaError as error:
        return f"{PROGRAM} plan: {error}\n"
    load_extension()
    graph, links = asked.graph, asked.links
    _print(graph, asked.budget_bytes, chosen, links, options.bound_seconds, seeded=options.seed)
    if options.merged:
        _print_merged(graph)
    if options.plot:
        return _plot(graph, chosen, links, Path(options.plot))
    return ""


def _chosen(names: str) -> dict[str, Planner]:
    from delta_runtime.planners.registry import PLANNERS

    wanted = list(PLANNERS) if names == "all" else [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in PLANNERS]
    if unknown:
        raise UsageError(
            "There is no such planner.",
            asked=", ".join(unknown),
            change=f"Choose among {', '.join(PLANNERS)}.",
        )
    return {name: PLANNERS[name] for name in wanted}


def _print(
    graph: StepGraph,
    budget_bytes: int,
    planners: Mapping[str, Planner],
    links: Links | None,
    bound_seconds: float,
    *,
    seeded: bool,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from delta_runtime.planners.bounds import bounds_of

    bounds = bounds_of(graph)
    left_out: list[str] = []
    table = Table(
        title=f"{format_bytes(budget_bytes)} for a step that peaks at {format_bytes(graph.peak_bytes)}",
        padding=(0, 0, 0, 1),
    )
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "planner" else "right", no_wrap=True)
    results: dict[str, PlanResult] = {}
    for name, planner in _in_order(planners, seeded=seeded).items():
        result = _result(name, planner, graph, budget_bytes, links, results if seeded else {})
        if isinstance(result, str):
            left_out.append(f"{name} ({result})")
        else:
            results[name] = result
    for name in (each for each in planners if each in results):
        table.add_row(name, *_cells(results[name], graph, links))
    console = Console()
    console.print(table)
    for text in left_out:
        console.print(f"Left out: {text}.", highlight=False)
    console.print(
        f"No plan of any kind holds less than {format_bytes(bounds.lower_bytes)}, which {bounds.lower_op} needs. "
        f"Recomputing alone is expected to hold {format_bytes(bounds.least_bytes)}. "
        + _bounds_on_seconds(graph, budget_bytes, links, bound_seconds),
        highlight=False,
    )


def _in_order(planners: Mapping[str, Planner], *, seeded: bool) -> dict[str, Planner]:
    """Return the planners with joint last, where it searches from the plans of the others."""
    return dict(sorted(planners.items(), key=lambda item: seeded and item[0] == "joint"))


def _result(
    name: str,
    planner: Planner,
    graph: StepGraph,
    budget_bytes: int,
    links: Links | None,
    seeds: Mapping[str, PlanResult],
) -> PlanResult | str:
    """Return what a planner comes to, or why it was left out."""
    from delta_runtime.planners import joint
    from delta_runtime.planners.linear_program import SolverFailed

    if planner.copies and links is None:
        return "no speed of a lane was recorded; give --link-bytes-per-s"
    try:
        if name == "joint" and seeds:
            plans = [each.plan for each in seeds.values() if each.plan is not None]
            return joint.plan(graph, budget_bytes, links, seeds=plans)
        return planner.plan(graph, budget_bytes, links)
    except ImportError as error:
        return str(error)
    except SolverFailed:
        return "its solver failed"


def _cells(result: PlanResult, graph: StepGraph, links: Links | None) -> list[str]:
    from delta_runtime.planners.validate import validate

    def ratio(more_s: float | None) -> str:
        return "" if more_s is None or graph.seconds <= 0 else f"{1 + more_s / graph.seconds:.3f}"

    solver = format_seconds(result.solver_s)
    if result.plan is None:
        needs = result.least_budget_bytes
        return ["" if needs is None else format_bytes(needs), "no", "", "", "", "", solver]
    verdict = validate(result.plan, graph, links)
    return [
        format_bytes(verdict.peak_bytes),
        f"by {result.fallback}" if result.fallback else "yes",
        format_seconds(verdict.rebuild_s),
        format_seconds(verdict.stall_s),
        ratio(verdict.rebuild_s + verdict.stall_s),
        ratio(result.bound_s),
        solver,
    ]


def _print_merged(graph: StepGraph) -> None:
    """Show what one op of the contracted graph, and of the chain, stands for."""
    from rich.console import Console
    from rich.table import Table

    from delta_runtime.planners.contraction import by_size
    from delta_runtime.planners.step_chain import StepChain

    chain, few = StepChain(graph), by_size(graph)
    told = {
        f"contracted to {few.graph.n_ops} ops, for checkmate": few,
        f"a chain of {chain.length} stages, for rotor, min_peak and chen": chain.contraction,
    }
    for title, contraction in told.items():
        table = Table(title=title)
        for name in ("ops", "longest of them", "phase", "seconds", "saved values", "bytes"):
            table.add_column(name, justify="right" if name != "longest of them" else "left")
        for each in contraction.merged():
            table.add_row(
                f"{each.first}-{each.last}",
                each.name,
                "backward" if each.backward else "forward",
                format_seconds(each.seconds),
                str(each.saved or ""),
                format_bytes(each.saved_bytes) if each.saved else "",
            )
        Console().print(table)


def _plot(
    graph: StepGraph, planners: Mapping[str, Planner], links: Links | None, path: Path
) -> str:
    """Plan for budgets from the least to the peak, and draw what comes of it; say what went wrong, if anything did."""
    from delta_runtime.report.plan_plot import plot

    budgets = budgets_to_plot(graph)
    lines = [_line(name, planner, graph, budgets, links) for name, planner in planners.items()]
    lines += bound_lines(graph, budgets, links)
    try:
        plot(lines, graph.peak_bytes, path)
    except (ImportError, OSError, ValueError) as error:
        return f"{PROGRAM} plan: {path}: {error}\n"
    return ""


def _line(
    name: str,
    planner: Planner,
    graph: StepGraph,
    budgets: Sequence[int],
    links: Links | None,
) -> Line:
    from delta_runtime.report.plan_plot import Line

    found = [(budget, _result(name, planner, graph, budget, links, {})) for budget in budgets]
    fits = [(budget, each) for budget, each in found if not isinstance(each, str) and each.feasible]
    return Line(
        name,
        [budget for budget, _ in fits],
        [1 + each.seconds / max(graph.seconds, 1e-12) for _, each in fits],
    )


def _bounds_on_seconds(
    graph: StepGraph, budget_bytes: int, links: Links | None, bound_seconds: float
) -> str:
    """Say how few seconds any plan can take; see `least_seconds`, and `window_bound` for those that drop."""
    from delta_runtime.planners.least_seconds import least_seconds
    from delta_runtime.planners.linear_program import SolverFailed
    from delta_runtime.planners.window_bound import window_bound

    told = []
    try:
        for ways, lanes, drops in BOUNDS:
            if not lanes or links is not None:
                told_links = links if lanes else None
                if lanes:
                    least_s = least_seconds(graph, budget_bytes, drops=drops, links=told_links)
                else:
                    least_s = window_bound(graph, budget_bytes, time_limit_s=bound_seconds)
                least = (
                    "fits" if least_s is None else f"takes less than {format_seconds(least_s)} more"
                )
                told.append(f"No plan that {ways} {least}.")
    except ImportError:
        return "Install scipy for bounds on seconds."
    except SolverFailed:
        told.append("The solver failed on the next bound on seconds.")
    return " ".join(told)

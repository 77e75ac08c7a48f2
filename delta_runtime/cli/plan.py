"""The verb `plan`: what each planner makes of a recorded step under a budget, as a table. Needs no torch.

What the table shows of a plan is what the judge of plans finds, not what the planner says of itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_runtime.cli import PROGRAM
from delta_runtime.core.errors import DeltaError, UsageError
from delta_runtime.core.units import format_bytes, format_seconds, parse_budget, parse_bytes

if TYPE_CHECKING:  # numpy is imported where it is needed: the other verbs work without it
    from delta_runtime.core.plan import Plan
    from delta_runtime.core.step_graph import StepGraph
    from delta_runtime.core.transfer import Links

_EFFORT = 4.0  # as the runtime gives the final plan of a step


def _keep(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    from delta_runtime.core.plan import Plan

    return Plan.moving_nothing(graph)


def _recompute(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    return _heuristic(graph, budget_bytes, effort=_EFFORT)


def _swap(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    return _heuristic(graph, budget_bytes, drops=False, links=links)


def _joint(graph: StepGraph, budget_bytes: int, links: Links | None) -> Plan:
    return _heuristic(graph, budget_bytes, effort=_EFFORT, links=links)


def _heuristic(graph: StepGraph, budget_bytes: int, **options: Any) -> Plan:
    from delta_runtime.planners import joint_heuristic

    return joint_heuristic.plan(graph, budget_bytes, **options)


@dataclass(frozen=True, slots=True)
class _Planner:
    """A planner as the table knows it; `copies` says that it does nothing without a lane."""

    plan: Callable[[StepGraph, int, Links | None], Plan]
    text: str
    copies: bool = False


PLANNERS: Mapping[str, _Planner] = {
    "keep": _Planner(_keep, "nothing leaves"),
    "recompute": _Planner(_recompute, "drops alone"),
    "swap": _Planner(_swap, "copies alone", copies=True),
    "joint": _Planner(_joint, "drops and copies", copies=True),
}


def add_parser(commands: Any) -> None:
    """Add the verb and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="show what the planners make of a recorded step", allow_abbrev=False
    )
    parser.add_argument("graph", help="a file that `record` wrote")
    parser.add_argument(
        "--budget", metavar="X", required=True, help="10GiB, or a share of the step's peak: 50%%"
    )
    names = ", ".join(f"{name} ({each.text})" for name, each in PLANNERS.items())
    parser.add_argument(
        "--planners", metavar="A,B", default="all", help=f"all, or some of: {names}"
    )
    parser.add_argument(
        "--link-bytes-per-s",
        metavar="X",
        help="speed of the lanes, each way: 12GB; as recorded if not given",
    )


def plan(options: argparse.Namespace) -> str:
    """Print the table.

    Returns:
        What is wrong with the call; "" when the table is printed.
    """
    try:
        graph = _read(Path(options.graph))
        budget_bytes = _budget_bytes(options.budget, graph)
        chosen = _chosen(options.planners)
        links = _links(options.link_bytes_per_s, graph)
    except DeltaError as error:
        return f"{PROGRAM} plan: {error}\n"
    _print(graph, budget_bytes, chosen, links)
    return ""


def _read(path: Path) -> StepGraph:
    from delta_runtime.core.step_graph import StepGraph

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read.", found=str(error)) from error
    return StepGraph.from_json(text)


def _budget_bytes(spec: str, graph: StepGraph) -> int:
    """Read bytes, of which there may be more than the step takes, or a share of its peak."""
    budget_bytes = parse_budget(spec) or parse_budget(spec, graph.peak_bytes)
    if budget_bytes is None:
        raise UsageError(
            "--budget auto needs a device.", change="Give bytes, or a share of the peak."
        )
    return budget_bytes


def _chosen(names: str) -> dict[str, _Planner]:
    wanted = list(PLANNERS) if names == "all" else [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in PLANNERS]
    if unknown:
        raise UsageError(
            "There is no such planner.",
            asked=", ".join(unknown),
            change=f"Choose among {', '.join(PLANNERS)}.",
        )
    return {name: PLANNERS[name] for name in wanted}


def _links(asked: str | None, graph: StepGraph) -> Links | None:
    from delta_runtime.core.transfer import Links

    if asked is not None:
        speed = float(parse_bytes(asked, allow_zero=False, name="--link-bytes-per-s"))
        return Links(speed, speed)
    on = graph.recorded_on
    if on is None or not (on.out_bytes_per_s > 0 and on.in_bytes_per_s > 0):
        return None
    return Links(on.out_bytes_per_s, on.in_bytes_per_s)


def _print(
    graph: StepGraph, budget_bytes: int, planners: Mapping[str, _Planner], links: Links | None
) -> None:
    from rich.console import Console
    from rich.table import Table

    from delta_runtime.planners.bounds import bounds_of
    from delta_runtime.planners.validate import validate

    bounds = bounds_of(graph)
    left_out: list[str] = []
    table = Table(
        title=f"{format_bytes(budget_bytes)} for a step that peaks at {format_bytes(graph.peak_bytes)}"
    )
    for name in ("planner", "peak", "fits", "recomputing", "stalls", "step", "planning"):
        table.add_column(name, justify="left" if name == "planner" else "right")
    for name, planner in planners.items():
        if planner.copies and links is None:
            left_out.append(name)
            continue
        begin = time.perf_counter()
        found = planner.plan(graph, budget_bytes, links)
        planning_s = time.perf_counter() - begin
        verdict = validate(found, graph, links)
        more_s = verdict.rebuild_s + verdict.stall_s
        table.add_row(
            name,
            format_bytes(verdict.peak_bytes),
            "yes" if verdict.peak_bytes <= budget_bytes else "no",
            format_seconds(verdict.rebuild_s),
            format_seconds(verdict.stall_s),
            f"{1 + more_s / graph.seconds:.3f} x" if graph.seconds > 0 else "",
            format_seconds(planning_s),
        )
    console = Console()
    console.print(table)
    if left_out:
        console.print(
            f"Left out: {', '.join(left_out)}. No speed of a lane was recorded; give --link-bytes-per-s.",
            highlight=False,
        )
    console.print(
        f"No plan of any kind holds less than {format_bytes(bounds.lower_bytes)}, which {bounds.lower_op} needs. "
        f"Recomputing alone is expected to hold {format_bytes(bounds.least_bytes)}. "
        + _bounds_on_seconds(graph, budget_bytes, links),
        highlight=False,
    )


def _bounds_on_seconds(graph: StepGraph, budget_bytes: int, links: Links | None) -> str:
    """Say how few seconds any plan can take; see `least_seconds`."""
    from delta_runtime.planners.least_seconds import least_seconds
    from delta_runtime.planners.linear_program import SolverFailed

    told = []
    try:
        for ways, lanes in (("drops", None), ("drops and copies", links)):
            if ways == "drops" or lanes is not None:
                least_s = least_seconds(graph, budget_bytes, links=lanes)
                least = (
                    "fits" if least_s is None else f"takes less than {format_seconds(least_s)} more"
                )
                told.append(f"No plan that {ways} {least}.")
    except ImportError:
        return "Install scipy for bounds on seconds."
    except SolverFailed:
        told.append("The solver failed on the next bound on seconds.")
    return " ".join(told)

"""The verb `simulate`: what a recorded step would come to under each policy, without running it.

What goes and comes is decided by the code that the runtime decides by. Told is the second of two steps, in which lanes
are as the first one left them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from delta_runtime.cli import PROGRAM
from delta_runtime.cli.recorded import (
    add_step_options,
    budget_of,
    links_of,
    load_extension,
    read_graph,
)
from delta_runtime.core.errors import DeltaError, UsageError
from delta_runtime.core.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:  # numpy is imported where it is needed
    from delta_runtime.core.step_graph import StepGraph
    from delta_runtime.core.transfer import Links
    from delta_runtime.simulate.virtual_step import SimulatedStep

_PLANNER_OF: Mapping[str, str] = MappingProxyType({"recompute": "recompute", "swap": "swap"})
"""Of policies that follow joint's plans, but not with all that it does."""
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


def simulate(options: argparse.Namespace) -> str:
    """Print the table.

    Returns:
        What is wrong with the call; "" when the table is printed.
    """
    load_extension()
    try:
        graph = read_graph(Path(options.graph))
        budget_bytes = budget_of(options.budget, graph)
        policies = _chosen(options.policies)
        links = links_of(options.link_bytes_per_s, graph)
        host_bytes = _host_bytes(options.host_budget)
        if links is not None:
            links = replace(links, store_bytes=host_bytes)  # so that plans know of it
        steps = {
            name: _simulated(name, graph, budget_bytes, links, host_bytes) for name in policies
        }
    except DeltaError as error:
        return f"{PROGRAM} simulate: {error}\n"
    _print(graph, budget_bytes, steps)
    if options.trace:
        return _write_trace(graph, steps[policies[0]], Path(options.trace))
    return ""


def _chosen(names: str) -> list[str]:
    wanted = [name.strip() for name in names.split(",")]
    known = simulated()
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(
            "These policies cannot be simulated.",
            asked=", ".join(unknown),
            change=f"Choose among {', '.join(known)}.",
        )
    return wanted


def simulated() -> list[str]:
    """Return the names of the policies that can be simulated: all that evict, and only when there is need."""
    from delta_runtime.online.policies import POLICIES, Stress

    return [name for name, each in POLICIES.items() if each.filter and each.stress is Stress.NONE]


def _host_bytes(asked: str | None) -> int:
    from delta_runtime.simulate.virtual_step import WITHOUT_LIMIT

    if asked is None:
        return WITHOUT_LIMIT
    return int(parse_bytes(asked, allow_zero=False, name="--host-budget"))


def _simulated(
    name: str, graph: StepGraph, budget_bytes: int, links: Links | None, host_bytes: int
) -> SimulatedStep | str:
    """Return what the second of two steps comes to, or why there is none."""
    from delta_runtime.core.events import Place
    from delta_runtime.online.policies import get_policy
    from delta_runtime.planners.linear_program import SolverFailed
    from delta_runtime.planners.registry import PLANNERS
    from delta_runtime.simulate.virtual_step import VirtualStep

    policy = get_policy(name)
    plan = None
    if links is None and policy.evicts_to == (Place.SWAPPED,):
        return "no speed of a lane was recorded; give --link-bytes-per-s"
    if policy.plans:
        planner = PLANNERS[_PLANNER_OF.get(name, policy.planner)]
        try:
            found = planner.plan(
                graph, budget_bytes, links if Place.SWAPPED in policy.evicts_to else None
            )
        except ImportError as error:
            return str(error)
        except SolverFailed:
            return "its solver failed"
        plan, least = found.plan, found.least_budget_bytes
        if plan is None:
            return "no plan" + (
                "" if least is None else f"; the least budget is {format_bytes(least)}"
            )
    step = VirtualStep(graph, plan, budget_bytes, policy=policy, links=links, host_bytes=host_bytes)
    step.run()
    return step.run()


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

"""How long do the planners take, how close does rounding come, and how close the joint heuristic?

A benchmark on generated instances and recorded steps, the same each time. Takes about eleven minutes on two idle
cores with `--seconds 1`, six of them for the gap; needs no GPU.

    python -m benchmarks.planners [--seconds 60] [--only joint]
    python -m benchmarks.planners --only beside    # how long is training kept waiting?
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rich.console import Console
from rich.table import Table

from delta_runtime.core import compiled
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.transfer import Links
from delta_runtime.extension import _C
from delta_runtime.planners import checkmate, joint_heuristic, min_peak, moccasin, rotor
from delta_runtime.planners.contraction import by_size
from delta_runtime.planners.least_seconds import least_seconds
from delta_runtime.planners.presence_search import search
from delta_runtime.planners.step_program import StepProgram
from delta_runtime.planners.validate import validate
from delta_runtime.planners.window_bound import window_bound
from delta_runtime.plans_beside import PLANNING_THREAD, PlansBeside
from tests.support.large_graphs import SHAPES, large_graph
from tests.support.recorded_steps import WORKLOADS, recorded

SEED = 7
SEARCHED = 3_000_000  # units of work for a contracted step
_PYTHON_S, _OP_S = 2e-4, 5e-4  # of a thread that trains
_LONG_S = 5e-3
_BOUND_S = 120.0  # at the most, for the bound of a whole step


def random_chain(stages: int, rand: random.Random) -> dict[str, Any]:
    """Return columns of `rotor.solve`, with room for a third of all that may be saved."""
    a = [rand.randint(1, 50) for _ in range(stages + 1)]
    abar = [size * rand.randint(1, 4) for size in a]
    return {
        "f": [rand.random() for _ in range(stages)],
        "b": [2 * rand.random() for _ in range(stages + 1)],
        "a": a,
        "abar": abar,
        "f_tmp": [rand.randint(0, 10) for _ in range(stages)],
        "b_tmp": [rand.randint(0, 10) for _ in range(stages + 1)],
        "memory": sum(abar) // 3,
    }


def random_dag(
    layers: int, rand: random.Random, *, residual: bool
) -> tuple[list[list[int]], list[int], list[int]]:
    """Return forward ops, a loss and backward ops: 2 * layers + 1 nodes; with `residual`, blocks of three add up."""
    deps: list[list[int]] = [[node - 1] if node else [] for node in range(layers + 1)]
    if residual:
        for node in range(3, layers, 3):
            deps[node].append(node - 3)
    backward = {layers: layers}  # the node that makes the gradient of each forward node's output
    for node in range(layers - 1, -1, -1):
        users = [each for each in range(layers + 1) if node in deps[each]]
        reads = sorted({*(backward[each] for each in users), *deps[node], node})
        backward[node] = len(deps)
        deps.append(reads)
    ram = [rand.randint(1, 9) for _ in range(layers)]
    cpu = [rand.randint(1, 9) for _ in range(layers)]
    return deps, [*cpu, 1, *(2 * each for each in reversed(cpu))], [*ram, 1, *reversed(ram)]


def seconds_of(work: Callable[[], Any]) -> tuple[float, Any]:
    """Run something, and return how long it took and what it returned."""
    begin = time.perf_counter()
    found = work()
    return time.perf_counter() - begin, found


def measure_chains(console: Console) -> None:
    """Time the planners of chains."""
    table = Table("planner", "instance", "seconds", title="chains")
    for stages in (100, 200, 300):
        columns = random_chain(stages, random.Random(SEED))
        seconds, found = seconds_of(lambda columns=columns: rotor.solve(**columns))
        assert found is None or found.peak <= columns["memory"]
        table.add_row("rotor", f"{stages} stages, 500 slots", f"{seconds:.2f}")
    for layers, objective in ((200, "A"), (10_000, "B")):
        rand = random.Random(SEED)
        sizes = [rand.random() for _ in range(layers + 1)]
        seconds, _ = seconds_of(
            lambda sizes=sizes, objective=objective: min_peak.solve(sizes, objective=objective)
        )
        table.add_row("min_peak", f"{layers} layers, objective {objective}", f"{seconds:.2f}")
    console.print(table)
    gigabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    console.print(f"most memory of this process: {gigabytes:.2f} GB\n")


def measure_dags(console: Console, limit_s: float) -> None:
    """Time Checkmate, and compare its rounding with the optimum or the best there is."""
    table = Table(
        *(
            "graph",
            "nodes",
            "budget",
            "cost",
            "bound",
            "seconds",
            "rounded / cost",
            "raw",
            "seconds",
            "intervals / cost",
            "proved",
            "seconds",
        ),
        title="Checkmate, its rounding, and Moccasin's intervals",
    )
    for name, layers, share in (
        *(("chain", 16, share) for share in (0.7, 0.5, 0.35)),
        *(("residual", 16, share) for share in (0.7, 0.5, 0.35)),
        *(("chain", 22, share) for share in (0.7, 0.5, 0.35)),
        *(("residual", 22, share) for share in (0.7, 0.5, 0.35)),
    ):
        columns = random_dag(layers, random.Random(SEED), residual=name == "residual")
        dag = checkmate.Dag.of(*columns)
        _, most = checkmate.replay(dag, keep_all(dag))
        budget = share * most
        seconds, found = seconds_of(
            lambda columns=columns, budget=budget: checkmate.solve(
                *columns, budget, time_limit_s=limit_s, gap=1e-3
            )
        )
        rounding, raw = seconds_of(
            lambda columns=columns, budget=budget: checkmate.round_lp(
                *columns, budget, fallback=False
            )
        )
        rounded = raw or checkmate.round_lp(*columns, budget)
        ours = best_by_intervals(columns, budget, limit_s)
        if found is None:
            table.add_row(name, str(dag.n), f"{share:.0%}", "infeasible", "", f"{seconds:.1f}")
            continue
        table.add_row(
            *(name, str(dag.n), f"{share:.0%}", f"{found.objective:g}", f"{found.bound or 0:.1f}"),
            *(
                f"{seconds:.1f}",
                f"{rounded.objective / found.objective:.3f}" if rounded else "none",
            ),
            *("fits" if raw else "none", f"{rounding:.1f}"),
            *ours(found.objective),
        )
    console.print(table)


def best_by_intervals(
    columns: tuple[list[list[int]], list[int], list[int]], budget: float, limit_s: float
) -> Callable[[float], tuple[str, str, str]]:
    """Return what tells the cells of Moccasin's answer, given the cost to compare with."""
    if importlib.util.find_spec("ortools") is None:
        return lambda cost: ("no OR-tools", "", "")
    seconds, found = seconds_of(
        lambda: moccasin.solve(*columns, budget, time_limit_s=limit_s, gap=1e-3)
    )
    if found is None:
        return lambda cost: ("infeasible", "", f"{seconds:.1f}")
    proved = found.bound is not None and found.objective <= found.bound * (1 + 1.1e-3)
    return lambda cost: (
        f"{found.objective / cost:.3f}",
        "yes" if proved else "no",
        f"{seconds:.1f}",
    )


def keep_all(dag: checkmate.Dag) -> list[checkmate.Action]:
    """Return the schedule that runs each node once, and frees what nobody reads any more."""
    last = [max([node, *users]) for node, users in enumerate(dag.users())]
    actions: list[checkmate.Action] = []
    for node in range(dag.n):
        actions.append(checkmate.Action(checkmate.Kind.RUN, node))
        actions += (
            checkmate.Action(checkmate.Kind.FREE, each)
            for each in range(node + 1)
            if last[each] == node
        )
    return actions


def joint_graphs() -> Iterator[tuple[str, StepGraph]]:
    """Yield recorded steps of real models, and made-up ones of 1,000 and 10,000 saved values."""
    yield from ((name, recorded(name)) for name in WORKLOADS)
    yield from ((shape, large_graph(shape, n)) for n in (1000, 10_000) for shape in SHAPES)


def measure_joint(console: Console) -> None:
    """Time the joint heuristic on one core, as the runtime calls it for a final plan."""
    table = Table(
        *("graph", "saved values", "may stay", "lanes", "plan: s", "without C++: s", "rebuilt: ms"),
        title="joint heuristic",
    )
    for name, graph in joint_graphs():
        quarter = Links(*[0.25 * graph.activation_bytes / graph.seconds] * 2)
        for share in (0.7, 0.5, 0.35):
            for links in (None, quarter):
                budget_bytes = int(graph.peak_bytes - (1 - share) * graph.activation_bytes)

                def plan(
                    graph: StepGraph = graph,
                    budget_bytes: int = budget_bytes,
                    links: Links | None = links,
                ) -> Any:
                    return joint_heuristic.plan(graph, budget_bytes, effort=4.0, links=links)

                seconds, found = seconds_of(plan)
                # The search over presence takes its twin minutes; with lanes there is none.
                timed = links is not None and len(graph.saved) < 2000
                over = " (above the budget)" * (found.predicted_peak_bytes > budget_bytes)
                table.add_row(
                    *(
                        name,
                        str(len(graph.saved)),
                        f"{share:.0%}",
                        "a quarter" if links else "none",
                    ),
                    *(f"{seconds:.2f}", twin_seconds(plan) if timed else ""),
                    f"{1e3 * found.predicted_seconds:.2f}{over}",
                )
    console.print(table)
    console.print("lanes: what they carry in a step, of what is saved")


def measure_gap(console: Console, limit_s: float) -> None:
    """Compare plans with one gap for each value, with any number of them, and the best there are."""
    table = Table(
        *(
            "step",
            "budget",
            "one gap: ms",
            "searched: ms",
            "s",
            "exact: ms",
            "bound: ms",
            "searched / exact",
        ),
        title="contracted to 45 ops; budgets from what a plan with little on the device needs to the peak",
    )
    for name in WORKLOADS:
        graph = by_size(recorded(name), 45).graph
        small = StepProgram(graph, None).small_plans()
        low_bytes = min(validate(each, graph).peak_bytes for each in small)
        for eighths in range(8):
            budget_bytes = int(low_bytes + (graph.peak_bytes - low_bytes) * eighths / 8)
            exact = StepProgram(graph, budget_bytes).fastest(limit_s, 1e-3)
            one_gap = joint_heuristic.plan(graph, budget_bytes, effort=4.0, one_gap=True)
            seconds, found = seconds_of(
                lambda graph=graph, budget_bytes=budget_bytes, one_gap=one_gap: search(
                    graph, budget_bytes, one_gap, most_work=SEARCHED
                )
            )
            best = exact.plan.predicted_seconds if exact.plan else None
            table.add_row(
                *(name, f"{eighths}/8", judged_ms(one_gap, graph, budget_bytes)),
                *(judged_ms(found, graph, budget_bytes), f"{seconds:.2f}"),
                f"{1e3 * best:.1f}" if best else "none in time",
                f"{1e3 * exact.bound_s:.1f}" if exact.bound_s else "",
                f"{found.predicted_seconds / best:.3f}" if best else "",
            )
    console.print(table)
    table = Table(
        *("step", "may stay", "one gap: ms", "joint heuristic: ms", "as written", "s"),
        *("linear bound: ms", "bound: ms", "joint / bound"),
        title="whole",
    )
    for name in WORKLOADS:
        graph = recorded(name)
        for share in (0.7, 0.5, 0.35):
            budget_bytes = int(graph.peak_bytes - (1 - share) * graph.activation_bytes)
            one_gap = joint_heuristic.plan(graph, budget_bytes, effort=4.0, one_gap=True)
            seconds, found = seconds_of(
                lambda graph=graph, budget_bytes=budget_bytes: joint_heuristic.plan(
                    graph, budget_bytes, effort=4.0
                )
            )
            linear_s = least_seconds(graph, budget_bytes)
            bound_s = window_bound(graph, budget_bytes, time_limit_s=_BOUND_S)
            assert linear_s and bound_s
            table.add_row(
                *(name, f"{share:.0%}", judged_ms(one_gap, graph, budget_bytes)),
                *(judged_ms(found, graph, budget_bytes), "yes" if found.as_written else "no"),
                *(f"{seconds:.2f}", f"{1e3 * linear_s:.1f}", f"{1e3 * bound_s:.1f}"),
                f"{found.predicted_seconds / bound_s:.3f}",
            )
    console.print(table)


def judged_ms(plan: Plan, graph: StepGraph, budget_bytes: int) -> str:
    """Return what the judge says that a plan takes, and whether it is above the budget."""
    verdict = validate(plan, graph)
    return f"{1e3 * verdict.rebuild_s:.1f}{' (above)' * (verdict.peak_bytes > budget_bytes)}"


def twin_seconds(plan: Callable[[], Any]) -> str:
    """Time a planner that does without the extension."""
    compiled.planners = None
    seconds, _ = seconds_of(plan)
    compiled.planners = _C.planners
    return f"{seconds:.2f}"


def processor_s(clock: int | None) -> float:
    """Return how long the thread of a clock has run on a processor; 0 where there is none."""
    try:
        return 0.0 if clock is None else time.clock_gettime(clock)
    except OSError:  # it has ended
        return 0.0


def waits_s(goes_on: Callable[[], bool], beside: int | None) -> list[tuple[float, float]]:
    """Return how long this thread waited behind each of its ops, and for how much of that another one was running.

    It does what training does: a little Python, then an op that runs without Python's lock; here a nap. It waits for
    the lock, but also for a processor, which others have too. What the other thread holds the lock for by its own work
    is no longer than it runs meanwhile; where it loses its processor with the lock in hand, that is not counted.

    Args:
        beside: the clock of that thread's processor time.
    """
    waits = []
    going = True
    while going:
        going = goes_on()
        ends_s = time.perf_counter() + _PYTHON_S
        while time.perf_counter() < ends_s:
            pass
        ran_s = processor_s(beside)
        begin_s = time.perf_counter()
        time.sleep(_OP_S)
        wait_s = max(time.perf_counter() - begin_s - _OP_S, 0.0)
        waits.append((wait_s, min(wait_s, max(processor_s(beside) - ran_s, 0.0))))
    return waits


def measure_beside(console: Console) -> None:
    """Measure how long a thread waits for Python's lock while another one plans, and how long where none does."""
    table = Table(
        *("graph", "saved values", "for: s", "ops", "over 5 ms", "median: ms", "99.9 %: ms"),
        *("longest: ms", "planner ran in a wait, over 5 ms", "at the most: ms"),
        title="a thread that trains beside planning: waits behind its ops",
    )

    def row(
        name: str, values: str, goes_on: Callable[[], bool], beside: int | None = None
    ) -> float:
        begin_s = time.perf_counter()
        timed = waits_s(goes_on, beside)
        seconds = time.perf_counter() - begin_s
        waits = sorted((wait for wait, _ in timed), reverse=True)
        part = [waits[int(share * (len(waits) - 1))] for share in (0.5, 0.001, 0)]
        long = sum(each > _LONG_S for each in waits)
        figures = (f"{seconds:.1f}", str(len(waits)), str(long))
        held = [ran for _, ran in timed]
        table.add_row(
            *(name, values, *figures, *(f"{1e3 * each:.2f}" for each in part)),
            *(str(sum(each > _LONG_S for each in held)), f"{1e3 * max(held):.2f}"),
        )
        return seconds

    for shape in SHAPES:
        for n_saved in (1_000, 10_000):
            graph = large_graph(shape, n_saved)
            quarter = Links(*[0.25 * graph.activation_bytes / graph.seconds] * 2)
            budget_bytes = int(graph.peak_bytes - 0.5 * graph.activation_bytes)
            gc.collect()
            plans = PlansBeside()
            plan = partial(joint_heuristic.plan, effort=4.0, links=quarter)
            plans.begin(partial(plan, graph, budget_bytes))
            thread = next(t for t in threading.enumerate() if t.name == PLANNING_THREAD)
            assert thread.ident is not None
            beside = time.pthread_getcpuclockid(thread.ident)
            values = str(len(graph.saved))
            seconds = row(shape, values, lambda plans=plans: plans.take() is None, beside)
            ends_s = time.perf_counter() + seconds
            row("none", "", lambda ends_s=ends_s: time.perf_counter() < ends_s)
    console.print(table)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60.0, help="that one instance may take")
    parser.add_argument(
        "--only", choices=["chains", "dags", "joint", "gap", "beside"], help="one part"
    )
    arguments = parser.parse_args()
    console = Console(width=120)
    if arguments.only in (None, "chains"):
        measure_chains(console)
    if arguments.only in (None, "dags"):
        measure_dags(console, arguments.seconds)
    if arguments.only in (None, "joint"):
        measure_joint(console)
    if arguments.only == "beside":
        measure_beside(console)
    if arguments.only in (None, "gap"):
        measure_gap(console, arguments.seconds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

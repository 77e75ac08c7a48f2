"""The experiments of the source papers, small: each planner at what its paper shows, beside ours.

A benchmark. Three parts:

1. `largest`: Checkmate's. The largest batch of a ResNet-50 that a planner fits into the memory of an ordinary step with
   a batch of 8, and what a step takes then. Planned for recorded steps, and the largest of each run under its policy.
2. `rotor`: Rotor's. Step time against memory for three ResNets and two image sizes, at budgets that lie evenly between
   the least that joint has a plan for and the ordinary peak: by the judge of plans, and measured at one of them.
3. `peaks`: least-peak checkpoints'. What objectives A and B expect, and what the allocator saw, for six chains.

Takes about 20 minutes on two idle cores; needs no GPU; writes a plot for each part where `--plots` says.

    python -m benchmarks.papers [--only largest,rotor,peaks] [--plots FOLDER] [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import delta_runtime as delta
from benchmarks.common import MIB, console, keep_memory, machine, words, write_json
from delta_runtime import cpu_pool
from delta_runtime.known_step import CALIBRATION_STEPS
from delta_runtime.planners import checkmate, min_peak
from delta_runtime.planners.plan_result import PlanResult
from delta_runtime.planners.registry import PLANNERS
from delta_runtime.planners.step_chain import StepChain
from scripts.train_plain import THREADS

OURS = "recompute"
BATCH = 32
BASE_BATCH, LARGEST_PIXELS = 8, 96
BATCHES = (8, 12, 16, 20, 24, 28, 32)
DEPTHS = {"ResNet-18": [2, 2, 2, 2], "ResNet-34": [3, 4, 6, 3], "ResNet-50": [3, 4, 6, 3]}
PIXELS = (64, 128)
PARTS = 8
MEASURED_PART = 3
_ROUNDS = 3
_WIDTH = 140
_SOLVER_S = 15.0


def resnet(name: str) -> nn.Module:
    """Return a ResNet of transformers, in training mode."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    wide = name == "ResNet-50"
    config = ResNetConfig(
        depths=DEPTHS[name],
        hidden_sizes=[256, 512, 1024, 2048] if wide else [64, 128, 256, 512],
        layer_type="bottleneck" if wide else "basic",
        num_labels=10,
    )
    model: nn.Module = ResNetForImageClassification(config).train()
    return model


def step_of(model: nn.Module, batch: int, pixels: int) -> Callable[[], None]:
    """Return a function that runs forward and backward on the same images."""
    torch.manual_seed(1)
    images, labels = torch.randn(batch, 3, pixels, pixels), torch.randint(0, 10, (batch,))

    def step() -> None:
        model(pixel_values=images, labels=labels).loss.backward()

    return step


def record(model: nn.Module, step: Callable[[], None]) -> delta.StepGraph:
    """Return the record of a step, with the least seconds of a few."""
    runtime = delta.Runtime(policy="off", device="cpu")
    for _ in range(CALIBRATION_STEPS):
        model.zero_grad(set_to_none=True)
        with runtime.step():
            step()
    model.zero_grad(set_to_none=True)
    graph = runtime.graph()
    runtime.close()
    return graph


def planned(name: str, graph: delta.StepGraph, budget_bytes: int) -> PlanResult | None:
    """Return what a planner comes to; None where it has no plan of its own."""
    if name == "checkmate":
        result = checkmate.plan(
            graph, budget_bytes, time_limit_s=_SOLVER_S, gap=1e-2, fallback=False
        )
    else:
        result = PLANNERS[name].plan(graph, budget_bytes)
    return result if result.feasible else None


def seconds_of(model: nn.Module, step: Callable[[], None], runtime: delta.Runtime | None) -> float:
    """Return the seconds of one step."""
    model.zero_grad(set_to_none=True)
    begin = time.perf_counter()
    if runtime is None:
        step()
    else:
        with runtime.step():
            step()
    return time.perf_counter() - begin


@dataclass(frozen=True, slots=True)
class Followed:
    """What steps under a policy came to.

    Args:
        ratio: median of step times over those of ordinary steps in turns; 0 where none were run.
        peak_bytes: the allocator's.
        own: whether the planner's own plan was followed.
    """

    ratio: float
    peak_bytes: int
    own: bool


def follow(
    model: nn.Module,
    step: Callable[[], None],
    policy: str,
    budget_bytes: int,
    *,
    ordinary: bool = True,
) -> Followed:
    """Train under a policy, with ordinary steps in turns where they are wanted."""
    runtime = delta.Runtime(budget=budget_bytes, policy=policy, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(CALIBRATION_STEPS + 1):
            seconds_of(model, step, runtime)
            runtime.wait_for_plan()
        ratios, peak = [], 0
        for _ in range(_ROUNDS):
            seconds_of(model, step, runtime)  # each timed step comes after another like it
            managed_s = seconds_of(model, step, runtime)
            peak = max(peak, runtime.report().last.peak_bytes)
            if ordinary:
                seconds_of(model, step, None)
                ratios.append(managed_s / seconds_of(model, step, None))
    own = runtime.steps.plans.refusal is None
    runtime.close()
    model.zero_grad(set_to_none=True)
    return Followed(statistics.median(ratios or [0.0]), peak, own)


# ------------------------------------------------------------------------------------------ largest


def largest(quick: bool) -> list[dict[str, Any]]:
    """Find the largest batch of each planner at the capacity of an ordinary step."""
    model = resnet("ResNet-50")
    capacity = record(model, step_of(model, BASE_BATCH, LARGEST_PIXELS)).peak_bytes
    found: dict[str, dict[str, Any]] = {}
    for batch in BATCHES[:2] if quick else BATCHES:
        graph = record(model, step_of(model, batch, LARGEST_PIXELS))
        for name in ("rotor", "checkmate", "min_peak", OURS):
            result = planned(name, graph, capacity)
            if result is not None:
                ratio = 1 + result.seconds / graph.seconds
                found[name] = {"planner": name, "batch": batch, "predicted_ratio": ratio}
        gc.collect()
    for name, row in found.items():
        step = step_of(model, row["batch"], LARGEST_PIXELS)
        # A record differs a little from run to run; the ordinary step is not held to the capacity.
        done = follow(model, step, name, int(capacity * 1.005))
        row |= {"ratio": done.ratio, "peak_bytes": done.peak_bytes, "own": done.own}
    table = Table("planner", "largest batch", "times 8", "predicted", "measured", "peak / capacity")
    for name, row in found.items():
        table.add_row(
            name,
            str(row["batch"]),
            f"{row['batch'] / BASE_BATCH:.1f}",
            f"{row['predicted_ratio']:.3f}",
            f"{row['ratio']:.3f}" + ("" if row["own"] else " (joint's)"),
            f"{row['peak_bytes'] / capacity:.3f}",
        )
    console.print(table)
    return [{"capacity_bytes": capacity, **row} for row in found.values()]


# -------------------------------------------------------------------------------------------- rotor


def rotor_curves(quick: bool) -> list[dict[str, Any]]:
    """Plan three networks and two image sizes at several budgets, and measure one of them."""
    rows = []
    parts = range(0, PARTS, 3) if quick else range(PARTS)
    table = Table(
        "network", "pixels", "planner", *(f"{each}/{PARTS}" for each in parts), "measured"
    )
    for name in list(DEPTHS)[: 1 if quick else None]:
        for pixels in PIXELS[: 1 if quick else None]:
            model = resnet(name)
            step = step_of(model, BATCH, pixels)
            graph = record(model, step)
            low = PLANNERS[OURS].plan(graph, 1).least_budget_bytes or 0
            budgets = [low + (graph.peak_bytes - low) * part // PARTS for part in range(PARTS)]
            for planner in ("rotor", "checkmate", OURS):
                ratios = {}
                for part in parts:
                    result = planned(planner, graph, budgets[part])
                    if result is not None:
                        ratios[part] = 1 + result.seconds / graph.seconds
                measured = None
                if MEASURED_PART in ratios:
                    measured = follow(model, step, planner, budgets[MEASURED_PART]).ratio
                cells = [f"{ratios[part]:.3f}" if part in ratios else "-" for part in parts]
                table.add_row(
                    name,
                    str(pixels),
                    planner,
                    *cells,
                    "-" if measured is None else f"{measured:.3f}",
                )
                rows.append(
                    {
                        "network": name,
                        "pixels": pixels,
                        "planner": planner,
                        "peak_bytes": graph.peak_bytes,
                        "budget_bytes": [budgets[part] for part in ratios],
                        "ratios": list(ratios.values()),
                        "measured": measured,
                    }
                )
            gc.collect()
    Console(width=_WIDTH).print(table)
    return rows


# -------------------------------------------------------------------------------------------- peaks


def peaks(quick: bool) -> list[dict[str, Any]]:
    """Compare what objectives A and B expect with what the allocator saw."""
    rows = []
    table = Table("network", "pixels", "objective", "expected MiB", "judge MiB", "measured MiB")
    for name in list(DEPTHS)[: 1 if quick else None]:
        for pixels in PIXELS[: 1 if quick else None]:
            model = resnet(name)
            step = step_of(model, BATCH, pixels)
            graph = record(model, step)
            columns = StepChain(graph).segment_peaks()
            for objective, policy in (("A", "min_peak_a"), ("B", "min_peak")):
                expected = min_peak.expected_peak(columns, objective)
                judged = PLANNERS[policy].plan(graph, graph.peak_bytes - 1)
                done = follow(model, step, policy, int(1.02 * judged.peak_bytes), ordinary=False)
                table.add_row(
                    name,
                    str(pixels),
                    objective,
                    *(
                        f"{each / MIB:.1f}"
                        for each in (expected, judged.peak_bytes, done.peak_bytes)
                    ),
                )
                rows.append(
                    {
                        "network": name,
                        "pixels": pixels,
                        "objective": objective,
                        "expected_bytes": expected,
                        "judge_bytes": judged.peak_bytes,
                        "measured_bytes": done.peak_bytes,
                        "own": done.own,
                    }
                )
            gc.collect()
    console.print(table)
    for objective in ("A", "B"):
        of = [row for row in rows if row["objective"] == objective]
        errors = [abs(row["expected_bytes"] / row["measured_bytes"] - 1) for row in of]
        console.print(
            f"objective {objective}: off by {100 * statistics.median(errors):.1f} % (median)"
        )
    return rows


# -------------------------------------------------------------------------------------------- plots


def draw(results: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """Write a plot for each part."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)

    def axes(plots: int, title: str) -> tuple[Figure, Any]:
        rows, columns = math.ceil(plots / 3), min(plots, 3)
        figure = Figure(figsize=(4.2 * columns, 3.4 * rows + 0.4))
        FigureCanvasAgg(figure)
        figure.suptitle(title)
        return figure, figure.subplots(rows, columns, squeeze=False).ravel()[:plots]

    if rows := results.get("largest"):
        figure, (plot,) = axes(1, "Largest batch at the memory of 8")
        plot.bar([row["planner"] for row in rows], [row["batch"] for row in rows])
        figure.tight_layout()
        figure.savefig(folder / "largest_batch.png", dpi=110)
    if rows := results.get("rotor"):
        networks = list(dict.fromkeys((row["network"], row["pixels"]) for row in rows))
        figure, plots = axes(len(networks), "Step time against memory")
        for plot, key in zip(plots, networks, strict=True):
            for row in (each for each in rows if (each["network"], each["pixels"]) == key):
                budgets = [each / MIB for each in row["budget_bytes"]]
                plot.plot(budgets, row["ratios"], "o-", label=row["planner"])
            plot.set_title(f"{key[0]}, {key[1]} pixels", fontsize=9)
            plot.set_xlabel("budget, MiB")
        plots[0].set_ylabel("step / ordinary step")
        plots[0].legend()
        figure.tight_layout()
        figure.savefig(folder / "time_against_memory.png", dpi=110)
    if rows := results.get("peaks"):
        figure, (plot,) = axes(1, "Expected and measured peak, MiB")
        most = max(row["measured_bytes"] for row in rows) / MIB
        plot.plot([0, most], [0, most], color="grey", linewidth=0.8)
        for objective in ("A", "B"):
            of = [row for row in rows if row["objective"] == objective]
            plot.plot(
                [row["measured_bytes"] / MIB for row in of],
                [row["expected_bytes"] / MIB for row in of],
                "o",
                label=f"objective {objective}",
            )
        plot.set_xlabel("measured")
        plot.set_ylabel("expected")
        plot.legend()
        figure.tight_layout()
        figure.savefig(folder / "least_peaks.png", dpi=110)


def main() -> int:
    """Run the experiments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="largest,rotor,peaks")
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    cpu_pool.install()
    keep_memory()
    parts = {"largest": largest, "rotor": rotor_curves, "peaks": peaks}
    results = {name: parts[name](options.quick) for name in words(options.only)}
    write_json(options.json, {"machine": machine(), **results})
    if options.plots:
        draw(results, options.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())

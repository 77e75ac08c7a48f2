"""Does an ordinary model train inside half of the memory it needs, with the same numbers bit for bit?

A demonstration, not a benchmark. Takes less than 10 minutes on two idle cores; needs no GPU and no download.

For M1 (ResNet-50 on digits) and M2 (a byte-level GPT) of scripts/workloads.py:
  1. train a few ordinary steps and measure their peak with the CPU pool;
  2. give the pool a capacity of half of that, and watch the same run die of torch.OutOfMemoryError;
  3. train inside it with delta.Runtime, and compare every loss, weight, buffer and moment of AdamW bit for bit;
  4. time ordinary and managed steps in turns, and save a plot of live memory over one step of each;
  5. run scripts/train_plain.py, which knows nothing of all this, without and with DELTA_BUDGET.
Exits 1 if anything of this does not hold.

    python scripts/demo.py [--model resnet50 gpt] [--steps 6] [--out out]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.core.units import format_bytes, format_seconds
from scripts.train_plain import THREADS
from scripts.workloads import M1, M2, TrainState, Workload

SEED = 0
CALIBRATION_STEPS = 3
SAMPLE_INTERVAL_S = 0.001

console = Console(highlight=False, soft_wrap=True)


# --------------------------------------------------------------------------------------------- measuring


@dataclass(slots=True)
class Curve:
    """Live bytes of the CPU pool over one step, sampled from another thread."""

    seconds: list[float] = field(default_factory=list)
    live_bytes: list[int] = field(default_factory=list)


@contextlib.contextmanager
def sampled() -> Iterator[Curve]:
    """Sample live bytes about once a millisecond for the duration of a block."""
    curve = Curve()
    stop = threading.Event()
    begin = time.perf_counter()

    def sample() -> None:
        curve.seconds.append(time.perf_counter() - begin)
        curve.live_bytes.append(cpu_pool.allocated_bytes())

    def watch() -> None:
        while not stop.wait(SAMPLE_INTERVAL_S):
            sample()

    sample()
    thread = threading.Thread(target=watch, name="sampler", daemon=True)
    thread.start()
    try:
        yield curve
    finally:
        stop.set()
        thread.join()
        sample()


Bits = dict[str, npt.NDArray[np.uint8]]
"""The bytes of named tensors, copied out of the pool so that they count in no measurement."""


def _tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    """Parameters, buffers and the optimizer's state, by name."""
    named = dict(state.model.state_dict())
    for i, slots in state.optimizer.state_dict()["state"].items():
        named |= {f"{slot} of parameter {i}": value for slot, value in slots.items()}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def bits_of(state: TrainState) -> Bits:
    """Copy all that training changes."""
    return {name: _bytes_of(tensor).numpy().copy() for name, tensor in _tensors_of(state).items()}


def first_difference(state: TrainState, expected: Bits) -> str:
    """Return the name of the first tensor of `state` that differs in a bit, "" if none does."""
    tensors = _tensors_of(state)
    if tensors.keys() != expected.keys():
        return "the names of the tensors"
    for name, tensor in tensors.items():
        if not torch.equal(_bytes_of(tensor), torch.from_numpy(expected[name])):
            return name
    return ""


@dataclass(slots=True)
class Run:
    """What a run of several steps left behind.

    Args:
        losses: of each step, as exact hexadecimal text.
        seconds: of each step, optimizer included; the last one is slowed a little by the sampling.
        peak_bytes: the pool's highest live bytes of all steps.
        curve: live bytes over the last step.
    """

    losses: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    curve: Curve = field(default_factory=Curve)


def train_step(state: TrainState, index: int, runtime: delta.Runtime | None = None) -> torch.Tensor:
    """Run one whole step; all that a runtime changes in a training loop is the `with`."""
    batch = state.batch(index)
    state.optimizer.zero_grad(set_to_none=True)
    with runtime.step() if runtime else contextlib.nullcontext():
        loss = state.loss(batch)
        loss.backward()
    state.optimizer.step()
    return loss.detach()


def train(state: TrainState, steps: int, runtime: delta.Runtime | None = None) -> Run:
    """Trains for a few steps, a line of progress each."""
    run = Run()
    for index in range(steps):
        last = index == steps - 1
        cpu_pool.reset_peak()
        begin = time.perf_counter()
        with sampled() if last else contextlib.nullcontext() as curve:
            loss = train_step(state, index, runtime).item()
        run.seconds.append(time.perf_counter() - begin)
        run.losses.append(loss.hex())
        run.peak_bytes = max(run.peak_bytes, cpu_pool.peak_bytes())
        run.curve = curve or run.curve
        note = "  (calibrating)" if runtime is not None and index < CALIBRATION_STEPS else ""
        console.print(
            f"  step {index + 1}/{steps}  loss {loss:.6f} = {loss.hex()}  "
            f"peak {format_bytes(cpu_pool.peak_bytes())}  {run.seconds[-1]:.2f} s{note}"
        )
    return run


def die_at(workload: Workload, capacity_bytes: int) -> str:
    """Trains one ordinary step under a capacity; returns the OutOfMemoryError's text, "" if it survived."""
    told = ""
    with cpu_pool.capacity(capacity_bytes):
        try:
            train_step(workload.build(SEED), 0)
        except torch.OutOfMemoryError as error:
            told = str(error).splitlines()[0]
    gc.collect()  # the traceback's frames held the model
    return told


@dataclass(slots=True)
class Pairs:
    """Seconds of ordinary and managed steps that were run in turns."""

    ordinary_s: list[float] = field(default_factory=list)
    managed_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median managed step over the median ordinary one."""
        return statistics.median(self.managed_s) / statistics.median(self.ordinary_s)


def time_in_turns(
    state: TrainState, runtime: delta.Runtime, capacity_bytes: int, first: int, n_pairs: int
) -> Pairs:
    """Time ordinary steps without a capacity and managed ones inside it, in turns.

    Of each kind a step that is not timed goes before: going from one to the other moves memory from and to the system,
    which no training run does at each step.
    """
    pairs = Pairs()
    for index in range(first, first + 4 * n_pairs, 4):
        train_step(state, index)
        begin = time.perf_counter()
        train_step(state, index + 1)
        pairs.ordinary_s.append(time.perf_counter() - begin)
        with cpu_pool.capacity(capacity_bytes):
            train_step(state, index + 2, runtime)
            begin = time.perf_counter()
            train_step(state, index + 3, runtime)
            pairs.managed_s.append(time.perf_counter() - begin)
        console.print(
            f"  ordinary {pairs.ordinary_s[-1]:.2f} s, inside half {pairs.managed_s[-1]:.2f} s"
        )
    return pairs


# ------------------------------------------------------------------------- the script that knows nothing


@dataclass(frozen=True, slots=True)
class PlainRun:
    """What scripts/train_plain.py printed, and the most memory its process held, by the kernel's count.

    `resident_bytes` is 0 where the kernel does not tell.
    """

    losses: tuple[str, ...]
    told: str
    resident_bytes: int
    status: int


def environment_works() -> bool:
    """Whether `import torch` finds delta_runtime: whether the package is installed."""
    points = importlib.metadata.entry_points(group="torch.backends")
    return any(point.name == "delta_runtime" for point in points)


def _high_water_bytes(process: int) -> int:
    """Return the most memory that a living process ever held. Its rusage would count the process that forked it too."""
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) * 1024 if found else 0


def run_plain(model: str, steps: int, budget_bytes: int | None = None) -> PlainRun:
    """Run the plain script in a process of its own, with DELTA_BUDGET in its environment or without."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("DELTA_")}
    if budget_bytes is not None:
        environ["DELTA_BUDGET"] = str(budget_bytes)
        if torch.accelerator.is_available():
            environ["DELTA_DEVICE"] = "cpu"  # this script trains on the CPU wherever it runs
    arguments = ["scripts/train_plain.py", "--model", model, "--steps", str(steps)]
    arguments += ["--seed", str(SEED)]
    given = " ".join(f"{name}={environ[name]} " for name in environ if name.startswith("DELTA_"))
    console.print(f"[bold]$ {given}python {' '.join(arguments)}", markup=True)
    losses = []
    resident_bytes = 0
    with tempfile.TemporaryFile("w+") as told:
        with subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                resident_bytes = _high_water_bytes(child.pid) or resident_bytes
                console.print(f"  {line.rstrip()}", markup=False)
                losses.append(line.split()[-1])
        told.seek(0)
        return PlainRun(tuple(losses), told.read(), resident_bytes, child.returncode)


# ------------------------------------------------------------------------------------------ what is shown


@dataclass(slots=True)
class Result:
    """The figures of one workload; `checks` says of each promise whether it was kept."""

    workload: Workload
    ordinary_bytes: int = 0
    budget_bytes: int = 0
    inside_bytes: int = 0
    activation_bytes: int = 0
    time_ratio: float = float("nan")
    checks: dict[str, bool] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        return bool(self.checks) and all(self.checks.values())

    @property
    def activations_kept(self) -> float:
        """Share of the activations that fits beside what cannot be evicted."""
        rest_bytes = self.ordinary_bytes - self.activation_bytes
        return (self.budget_bytes - rest_bytes) / max(1, self.activation_bytes)

    def check(self, promise: str, kept: bool, why_not: str = "") -> bool:
        """Note and print whether a promise was kept."""
        self.checks[promise] = kept
        mark = "[green]yes[/]" if kept else "[bold red]NO[/]"
        console.print(f"  {promise}: {mark}{'' if kept or not why_not else f'  ({why_not})'}")
        return kept


def save_plot(
    path: Path, title: str, ordinary: Run, inside: Run, budget_bytes: int
) -> None:  # pragma: no cover - drawn, not computed
    """Draws live memory over the last step of both runs, and the budget."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mib = 1024**2
    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for run, colour, name in ((ordinary, "tab:orange", "ordinary"), (inside, "tab:blue", "inside")):
        live = np.array(run.curve.live_bytes) / mib
        label = f"{name}: peak {format_bytes(run.peak_bytes)}"
        axes.plot(run.curve.seconds, live, color=colour, linewidth=1.2, label=label)
        axes.fill_between(run.curve.seconds, live, color=colour, alpha=0.12)
    budget_label = f"budget and capacity: {format_bytes(budget_bytes)}"
    axes.axhline(budget_bytes / mib, color="tab:red", linestyle="--", label=budget_label)
    axes.set(xlabel="seconds since the step began", ylabel="live memory, MiB", title=title)
    axes.set_ylim(0, 1.08 * ordinary.peak_bytes / mib)
    axes.margins(x=0)
    axes.legend(loc="upper right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def show_results(results: list[Result]) -> None:
    """Print the final table: a row per figure, a column per model."""
    table = Table(title="Training inside half of the memory", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.workload.name, justify="right")
    rows = {
        "ordinary peak": lambda r: format_bytes(r.ordinary_bytes),
        "  of it activations": lambda r: (
            f"{format_bytes(r.activation_bytes)} ({r.activation_bytes / max(1, r.ordinary_bytes):.1%})"
        ),
        "budget = capacity": lambda r: format_bytes(r.budget_bytes),
        "peak inside": lambda r: format_bytes(r.inside_bytes),
        "percent of the ordinary peak": lambda r: (
            f"{r.inside_bytes / max(1, r.ordinary_bytes):.1%}"
        ),
        "percent of activations kept": lambda r: f"{r.activations_kept:.1%}",
        "step time over ordinary": lambda r: f"{r.time_ratio:.3f}",
    }
    for name, text in rows.items():
        table.add_row(name, *(text(result) for result in results))
    table.add_section()
    for promise in dict.fromkeys(promise for result in results for promise in result.checks):
        marks = {True: "[green]yes[/]", False: "[bold red]NO[/]", None: "not reached"}
        table.add_row(promise, *(marks[result.checks.get(promise)] for result in results))
    console.print(table, soft_wrap=False)


# ------------------------------------------------------------------------------------------- the whole


def demonstrate(result: Result, steps: int, out: Path) -> None:
    """Show all of it for one workload that lives in this process; fill `result`."""
    workload = result.workload
    cpu_pool.install()
    workload.build(SEED).batch(0)  # data are read once and stay: not in the first measurement
    gc.collect()

    console.rule(f"[bold]{workload.title}", align="left")
    console.print(f"[bold]1. An ordinary run of {steps} steps[/]")
    state = workload.build(SEED)
    ordinary = train(state, steps)
    expected = bits_of(state)
    del state
    gc.collect()
    result.ordinary_bytes = ordinary.peak_bytes
    result.budget_bytes = ordinary.peak_bytes // 2

    half = format_bytes(result.budget_bytes)
    console.print(f"[bold]2. The same run where there is half of it: {half}[/]")
    told = die_at(workload, result.budget_bytes)
    console.print(f"  torch.OutOfMemoryError: {told}" if told else "  it survived", markup=False)
    result.check("the ordinary run dies at half", bool(told))
    freed = format_bytes(cpu_pool.allocated_bytes())
    console.print(f"  all of it is freed again: {freed} live")

    console.print(f"[bold]3. Inside {half} with delta.Runtime; steps 1 to 3 are calibration[/]")
    with cpu_pool.capacity(result.budget_bytes):
        state = workload.build(SEED)
        runtime = delta.Runtime(budget=result.budget_bytes, device="cpu")
        inside = train(state, steps, runtime)
    result.inside_bytes = inside.peak_bytes
    result.activation_bytes = runtime.report().activation_bytes
    different = [str(i + 1) for i in range(steps) if inside.losses[i] != ordinary.losses[i]]
    result.check("losses equal, bit for bit", not different, f"steps {', '.join(different)}")
    other = first_difference(state, expected)
    result.check("weights and AdamW's state equal", not other, other)
    result.check("peak within the capacity", inside.peak_bytes <= result.budget_bytes)
    console.print(str(runtime.report()), markup=False)

    console.print("[bold]4. Ordinary steps (capacity lifted) and steps inside half, in turns[/]")
    pairs = time_in_turns(state, runtime, result.budget_bytes, steps, max(2, steps - 2))
    runtime.close()
    result.time_ratio = pairs.ratio
    console.print(
        f"  medians {format_seconds(statistics.median(pairs.ordinary_s))} and "
        f"{format_seconds(statistics.median(pairs.managed_s))}: ratio {pairs.ratio:.3f}"
    )
    if steps <= CALIBRATION_STEPS:
        console.print("  (too few steps before: some of these were calibration)")
    path = out / f"demo_{workload.name}.png"
    save_plot(path, workload.title, ordinary, inside, result.budget_bytes)
    console.print(f"  plot of live memory over one step: {path}")


def demonstrate_environment(result: Result, steps: int) -> None:
    """Run the plain script without and with DELTA_BUDGET, and compare; fill `result`."""
    console.print("[bold]5. A training script that knows nothing of delta_runtime[/]")
    promise = "unmodified script, DELTA_BUDGET: same"
    if not environment_works():
        why = "the package is not installed: pip install --no-build-isolation -e ."
        result.check(promise, False, why)
        return
    alone = run_plain(result.workload.name, steps)
    under = run_plain(result.workload.name, steps, result.budget_bytes)
    console.print(f"{under.told.rstrip()}", markup=False)
    console.print(
        f"  most memory resident in the whole process, Python and libraries included: "
        f"{format_bytes(alone.resident_bytes)} without, {format_bytes(under.resident_bytes)} with"
    )
    reasons = {
        f"exit status {alone.status} and {under.status}": alone.status == under.status == 0,
        "losses differ": len(alone.losses) == steps and alone.losses == under.losses,
        "no report: the runtime was off": "delta_runtime: policy" in under.told,
        "the budget was passed": "budget was passed" not in under.told,
    }
    result.check(
        promise, all(reasons.values()), ", ".join(r for r, ok in reasons.items() if not ok)
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", nargs="+", choices=[M1.name, M2.name], default=[M1.name, M2.name]
    )
    parser.add_argument("--steps", type=int, default=6, help="steps of each run (default: 6)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plots")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error("--steps: at least one")
    torch.set_num_threads(THREADS)
    begin = time.perf_counter()
    results = []
    for workload in (M1, M2):
        if workload.name not in arguments.model:
            continue
        result = Result(workload)
        results.append(result)
        try:
            demonstrate(result, arguments.steps, arguments.out)
            gc.collect()
            demonstrate_environment(result, arguments.steps)
        except (torch.OutOfMemoryError, delta.DeltaError) as error:
            result.check("runs to the end", False, f"{type(error).__name__}: {error}")
            gc.collect()
    show_results(results)
    holds = all(result.holds for result in results)
    taken = format_seconds(time.perf_counter() - begin)
    console.print(f"{'All of it holds' if holds else 'NOT all of it holds'}; {taken}.")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

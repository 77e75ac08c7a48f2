"""Are the two budgets that a report names true: does the least one hold, and does no budget below the lower bound?

A stress run that times one thing. For each model, on the CPU: an ordinary run; a run at 70 % of its peak, whose report
names the lower bound and the least budget; a strict run at the least budget and 2 % of it (256 KiB, if that is more),
which has to hold; a run half way between the two, which has to take at most 1.5 times an ordinary step from its third
step on, and may warn once; and strict runs at and below the lower bound and between the two: one that holds below the
lower bound shows that it is none. Losses, gradients, weights and random state are compared bit for bit in all of them.
Takes about 9 minutes on one idle core; needs no GPU. Exits 1 if a line fails.

    python scripts/check_least_budgets.py [--models mlp,resnet] [--policy auto] [--steps 5] [--rounds 8] [--limit 1.5]
        [--json FILE]

All budgets are above what lived before the model was built. A step is all of it: forward and backward inside of
`runtime.step()`, the optimizer, and what the runtime thinks about after it. Half way, turns of four steps with the
runtime and four without follow one another on one training state. The first of a turn is not timed, since going from
one kind to the other moves memory from and to the system, and neither are the runtime's first two. The ratio is that of
the medians; "mean" is that of all the runtime's steps from the third on, the making of plans included, and is only
shown, and so is "seen", what a step takes that is observed and of which nothing is evicted: no budget costs less. Where
an ordinary step takes less than 3 ms, a millisecond is granted on top of the limit. Where the two bounds are less than
16 KiB apart there is no half way: the allocator counts what the system gives, and two runs differ by some of that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import os
import pickle
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

import delta_runtime as delta
from benchmarks.common import console, machine, write_json
from delta_runtime import cpu_pool
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.online.policies import POLICIES
from tests.support.bitwise import buffers, freeze, gradients, parameters, random_state
from tests.zoo import ZOO, ZooEntry, ZooModel
from tests.zoo.registry import classes, generator, images

SEED = 0
TURN = 4
"""Steps of one kind in a row; the first is not timed."""
FREE_STEPS = 2
"""Of the runtime, that may take what they take."""
LEARN_SHARE = 0.7
LEAST_SHARE, LEAST_BYTES = 0.02, 256 * 1024
"""What is granted above the least budget: the larger of the two."""
SMALL_S, GRANTED_S = 3e-3, 1e-3
LEAST_GAP_BYTES = 16 * 1024
BETWEEN = (0.25, 0.5, 0.75)
"""Budgets between the two bounds that are tried."""
BELOW = (1.0, 0.995, 0.97, 0.9)
"""Budgets at and below the lower bound that are tried."""


# ------------------------------------------------------------------------------------------ tiny models


def _classifier(model: nn.Module, make: Callable[[int], torch.Tensor], count: int) -> ZooModel:
    return ZooModel(
        model,
        lambda i: {"x": make(i), "y": classes(i, count)},
        lambda b: F.cross_entropy(model(b["x"]), b["y"]),
    )


def _mlp(depth: int, width: int, count: int) -> ZooModel:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return _classifier(model, lambda i: torch.randn(count, width, generator=generator(i)), count)


def _cnn() -> ZooModel:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    return _classifier(model, lambda i: images(i, 8, 24), 8)


class _TwoLayers(nn.Module):
    """An LSTM of two layers whose last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.rnn(x)
        out: torch.Tensor = self.head(states[:, -1])
        return out


def _lstm() -> ZooModel:
    return _classifier(_TwoLayers(), lambda i: torch.randn(8, 20, 16, generator=generator(i)), 8)


TINY = {
    "mlp": ZooEntry("mlp", lambda: _mlp(3, 64, 64)),
    "deep_mlp": ZooEntry("deep_mlp", lambda: _mlp(24, 64, 256)),
    "cnn": ZooEntry("cnn", _cnn),
    "lstm_2": ZooEntry("lstm_2", _lstm),
}
"""Models of milliseconds, of which little can be evicted."""
MODELS = TINY | ZOO


# ------------------------------------------------------------------------------------------------- runs


@dataclass(slots=True)
class Run:
    """What came of training for some steps; bytes are above what lived before the model was built.

    Args:
        digests: of loss, gradients, weights and random state, after each step that ended.
        peak_bytes: of forward and backward, the highest.
        seconds, ordinaries: of each step with the runtime, and of each timed one without.
        lower_bytes, lower_op, least_bytes, limit_bytes: as the report names them; 0 where it does not.
        warned: the runtime's warnings.
        failure: what it raised, "" if nothing.
    """

    digests: list[str] = field(default_factory=list)
    peak_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    ordinaries: list[float] = field(default_factory=list)
    lower_bytes: int = 0
    lower_op: str = ""
    least_bytes: int = 0
    limit_bytes: int = 0
    warned: list[str] = field(default_factory=list)
    failure: str = ""


class Training:
    """A model on its way, with its optimizer.

    Args:
        entry: the model.
    """

    def __init__(self, entry: ZooEntry) -> None:
        gc.collect()
        self.base_bytes = cpu_pool.allocated_bytes()
        self.built = entry.build(SEED)
        self.optimizer = torch.optim.AdamW(self.built.model.parameters(), lr=1e-3)
        self.index = 0
        torch.manual_seed(SEED + 1)

    def step(self, run: Run, runtime: delta.Runtime | None) -> float:
        """One whole step, taken down in `run`.

        Returns:
            Its seconds.
        """
        batch = self.built.batch(self.index)
        self.index += 1
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        cpu_pool.reset_peak()
        with runtime.step() if runtime else contextlib.nullcontext():
            loss = self.built.loss(batch)
            loss.backward()
        # With what is older than the pool, since that is charged to the budget.
        peak_bytes = runtime.report().last.peak_bytes if runtime else cpu_pool.peak_bytes()
        self.optimizer.step()
        seconds = time.perf_counter() - begin
        run.peak_bytes = max(run.peak_bytes, peak_bytes - self.base_bytes)
        run.digests.append(self._digest(loss))
        return seconds

    def _digest(self, loss: torch.Tensor) -> str:
        found = hashlib.sha256()
        model = self.built.model
        all_bits = {"loss": freeze(loss)} | gradients(model) | parameters(model) | buffers(model)
        for label, frozen in (all_bits | random_state()).items():
            found.update(f"{label} {frozen and (frozen.dtype, frozen.sizes)}".encode())
            found.update(frozen.content if frozen else b"")
        return found.hexdigest()


@contextlib.contextmanager
def _kept_warnings(run: Run) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    run.warned += [str(w.message) for w in caught if str(w.message).startswith("delta_runtime:")]


def alone(train: Callable[[], Run]) -> Run:
    """Trains in a fork of this process: every run finds the same memory, whatever others have left behind.

    Raises:
        RuntimeError: the fork ended without saying what came of it.
    """
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with several threads
        child = os.fork()
    if child == 0:
        try:
            os.close(receiver)
            with open(sender, "wb") as file:
                pickle.dump(train(), file)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as file:
        told = file.read()
    os.waitpid(child, 0)
    if not told:
        raise RuntimeError("a run ended without saying what came of it")
    run: Run = pickle.loads(told)
    return run


def ordinary_run(entry: ZooEntry, steps: int) -> Run:
    """Trains without a runtime."""
    run, training = Run(), Training(entry)
    with _kept_warnings(run):
        run.ordinaries = [training.step(run, None) for _ in range(steps)]
    return run


def managed_run(
    entry: ZooEntry,
    budget_bytes: int,
    policy: str,
    *,
    steps: int,
    rounds: int = 0,
    strict: bool = False,
) -> Run:
    """Trains inside of a budget.

    Args:
        budget_bytes: above what lives before the model is built.
        steps: of a run without ordinary steps in between.
        rounds: turns of both kinds instead, with ordinary steps first.
        strict: whether the runtime raises where it cannot keep to the budget.
    """
    run, training = Run(), Training(entry)
    base_bytes = training.base_bytes
    runtime = delta.Runtime(base_bytes + budget_bytes, policy=policy, device="cpu", strict=strict)
    try:
        with _kept_warnings(run):
            for _ in range(rounds):
                run.ordinaries += [training.step(Run(), None) for _ in range(TURN)][1:]
                run.seconds += [training.step(run, runtime) for _ in range(TURN)]
            for _ in range(0 if rounds else steps):
                run.seconds.append(training.step(run, runtime))
    except delta.BudgetInfeasible as error:
        run.failure = f"step {len(run.seconds) + 1}: {str(error).splitlines()[0]}"
        run.lower_bytes = error.lower_bound_bytes - base_bytes
    except (torch.OutOfMemoryError, delta.DeltaError) as error:
        run.failure = f"step {len(run.seconds) + 1}: {type(error).__name__}: {error}"
    finally:
        runtime.close()
    report = runtime.report()
    if not run.failure:
        run.lower_bytes = report.bounds.lower_bytes - base_bytes
        run.lower_op = report.bounds.lower_op
        run.least_bytes = report.bounds.least_bytes - base_bytes
        run.limit_bytes = report.limit_bytes and report.limit_bytes - base_bytes
    return run


# ---------------------------------------------------------------------------------------------- judging


@dataclass(slots=True)
class Line:
    """All that was found out about one model; bytes are above what lived before it was built.

    Args:
        ordinary_bytes, ordinary_s: peak of forward and backward, and median seconds, without the runtime.
        lower_bytes, lower_op, least_bytes: as the run at 70 % names them.
        strict_bytes, strict_failure: the least budget and what is granted; why it did not hold.
        half_bytes, limit_bytes: half way between the two, and the peak that was kept to instead.
        half_peak_bytes: of the run there.
        ratio, mean_ratio, worst_ratio: of its steps to ordinary ones beside them; 0 where there is no room
            between the two bounds.
        limit: of `ratio`.
        seen_ratio: of steps of which nothing is evicted.
        warned: times that the run half way did.
        held_bytes: budgets that held in strict mode, and peaks of all runs that ended.
        failed_bytes: budgets that did not.
        named_bytes: the highest lower bound that any run named.
        wrong: runs whose bits differ.
    """

    model: str
    ordinary_bytes: int
    ordinary_s: float
    lower_bytes: int
    lower_op: str
    least_bytes: int
    strict_bytes: int = 0
    strict_failure: str = ""
    half_bytes: int = 0
    limit_bytes: int = 0
    half_peak_bytes: int = 0
    half_failure: str = ""
    half_ordinary_s: float = 0.0
    ratio: float = 0.0
    mean_ratio: float = 0.0
    worst_ratio: float = 0.0
    limit: float = 0.0
    seen_ratio: float = 0.0
    warned: int = 0
    held_bytes: list[int] = field(default_factory=list)
    failed_bytes: list[int] = field(default_factory=list)
    named_bytes: int = 0
    wrong: list[str] = field(default_factory=list)

    def take_in(self, what: str, run: Run, ordinary: Run, *, same_steps: bool = True) -> None:
        """Compare a run's bits, and note what it says about bounds if it took the same steps as the others."""
        if run.digests != ordinary.digests[: len(run.digests)]:
            self.wrong.append(what)
        if same_steps and not run.failure:
            self.held_bytes.append(run.peak_bytes)
        if same_steps:
            self.named_bytes = max(self.named_bytes, run.lower_bytes)

    def faults(self) -> list[str]:
        """Return what is wrong with it, in words."""
        found = [f"other bits: {what}" for what in self.wrong]
        if self.strict_failure:
            found.append(
                f"{format_bytes(self.strict_bytes)} did not hold, though the least budget is "
                f"{format_bytes(self.least_bytes)}: {self.strict_failure}"
            )
        if self.half_failure:
            found.append(f"half way: {self.half_failure}")
        if self.ratio > self.limit:
            found.append(
                f"half way a step takes {self.ratio:.2f} times as long, not {self.limit:.2f}; one that is only "
                f"observed {self.seen_ratio:.2f} times"
            )
        passed = self.half_peak_bytes > self.half_bytes > 0
        if self.warned > 1 or (passed and not self.warned):
            found.append(f"half way it warned {self.warned} times")
        if self.named_bytes > min(self.held_bytes, default=self.named_bytes):
            found.append(
                f"a lower bound of {format_bytes(self.named_bytes)} is above a budget that held, "
                f"{format_bytes(min(self.held_bytes))}"
            )
        return found


def check(name: str, arguments: argparse.Namespace) -> Line:
    """All runs of one model."""
    entry, policy, steps = MODELS[name], arguments.policy, arguments.steps
    ordinary_run(entry, 1)  # what is imported or made once, and stays
    ordinary = alone(lambda: ordinary_run(entry, steps))
    learn_bytes = int(LEARN_SHARE * ordinary.peak_bytes)
    learnt = alone(lambda: managed_run(entry, learn_bytes, policy, steps=steps))
    line = Line(
        name,
        ordinary.peak_bytes,
        statistics.median(ordinary.ordinaries[1:]),
        learnt.lower_bytes,
        learnt.lower_op,
        learnt.least_bytes,
    )
    line.take_in("at 70 %", learnt, ordinary)

    granted_bytes = max(int(LEAST_SHARE * line.least_bytes), LEAST_BYTES)
    line.strict_bytes = line.least_bytes + granted_bytes
    strict = alone(lambda: managed_run(entry, line.strict_bytes, policy, steps=steps, strict=True))
    line.take_in("at the least budget", strict, ordinary)
    line.strict_failure = strict.failure

    gap_bytes = line.least_bytes - line.lower_bytes
    tried = [line.lower_bytes + int(share * gap_bytes) for share in BETWEEN]
    if gap_bytes >= LEAST_GAP_BYTES:
        line.half_bytes = line.lower_bytes + gap_bytes // 2
        half_way(line, entry, arguments)
    else:
        tried = [line.least_bytes]
    tried += [int(share * line.lower_bytes) for share in BELOW]
    for budget_bytes in sorted({*tried, line.lower_bytes - 1}):
        run = alone(
            lambda each=budget_bytes: managed_run(entry, each, policy, steps=steps, strict=True)
        )
        line.take_in(f"strict at {format_bytes(budget_bytes)}", run, ordinary)
        (line.failed_bytes if run.failure else line.held_bytes).append(budget_bytes)
    return line


def half_way(line: Line, entry: ZooEntry, arguments: argparse.Namespace) -> None:
    """Return the run between the two bounds, and the times of its steps."""
    rounds = arguments.rounds
    policy = arguments.policy
    run = alone(lambda: managed_run(entry, line.half_bytes, policy, steps=0, rounds=rounds))
    line.limit_bytes, line.half_peak_bytes = run.limit_bytes, run.peak_bytes
    line.half_failure, line.warned = run.failure, len(run.warned)
    if run.failure:
        return
    # Ordinary steps lie in between: the bits are those of one run.
    whole = alone(lambda: ordinary_run(entry, 2 * TURN * rounds))
    theirs = [digest for i, digest in enumerate(whole.digests) if i % (2 * TURN) >= TURN]
    line.take_in("half way", run, Run(digests=theirs), same_steps=False)
    late = [(i, seconds) for i, seconds in enumerate(run.seconds) if i >= FREE_STEPS]
    timed = [seconds for i, seconds in late if i % TURN]
    line.half_ordinary_s = ordinary_s = statistics.median(run.ordinaries)
    line.ratio = statistics.median(timed) / ordinary_s
    line.worst_ratio = max(timed) / ordinary_s
    line.mean_ratio = statistics.mean(seconds for _, seconds in late) / ordinary_s
    granted_s = GRANTED_S if ordinary_s < SMALL_S else 0.0
    line.limit = arguments.limit + granted_s / ordinary_s
    ample_bytes = 2 * max(line.ordinary_bytes, line.least_bytes)
    seen = alone(lambda: managed_run(entry, ample_bytes, policy, steps=0, rounds=2))
    last_turn = statistics.median(seen.seconds[TURN + 1 :])
    line.seen_ratio = last_turn / statistics.median(seen.ordinaries)


def show(lines: Sequence[Line], policy: str) -> None:
    """Print the table."""
    table = Table(
        title=f"Bounds under policy {policy}, and what they are worth", title_justify="left"
    )
    for heading in ("model", "step", "peak", "lower", "least", "% of peak", "strict", "least held"):
        table.add_column(heading, justify="left" if heading in ("model", "strict") else "right")
    for heading in ("half way", "kept to", "ratio", "limit", "mean", "worst", "seen", "warned", ""):
        table.add_column(heading, justify="right")
    for line in lines:
        held = min(line.held_bytes, default=0)
        half = (
            (
                format_bytes(line.half_bytes),
                format_bytes(line.limit_bytes) if line.limit_bytes else "",
            )
            + (f"{line.ratio:.2f}", f"{line.limit:.2f}", f"{line.mean_ratio:.2f}")
            + (f"{line.worst_ratio:.2f}", f"{line.seen_ratio:.2f}", str(line.warned))
            if line.half_bytes
            else ("no gap", *[""] * 7)
        )
        table.add_row(
            line.model,
            format_seconds(line.ordinary_s),
            format_bytes(line.ordinary_bytes),
            format_bytes(line.lower_bytes),
            format_bytes(line.least_bytes),
            f"{line.lower_bytes / line.ordinary_bytes:.0%} {line.least_bytes / line.ordinary_bytes:.0%}",
            "fails" if line.strict_failure else "holds",
            format_bytes(held),
            *half,
            "FAILS" if line.faults() else "",
        )
    Console(highlight=False, width=max(console.width, 190)).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--policy", choices=list(POLICIES), default="auto")
    parser.add_argument("--steps", type=int, default=5, help="of each run that is not timed")
    parser.add_argument("--rounds", type=int, default=8, help="turns of both kinds, half way")
    parser.add_argument("--limit", type=float, default=1.5, help="of the ratio half way")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    for name in arguments.models:
        if name not in MODELS:
            parser.error(f"--models: {name!r} is none of {', '.join(MODELS)}")
    if arguments.steps < 4 or arguments.rounds < 1:
        parser.error("at least --steps 4 and --rounds 1")
    torch.set_num_threads(1)
    cpu_pool.install()

    lines = []
    for name in arguments.models:
        begin = time.perf_counter()
        line = check(name, arguments)
        lines.append(line)
        console.print(f"{name}: {time.perf_counter() - begin:.1f} s", markup=False)
        for fault in line.faults():
            console.print(f"  {fault}", markup=False, style="bold red")
    show(lines, arguments.policy)
    faults = [f"{line.model}: {fault}" for line in lines for fault in line.faults()]
    for fault in faults:
        console.print(fault, markup=False, style="bold red")
    console.print(f"{len(lines)} models, {len(faults)} faults")
    write_json(
        arguments.json,
        {
            "machine": machine(),
            "policy": arguments.policy,
            "lines": [asdict(line) for line in lines],
            "faults": faults,
        },
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

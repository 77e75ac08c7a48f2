"""Who else trains in less memory, and who takes less time at equal memory?

A benchmark, in one process. Each model of `SIZED` in scripts/workloads.py trains as each peer has it: checkpoints
around each block (as `gradient_checkpointing` of transformers has it), around groups of blocks, selective ones, all
that is saved sent to the host, and checkpoints whose inputs wait on the host; then as the runtime has it within the
peer's own allocator peak and 64 KiB. Peers that offload, and the runtime beside them, use the virtual accelerator's
link. Steps come in blocks of one kind, blocks take turns in a random order; a block's first step is not timed, and the
least of all others counts. Compute runs on one thread, so that a core is left for copies. Takes about 40 minutes
(`--models llama --peers checkpoint --rounds 1`: 1) and needs no GPU; nothing of yours should run beside it. Exits 1
where gradients of the runtime differ from an ordinary step's or its peak is above the budget; losses are named, and do
not change the status.

    python -m benchmarks.peers [--models resnet50,...] [--peers checkpoint,...] [--rounds 3] [--steps 3]
        [--link pcie5] [--compiled 0.5] [--bound-seconds 20] [--json FILE] [--docs PAGE]

`--compiled` adds torch.compile with `activation_memory_budget` at that share, dropout off, beside a compiled step
without; `--compiled 0` leaves it out. Extra time is over the peer's own unlimited step, which for a compiled peer is
the compiled one. `--json` keeps what it has after each model, and goes on from there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import delta_runtime as delta
from benchmarks.common import (
    SEED,
    SLACK_BYTES,
    console,
    keep_memory,
    machine,
    train_step,
    words,
    write_docs,
    write_json,
)
from benchmarks.contenders import OFFLOADING, PEERS, HostLink, contender
from delta_runtime import cpu_pool
from delta_runtime.act.links import link_bytes_per_s
from delta_runtime.core.plan import Plan
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.plan_cache import STEPS_TO_SETTLE
from delta_runtime.planners.validate import validate
from delta_runtime.planners.window_bound import window_bound
from scripts.workloads import SIZED, SizedWorkload, TrainState

COMPILED = "compiled"
_NEAR_BOUND = 1.05
_OF_CHECKPOINTS = 0.6
_SETTLED_AFTER = 2
_OPTIONS = ("peers", "rounds", "steps", "link", "bound_seconds")
"""What figures depend on beside the model."""
_SLOW = 3.0
"""Who takes so many times as long as the fastest is not timed again."""


@dataclass(frozen=True, slots=True)
class Row:
    """A peer on one model, and the runtime at its peak.

    Args:
        ordinary_bytes, ordinary_s: of a step without any of them, eager.
        own_s: of the peer's step without a limit; the ordinary one's but for compiled peers.
        peak_bytes, seconds, cpu_s: of the peer's step; `cpu_s` is processor time, of the same step.
        ours_peak_bytes, ours_s, ours_cpu_s: of the runtime's; 0 where it did not train.
        failure: why the runtime did not train, or "".
        bound_s: no plan that drops takes less on top; None where that is not known, or copies help.
        planned_s: what the runtime's plan is to take on top; None without a plan.
        equal: whether the runtime's gradients were an ordinary step's, bit for bit.
    """

    model: str
    peer: str
    ordinary_bytes: int
    ordinary_s: float
    own_s: float
    peak_bytes: int
    seconds: float
    cpu_s: float
    ours_peak_bytes: int
    ours_s: float
    ours_cpu_s: float
    bound_s: float | None
    recorded_s: float
    planned_s: float | None
    equal: bool
    failure: str = ""

    @property
    def extra(self) -> float:
        """The peer's extra time over its own unlimited step."""
        return self.seconds / self.own_s - 1

    @property
    def ours_extra(self) -> float:
        """The runtime's over the ordinary step; inf where it did not train."""
        return self.ours_s / self.ordinary_s - 1 if self.ours_s else float("inf")

    @property
    def verdict(self) -> str:
        """ "less", or what was lost."""
        if self.failure:
            return f"lost: {self.failure}"
        return "less" if self.ours_extra < self.extra else "lost"


@dataclass(slots=True)
class Least:
    """The least of the steps of one kind."""

    seconds: float = float("inf")
    cpu_s: float = float("inf")

    def take(self, seconds: float, cpu_s: float) -> None:
        if seconds < self.seconds:
            self.seconds, self.cpu_s = seconds, cpu_s


@dataclass(slots=True)
class Kind:
    """A way to run steps: a peer's, the runtime's, or the ordinary one.

    Args:
        around: what is entered for a block of steps.
        state: what trains in it.
        is_slow: one timed step of it will do.
        failure: why it is not timed any more, or "".
    """

    around: Callable[[], contextlib.AbstractContextManager[object]]
    state: TrainState
    runtime: delta.Runtime | None = None
    least: Least = dataclasses.field(default_factory=Least)
    peak_bytes: int = 0
    is_slow: bool = False
    failure: str = ""

    def block(self, steps: int, timed: bool = True) -> None:
        """Run a step that is not timed, and `steps` that may be."""
        with self.around():
            for index in range(steps + 1):
                batch = self.state.batch(index)
                cpu_pool.reset_peak()
                begin, begin_cpu = time.perf_counter(), time.process_time()
                train_step(self.state, batch, self.runtime)
                end, end_cpu = time.perf_counter(), time.process_time()
                self.peak_bytes = max(self.peak_bytes, cpu_pool.peak_bytes())
                if timed and index > 0:
                    self.least.take(end - begin, end_cpu - begin_cpu)


def gradients(state: TrainState, runtime: delta.Runtime | None) -> list[bytes]:
    """Return the gradients of one step without an update, as bytes; from weights and random numbers that are fixed."""
    state.optimizer.zero_grad(set_to_none=True)
    kept = {  # outside of the pool
        name: torch.from_numpy(np.array(each.numpy(), copy=True))
        for name, each in state.model.state_dict().items()
    }
    torch.manual_seed(1)
    with runtime.step() if runtime else contextlib.nullcontext():
        state.loss(state.batch(0)).backward()
    found = [p.grad.numpy().tobytes() for p in state.model.parameters() if p.grad is not None]
    state.optimizer.zero_grad(set_to_none=True)
    state.model.load_state_dict(kept)  # running statistics
    return found


def settled(
    state: TrainState, budget_bytes: int, link: str | None
) -> tuple[delta.Runtime | None, str]:
    """Return a runtime whose plan stays, and "", or None and why there is none."""
    runtime = delta.Runtime(
        budget_bytes,
        device="cpu",
        policy="auto" if link else "recompute",
        link_bytes_per_s=link,
    )
    kind = Kind(contextlib.nullcontext, state, runtime)
    try:
        with cpu_pool.capacity(budget_bytes):
            for index in range(STEPS_TO_SETTLE):
                kind.block(0, timed=False)
                runtime.wait_for_plan()
                if index >= _SETTLED_AFTER and runtime.settled:
                    break
    except (torch.OutOfMemoryError, delta.DeltaError) as error:
        runtime.close()
        state.optimizer.zero_grad(set_to_none=True)
        return None, str(error).splitlines()[0]
    return runtime, ""


def in_turns(kinds: Sequence[Kind], rounds: int, steps: int, seed: int) -> None:
    """Time blocks of each kind, in another order in each round; what is slow by far, once."""
    order = random.Random(seed)
    for index in range(rounds):
        fastest_s = min(kind.least.seconds for kind in kinds)
        for kind in order.sample(kinds, len(kinds)):
            if kind.failure or (index > 0 and kind.least.seconds > _SLOW * fastest_s):
                continue
            gc.collect()
            try:
                kind.block(steps if index > 0 or not kind.is_slow else 1)
            except (torch.OutOfMemoryError, delta.DeltaError) as error:
                kind.failure = str(error).splitlines()[0]
                kind.state.optimizer.zero_grad(set_to_none=True)


def compare(
    workload: SizedWorkload,
    state: TrainState,
    peers: Mapping[str, Kind],
    arguments: argparse.Namespace,
) -> list[Row]:
    """Time an ordinary step, the peers and the runtime at each peer's peak."""
    ordinary = Kind(contextlib.nullcontext, state)
    for kind in (ordinary, *peers.values()):
        kind.block(1, timed=False)
    budgets = {name: peer.peak_bytes + SLACK_BYTES for name, peer in peers.items()}
    ours: dict[str, Kind] = {}
    failures: dict[str, str] = {}
    equal: dict[str, bool] = {}
    planned: dict[str, tuple[StepGraph, Plan | None]] = {}
    for name in peers:
        runtime, failures[name] = settled(
            state, budgets[name], arguments.link if name in OFFLOADING else None
        )
        if runtime is not None:
            planned[name] = runtime.graph(), runtime.plan()  # before steps of another kind
            within = functools.partial(cpu_pool.capacity, budgets[name])
            ours[name] = Kind(within, state, runtime)
            equal[name] = gradients(state, runtime) == gradients(state, None)
    in_turns(
        [ordinary, *peers.values(), *ours.values()],
        arguments.rounds,
        arguments.steps,
        SEED,
    )
    rows = []
    for name, peer in peers.items():
        mine = ours.get(name)
        if mine is not None and mine.failure:
            failures[name] = mine.failure
        bound_s, recorded_s, planned_s = None, 0.0, None
        if mine is not None and mine.runtime is not None:
            graph, plan = planned[name]
            recorded_s = graph.seconds
            mine.runtime.close()
            if name not in OFFLOADING:
                planned_s = validate(plan, graph).rebuild_s if plan else None
                bound_s = window_bound(graph, budgets[name], time_limit_s=arguments.bound_seconds)
        rows.append(
            Row(
                workload.name,
                name,
                ordinary.peak_bytes,
                ordinary.least.seconds,
                ordinary.least.seconds,
                budgets[name],
                peer.least.seconds,
                peer.least.cpu_s,
                mine.peak_bytes if mine else 0,
                mine.least.seconds if mine and not mine.failure else 0.0,
                mine.least.cpu_s if mine and not mine.failure else 0.0,
                bound_s,
                recorded_s,
                planned_s,
                equal.get(name, True),
                failures[name],
            )
        )
    return rows


def eager_rows(workload: SizedWorkload, arguments: argparse.Namespace) -> list[Row]:
    """Compare with the peers that run ops one by one."""
    state = workload.build(SEED)
    link = HostLink(link_bytes_per_s(arguments.link))
    peers = {}
    for name in arguments.peers:
        if name == "checkpoint_sequential" and not workload.in_a_row:
            continue

        def around(name: str = name) -> contextlib.AbstractContextManager[int]:
            return contender(name, state.model, workload.blocks, link)

        with around() as n_blocks:
            pass
        if n_blocks > 0:
            peers[name] = Kind(around, state, is_slow=name == "save_on_cpu")
    return compare(workload, state, peers, arguments)


def compiled_rows(workload: SizedWorkload, arguments: argparse.Namespace) -> list[Row]:
    """Compare with torch.compile and its budget; without dropout, whose gradients it gets wrong."""
    import torch._functorch.config as functorch

    def without_dropout() -> TrainState:
        state = workload.build(SEED)
        for module in state.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return state

    def compiled(state: TrainState, share: float) -> Kind:
        torch._dynamo.reset()  # code is found again by the model's class, whatever budget it was compiled for
        model = torch.compile(state.model, dynamic=False)
        with functorch.patch(activation_memory_budget=share):
            kind = Kind(contextlib.nullcontext, TrainState(model, state.optimizer, state.batch))
            kind.block(1, timed=False)
        kind.peak_bytes = 0
        return kind

    name = f"{COMPILED}@{arguments.compiled:g}"
    rows = []
    for share in (1.0, arguments.compiled):
        state = without_dropout()
        rows.append(compare(workload, state, {name: compiled(state, share)}, arguments)[0])
        del state
        gc.collect()
    return [dataclasses.replace(rows[1], own_s=rows[0].seconds)]


def show(rows: Sequence[Row]) -> None:
    """Print the table, and what the runtime lost."""
    table = Table(title="at each peer's own peak", title_justify="left")
    for heading in ("model", "peer", "peak / ordinary", "ordinary: s", "own: s", "peer: s"):
        table.add_column(heading)
    for heading in ("extra", "ours: s", "extra", "ours / peer", "plan / bound", ""):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            *(row.model, row.peer, f"{row.peak_bytes / row.ordinary_bytes:.0%}"),
            *(f"{row.ordinary_s:.2f}", f"{row.own_s:.2f}", f"{row.seconds:.2f}"),
            *(f"{row.extra:+.1%}", f"{row.ours_s:.2f}", f"{row.ours_extra:+.1%}"),
            *(of_peer(row), of_bound(row), row.verdict),
        )
    Console(highlight=False, width=max(console.width, 150)).print(table)


def of_peer(row: Row) -> str:
    """Return the runtime's extra time over the peer's, where both are known."""
    if row.failure or row.extra <= 0:
        return ""
    return f"{max(row.ours_extra, 0.0) / row.extra:.2f}"


def of_bound(row: Row) -> str:
    """Return the plan's extra seconds over the bound, where one is known."""
    return f"{row.planned_s / row.bound_s:.3f}" if row.bound_s and row.planned_s else ""


def near(row: Row) -> bool:
    """Return whether a row of checkpoints is as far below them as it is to be, or near what is possible."""
    few = row.ours_extra <= _OF_CHECKPOINTS * row.extra
    if few or row.bound_s is None or row.planned_s is None:
        return few
    return row.planned_s <= _NEAR_BOUND * row.bound_s


def docs_tables(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the table for a page."""
    lines = [
        "| model | peer | its peak / ordinary | own, peer: s | extra | ours | ours / peer | plan / bound |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        ours = f"did not train ({row.failure})" if row.failure else f"{row.ours_extra:+.1%}"
        lost = "" if row.verdict == "less" else " **lost**"
        lines.append(
            f"| {row.model} | {row.peer} | {row.peak_bytes / row.ordinary_bytes:.0%} | "
            f"{row.own_s:.2f}, {row.seconds:.2f} | {row.extra:+.1%} | {ours}{lost} | {of_peer(row)} | "
            f"{of_bound(row)} |"
        )
    return {"peers": lines}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=words, default=list(SIZED))
    parser.add_argument("--peers", type=words, default=list(PEERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="timed ones of a block")
    parser.add_argument("--link", default="pcie5", help="bytes per second, or a card's name")
    parser.add_argument("--compiled", type=float, default=0.5)
    parser.add_argument("--bound-seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path)
    arguments = parser.parse_args(argv)
    for given, known in ((arguments.models, SIZED), (arguments.peers, PEERS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is none of {', '.join(known)}")
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds, --steps: at least 1")
    torch.set_num_threads(1)
    cpu_pool.install()
    keep_memory()
    warnings.filterwarnings("ignore", category=UserWarning)
    rows: list[Row] = []
    options = {name: getattr(arguments, name) for name in _OPTIONS}
    if arguments.json and arguments.json.exists():
        there = json.loads(arguments.json.read_text())
        if there["options"] != options:
            parser.error(f"--json: the file was made with {there['options']}; name another one")
        rows = [Row(**row) for row in there["rows"]]
    for name in arguments.models:
        here = [row for row in rows if row.model == name]
        if not any(not row.peer.startswith(COMPILED) for row in here) and arguments.peers:
            rows += eager_rows(SIZED[name], arguments)
            keep(arguments.json, rows, options)
        gc.collect()
        if arguments.compiled > 0 and not any(row.peer.startswith(COMPILED) for row in here):
            rows += compiled_rows(SIZED[name], arguments)
            keep(arguments.json, rows, options)
        gc.collect()
        console.print(f"{name}: done")
    show(rows)
    for row in rows:
        if row.peer == "checkpoint" and not near(row):
            few = f"{_OF_CHECKPOINTS} of the extra time of checkpoints"
            console.print(f"{row.model}: neither {few} nor near the bound")
    write_docs(arguments.docs, docs_tables(rows))
    wrong = [row for row in rows if not row.equal or row.ours_peak_bytes > row.peak_bytes]
    for row in wrong:
        console.print(f"{row.model} beside {row.peer}: other gradients, or above the budget")
    return 1 if wrong else 0


def keep(path: Path | None, rows: Sequence[Row], options: Mapping[str, object]) -> None:
    """Write what there is."""
    each = [asdict(row) for row in rows]
    write_json(path, {"machine": machine(), "options": options, "rows": each})


if __name__ == "__main__":
    sys.exit(main())

"""Does the simulator tell what the runtime does?

A benchmark. Trains M1, M2 and M3 of scripts/workloads.py at shares of the activations, recomputing alone, swapping over
a throttled link, and as `auto` does; and simulates the same recorded step under the same plan. Managed and ordinary
steps take turns, two of each kind in a round, in one process, on one training state. Compared are the bytes that left,
value by value and way by way, and the step time over the ordinary one's. One thread computes by default: the lanes'
copies then have a core of their own, as an accelerator's have copy engines. Takes about half an hour on two idle cores
(`--models tiny_gpt --rounds 3`: a minute); needs no GPU. Exits 1 where less than 95 % of the evicted bytes are the
same, or a step time is off by more than 5 %.

    python -m benchmarks.simulated [--models resnet50,gpt,vit] [--policies recompute,swap,auto]
        [--shares 0.7,0.5,0.35] [--rounds 10] [--threads 1] [--link pcie4] [--json FILE] [--docs PAGE]

A share is of the activations: budget = ordinary peak - (1 - share) x activations. Rows that FILE holds already, of as
many rounds and threads over the same link, are not measured again. PAGE gets the table, between its markers.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import delta_runtime as delta
from benchmarks.common import (
    BENCH_WORKLOADS,
    MIB,
    SEED,
    Spread,
    keep_memory,
    machine,
    measure,
    words,
    write_docs,
    write_json,
)
from benchmarks.planned import settle, timed
from delta_runtime import cpu_pool
from delta_runtime.act.links import link_bytes_per_s
from delta_runtime.core.events import EventKind, Events
from delta_runtime.core.transfer import Links
from delta_runtime.online.policies import get_policy
from delta_runtime.simulate.virtual_step import VirtualStep
from scripts.workloads import TrainState

_WIDTH = 140
_LEAST_SAME = 0.95
_MOST_OFF = 0.05
_NAMES = {"resnet50": "ResNet-50", "gpt": "GPT", "vit": "ViT"}
_DROP, _FREE = 4, 5  # kinds: Drop and Free of csrc/simulate/virtual_step.h
_KIND = {int(EventKind.DROPPED): _DROP, int(EventKind.SWAPPED_OUT): _FREE}


@dataclass(frozen=True, slots=True)
class Row:
    """What the simulator told of one budget, and what came.

    Args:
        model, policy, share, link, rounds, threads: what was asked for.
        budget_bytes: what that share is of this model.
        evicted_bytes, simulated_bytes: that left in a step.
        same: share of either that are of the same value, by the same way.
        peak_bytes, simulated_peak_bytes: the allocator's, and the simulator's.
        ratio: step over ordinary step, measured in turns.
        simulated_ratio: 1 + what the simulated step takes longer than its ops, over the ordinary step. (That has an
            optimizer, too, and the time between ops.)
    """

    model: str
    policy: str
    share: float
    link: str
    rounds: int
    threads: int
    budget_bytes: int
    evicted_bytes: int
    simulated_bytes: int
    same: float
    peak_bytes: int
    simulated_peak_bytes: int
    ratio: Spread
    simulated_ratio: float

    @property
    def off(self) -> float:
        """By which part the simulated step time is off."""
        return abs(self.simulated_ratio / self.ratio.median - 1)


@contextmanager
def listening(runtime: delta.Runtime) -> Iterator[list[Events]]:
    """Collect the events of a runtime, from now on."""
    heard: list[Events] = []
    runtime.steps.pump.drain()
    runtime.steps.pump.listener = heard.append
    try:
        yield heard
    finally:
        runtime.steps.pump.listener = None


def left(heard: list[Events]) -> Counter[tuple[int, int]]:
    """Return how often each value left, by each way."""
    events = np.concatenate(heard)
    events = events[np.isin(events["kind"], list(_KIND))]
    kinds = [_KIND[kind] for kind in events["kind"].tolist()]
    return Counter(zip(kinds, events["key"].tolist(), strict=True))


def run(state: TrainState, model: str, policy: str, share: float, link: str, rounds: int) -> Row:
    """Train under a policy, and simulate the plan that it follows."""
    budget_bytes = measure(state).budget_bytes(share)
    speed = None if policy == "recompute" else link_bytes_per_s(link)
    runtime = delta.Runtime(
        budget=budget_bytes, policy=policy, device="cpu", link_bytes_per_s=speed
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settle(state, runtime)
    plan, graph = runtime.plan(), runtime.graph()
    assert plan is not None
    ratios: list[float] = []
    ordinary: list[float] = []
    peaks: list[int] = []
    before = timed(state, 2, None)
    with listening(runtime) as heard:
        for index in range(rounds):
            seen: list[Any] = []
            runtime.steps.pump.drain()
            heard.clear()
            managed = timed(state, index, runtime, seen)
            runtime.steps.pump.drain()
            evicted = left(heard)
            peaks += [each.peak_bytes for each in seen]
            after = timed(state, index, None)
            ordinary.append((before + after) / 2)
            ratios.append(managed / ordinary[-1])
            before = after
    runtime.close()
    evicted = Counter({which: count / 2 for which, count in evicted.items()})  # of two steps
    links = None if speed is None else Links(speed, speed)
    virtual = VirtualStep(graph, plan, budget_bytes, policy=get_policy(policy), links=links)
    virtual.run()
    step = virtual.run()
    log = step.log[np.isin(step.log["kind"], (_DROP, _FREE))]
    thought = Counter(zip(log["kind"].tolist(), log["number"].tolist(), strict=True))
    size = graph.value_bytes.tolist()
    total, simulated, both = (
        sum(count * size[value] for (_, value), count in each.items())
        for each in (evicted, thought, evicted & thought)
    )
    return Row(
        model,
        policy,
        share,
        link,
        rounds,
        torch.get_num_threads(),
        budget_bytes,
        evicted_bytes=int(total),
        simulated_bytes=int(simulated),
        same=both / max(total, simulated, 1),
        peak_bytes=max(peaks),
        simulated_peak_bytes=step.peak_bytes,
        ratio=Spread.of(ratios),
        simulated_ratio=1 + (step.seconds - graph.seconds) / float(np.median(ordinary)),
    )


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title="the runtime, and what the simulator told of it")
    for name in ("model", "policy", "share", "budget MiB"):
        table.add_column(name, justify="left" if name in ("model", "policy") else "right")
    for name in ("left MiB", "simulated", "the same", "peak MiB", "simulated", "step", "simulated"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.model,
            row.policy,
            f"{row.share:.2f}",
            f"{row.budget_bytes / MIB:.0f}",
            f"{row.evicted_bytes / MIB:.0f}",
            f"{row.simulated_bytes / MIB:.0f}",
            f"{row.same:.3f}",
            f"{row.peak_bytes / MIB:.0f}",
            f"{row.simulated_peak_bytes / MIB:.0f}",
            row.ratio.text(),
            f"{row.simulated_ratio:.3f}",
        )
    Console(width=_WIDTH).print(table)


def markdown(rows: list[Row]) -> list[str]:
    """Return the table as docs/simulator.md has it."""
    lines = [
        "| model, policy | may stay | left: MiB, simulated | the same | peak: MiB, simulated |"
        " step / ordinary step: measured, simulated |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        mib = [
            f"{size / MIB:.0f}"
            for size in (
                row.evicted_bytes,
                row.simulated_bytes,
                row.peak_bytes,
                row.simulated_peak_bytes,
            )
        ]
        lines.append(
            f"| {_NAMES.get(row.model, row.model)}, `{row.policy}` | {row.share:.0%}"
            f" | {mib[0]}, {mib[1]} | {row.same:.1%} | {mib[2]}, {mib[3]}"
            f" | {row.ratio.median:.3f}, {row.simulated_ratio:.3f} |"
        )
    return lines


def kept_rows(path: Path | None) -> list[Row]:
    """Return the rows of an earlier run on such a machine; none where there is no file.

    Raises:
        SystemExit: they are another machine's, or another PyTorch's, and would be taken for this one's.
    """
    if path is None or not path.exists():
        return []
    told = json.loads(path.read_text())
    now = machine()
    for name in ("cpu", "cores", "torch"):
        if told["machine"][name] != now[name]:
            raise SystemExit(f"{path} is of another {name}: {told['machine'][name]}")
    return [Row(**{**row, "ratio": Spread(**row["ratio"])}) for row in told["rows"]]


def main() -> int:
    """Parse the command line and run everything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="resnet50,gpt,vit")
    parser.add_argument("--policies", default="recompute,swap,auto")
    parser.add_argument("--shares", default="0.7,0.5,0.35")
    parser.add_argument("--rounds", type=int, default=10, help="of two steps each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--link", default="pcie4")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cpu_pool.install()
    keep_memory()
    asked = (options.link, options.rounds, options.threads)
    kept = kept_rows(options.json)
    known = {
        (row.model, row.policy, row.share): row
        for row in kept
        if (row.link, row.rounds, row.threads) == asked
    }
    others = [row for row in kept if row not in known.values()]
    rows: list[Row] = []
    for model in words(options.models):
        state: TrainState | None = None
        for policy in words(options.policies):
            for share in map(float, words(options.shares)):
                which = (model, policy, share)
                if which not in known:
                    state = state or BENCH_WORKLOADS[model].build(SEED)
                    known[which] = run(state, *which, options.link, options.rounds)
                    every = [asdict(row) for row in (*others, *known.values())]
                    write_json(options.json, {"machine": machine(), "rows": every})
                rows.append(known[which])
                gc.collect()
            show(rows)
    write_docs(options.docs, {"simulated": markdown(rows)})
    fits = all(row.same >= _LEAST_SAME and row.off <= _MOST_OFF for row in rows)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())

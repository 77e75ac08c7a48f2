"""Made-up step graphs of any size, shaped like those of real models, for planners to be timed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from delta_runtime.core.step_graph import StepGraph

KIB = 1024
SEED = 11


@dataclass
class _Forward:
    """A forward that grows op by op, in columns."""

    rng: np.random.Generator
    reads: list[list[int]] = field(default_factory=list)
    saves: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    value_op: list[int] = field(default_factory=list)
    value_bytes: list[int] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)

    def op(
        self,
        reads: Sequence[int],
        makes_kib: Sequence[int],
        microseconds: float,
        *,
        saves_inputs: bool = False,
        saves_outputs: Sequence[int] = (),
    ) -> list[int]:
        """Add an op; return the values that it makes.

        Args:
            reads: values.
            makes_kib: KiB of each value that it makes.
            microseconds: that it takes, give or take a fifth.
            saves_inputs: whether its backward asks for what it read.
            saves_outputs: which of the values that it makes its backward asks for.
        """
        first = len(self.value_op)
        made = list(range(first, first + len(makes_kib)))
        self.value_op += [len(self.reads)] * len(made)
        self.value_bytes += [kib * KIB for kib in makes_kib]
        self.reads.append(list(reads))
        saved = [*(reads if saves_inputs else ()), *(made[each] for each in saves_outputs)]
        self.saves.append(list(dict.fromkeys(saved)))
        self.saved.update(saved)
        self.seconds.append(microseconds * 1e-6 * float(self.rng.uniform(0.8, 1.2)))
        return made

    def graph(self) -> StepGraph:
        """The record: backward has one op for each that saved something, twice as long, in the opposite order."""
        n = len(self.reads)
        nodes = [op for op in reversed(range(n)) if self.saves[op]]
        total = n + len(nodes)
        saved_at: dict[int, int] = {}
        for op, saves in enumerate(self.saves):
            for value in saves:
                saved_at.setdefault(value, op)
        saved = list(saved_at)
        uses: dict[int, list[int]] = {value: [] for value in saved}
        for k, op in enumerate(nodes):
            for value in self.saves[op]:
                uses[value].append(n + k - 1)
        last_read = list(self.value_op)
        for op, reads in enumerate(self.reads):
            for value in reads:
                last_read[value] = op
        last = [uses[v][-1] + 1 if v in uses else read for v, read in enumerate(last_read)]
        change = np.zeros(total + 2, np.int64)
        np.add.at(change, np.array(self.value_op) + 1, self.value_bytes)
        np.add.at(change, np.array(last) + 1, -np.array(self.value_bytes))
        made = np.bincount(self.value_op, weights=self.value_bytes, minlength=total)
        largest = np.array(
            [max((self.value_bytes[v] for v in self.saves[op]), default=0) for op in nodes]
        )
        return StepGraph(
            fingerprint=n,
            op_name=(*["op"] * n, *["backward"] * len(nodes)),
            op_tick=np.arange(total, dtype=np.int64),
            op_seconds=np.array(self.seconds + [2 * self.seconds[op] for op in nodes]),
            op_replay_seconds=np.full(total, np.nan),
            op_watermark_bytes=made.astype(np.int64)
            + np.concatenate([np.zeros(n, np.int64), largest]),
            op_ordinary_bytes=np.cumsum(change)[:total],
            op_backward=np.arange(total) >= n,
            op_managed_input_bytes=np.zeros(total, np.int64),
            input_offsets=np.cumsum([0, *map(len, self.reads), *[0] * len(nodes)]).astype(np.int64),
            inputs=np.array([v for reads in self.reads for v in reads], np.int64),
            value_op=np.array(self.value_op, np.int64),
            value_bytes=np.array(self.value_bytes, np.int64),
            value_fingerprint=np.arange(len(self.value_op), dtype=np.uint64),
            value_repeats=np.ones(len(self.value_op), bool),
            saved=np.array(saved, np.int64),
            saved_at=np.array([saved_at[value] for value in saved], np.int64),
            alone_at=np.array([last_read[value] + 1 for value in saved], np.int64),
            released_at=np.array([last[value] for value in saved], np.int64),
            use_offsets=np.cumsum([0, *(len(uses[value]) for value in saved)]).astype(np.int64),
            uses=np.array([tick for value in saved for tick in uses[value]], np.int64),
            ticks=total + 1,
            persistent_bytes=0,
        )


def _chain(step: _Forward, x: int) -> int:
    """An op as in a deep chain: its backward asks for what it read."""
    kib = int(step.rng.integers(256, 2048))
    return step.op([x], [kib], float(step.rng.integers(20, 400)), saves_inputs=True)[0]


def _residual(step: _Forward, x: int) -> int:
    """A block of a residual network: two convolutions, each normalised, and a sum."""
    kib = int(step.rng.choice([256, 512, 1024]))
    y = x
    for last in (False, True):
        y = step.op([y], [kib], 300.0, saves_inputs=True)[0]
        y = step.op([y], [kib, 4, 4], 40.0, saves_inputs=True, saves_outputs=(1, 2))[0]
        if last:
            y = step.op([x, y], [kib], 15.0)[0]
        y = step.op([y], [kib], 15.0, saves_outputs=(0,))[0]
    return y


def _transformer(step: _Forward, x: int) -> int:
    """A layer of a transformer."""
    kib = 512
    y = step.op([x], [kib, 4, 4], 30.0, saves_inputs=True, saves_outputs=(1, 2))[0]
    qkv = step.op([y], [3 * kib], 240.0, saves_inputs=True)[0]
    q, k, v = (step.op([qkv], [kib], 20.0)[0] for _ in range(3))
    y = step.op([q, k, v], [kib, 16], 200.0, saves_inputs=True, saves_outputs=(0, 1))[0]
    y = step.op([y], [kib], 80.0, saves_inputs=True)[0]
    x = step.op([x, y], [kib], 15.0)[0]
    y = step.op([x], [kib, 4, 4], 30.0, saves_inputs=True, saves_outputs=(1, 2))[0]
    y = step.op([y], [4 * kib], 320.0, saves_inputs=True)[0]
    y = step.op([y], [4 * kib], 60.0, saves_inputs=True)[0]
    y = step.op([y], [kib], 320.0, saves_inputs=True)[0]
    return step.op([x, y], [kib], 15.0)[0]


_BLOCKS: dict[str, Callable[[_Forward, int], int]] = {
    "chain": _chain,
    "residual": _residual,
    "transformer": _transformer,
}
SHAPES = tuple(_BLOCKS)
"""What a large graph may look like."""


def large_graph(shape: str, n_saved: int) -> StepGraph:
    """A graph with so many saved values, or a few more; the same each time.

    Args:
        shape: one of SHAPES.
        n_saved: values that autograd saves.
    """
    step = _Forward(np.random.default_rng(SEED))
    x = step.op([], [512], 50.0)[0]
    while len(step.saved) < n_saved:
        x = _BLOCKS[shape](step, x)
    return step.graph()

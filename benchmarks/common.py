"""What all benchmarks share: the models, a training step, what it takes without a budget, the machine, spreads."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

import delta_runtime as delta
from delta_runtime import cpu_pool
from delta_runtime.planners.bounds import bounds_of
from scripts.workloads import (
    WORKLOADS,
    Batch,
    TrainState,
    Workload,
    allocate_adamw_state,
    byte_windows,
    digit_images,
)

SEED = 0
SLACK_BYTES = 1 << 16
"""By so much two runs of the same step may differ; values that are too small to be managed are less."""
BLOCKS = ("GPT2Block", "ResNetBottleNeckLayer", "ResNetBasicLayer", "ViTLayer")
"""Classes of modules that the peer checkpoints."""
MIB = 1024**2
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4  # of Linux: sys/mman.h

console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles."""

    median: float
    q1: float
    q3: float
    n: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Return the spread of at least one number."""
        q1, median, q3 = np.percentile(np.asarray(numbers, dtype=float), (25, 50, 75))
        return cls(float(median), float(q1), float(q3), len(numbers))

    def text(self, digits: int = 3) -> str:
        """As "median [q1, q3]"."""
        return f"{self.median:.{digits}f} [{self.q1:.{digits}f}, {self.q3:.{digits}f}]"


def machine() -> dict[str, Any]:
    """Return what a figure depends on beside the code: torch, CPU, threads, and when it was measured."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def write_json(path: Path | None, content: Any) -> None:
    """Write a file, where one is asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def write_docs(page: Path | None, tables: Mapping[str, Sequence[str]]) -> None:
    """Put tables between their markers on a page, where one is asked for."""
    if page is None:
        return
    text = page.read_text(encoding="utf-8")
    for name, lines in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = before + begin + "\n" + "\n".join(lines) + "\n" + end + after
    page.write_text(text, encoding="utf-8")


def train_step(state: TrainState, batch: Batch, runtime: delta.Runtime | None = None) -> None:
    """Run one whole step; with a runtime, forward and backward inside of `runtime.step()`."""
    state.optimizer.zero_grad(set_to_none=True)
    with runtime.step() if runtime else contextlib.nullcontext():
        state.loss(batch).backward()
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True, slots=True)
class Measured:
    """What one workload needs without the runtime.

    Args:
        peak_bytes: the pool's highest live bytes in an ordinary step, optimizer included.
        activation_bytes: bytes of all saved values of a step in which nothing was evicted.
        persistent_bytes: parameters, buffers and the optimizer's state.
        least_bytes, least_op: the peak that no choice of drops goes below, and the op that sets it.
    """

    peak_bytes: int
    activation_bytes: int
    persistent_bytes: int
    least_bytes: int
    least_op: str

    def budget_bytes(self, share: float) -> int:
        """Return the budget that leaves `share` of the activations."""
        return self.peak_bytes - int((1 - share) * self.activation_bytes)

    def of_activations(self, budget_bytes: int) -> float:
        """Return the share of the activations that a budget leaves."""
        return 1 - (self.peak_bytes - budget_bytes) / self.activation_bytes


def keep_memory() -> None:
    """Have this process keep all memory that it ever touches; say so where the system does not let it.

    The pool gives memory back that a managed step does not need. Whoever measures steps of both kinds in turns measures
    else what it takes to get it again, on a shared machine several steps later too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT) != 0:
        console.print("memory is not kept (ulimit -l): times include what it takes to get it again")


def measure(state: TrainState) -> Measured:
    """Run two ordinary steps and one that is only observed."""
    peak_bytes = 0
    for index in range(2):
        batch = state.batch(index)
        cpu_pool.reset_peak()
        train_step(state, batch)
        peak_bytes = max(peak_bytes, cpu_pool.peak_bytes())
    runtime = delta.Runtime(policy="off", device="cpu")
    train_step(state, state.batch(2), runtime)
    graph = runtime.graph()
    runtime.close()
    bounds = bounds_of(graph)
    return Measured(
        peak_bytes,
        graph.activation_bytes,
        state.persistent_bytes(),
        bounds.lower_bytes,
        bounds.lower_op,
    )


# ------------------------------------------------------------------------------ models to try a benchmark with


def _build_tiny_gpt(seed: int) -> TrainState:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=3,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    allocate_adamw_state(optimizer)
    return TrainState(model, optimizer, lambda index: byte_windows(seed, index, 8, 64))


def _build_tiny_resnet(seed: int) -> TrainState:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(seed)
    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2], num_labels=10)
    model = ResNetForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    allocate_adamw_state(optimizer)
    return TrainState(model, optimizer, lambda index: digit_images(seed, index, 8, 64))


BENCH_WORKLOADS: dict[str, Workload] = WORKLOADS | {
    "tiny_gpt": Workload("tiny_gpt", "GPT-2 3 x 64: to try a script with", _build_tiny_gpt),
    "tiny_resnet": Workload(
        "tiny_resnet", "4 bottlenecks: to try a script with", _build_tiny_resnet
    ),
}
"""The frozen workloads, and two that only show that a script runs."""


# -------------------------------------------------------------------------------------------- the peer


@contextlib.contextmanager
def checkpointed(model: nn.Module, classes: Sequence[str] = BLOCKS) -> Iterator[int]:
    """Put torch.utils.checkpoint around every module of the named classes; yield their number.

    Running statistics of batch norm are updated twice in a step, as they are by everyone who does this.
    """
    blocks = [module for module in model.modules() if type(module).__name__ in classes]

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return run

    for block in blocks:
        block.forward = wrapped(block.forward)
    try:
        yield len(blocks)
    finally:
        for block in blocks:
            del block.forward  # the class's own is seen again


def words(text: str) -> list[str]:
    """Return the words of an option that takes several, with commas between."""
    return [word.strip() for word in text.split(",") if word.strip()]

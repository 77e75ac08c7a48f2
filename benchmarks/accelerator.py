"""What does a budget cost on an accelerator beside what else saves memory, and what trains at all behind a wall?

A benchmark in three parts, for each model in one process:
  speed  step time at several shares of the activations, of our policies and of peers, each with its peak; all take
         turns, a step each, with an ordinary one in each round. A ratio is that of the least step of each kind.
  walls  the device made smaller (`set_per_process_memory_fraction` on CUDA): who trains three steps behind a wall of so
         many bytes, ordinary, with each peer, and with us.
  batch  the largest batch behind a wall, ordinary and with us, and the cost of a budget that never binds.
The allocator's segments grow for all (`delta_runtime/growing_segments.py`), as they do from the first runtime on.
Peers: torch.utils.checkpoint around every block; the same with the inputs of blocks in pinned host memory;
torch.autograd.graph.save_on_cpu with pinned memory. Exits 1 if a policy of ours fails, but for want of room behind a
wall, or if its peak is above its budget. Takes 1 to 3 minutes for each part and model on an H100-like card.
`--device fake` is the simulated accelerator of the tests with toy models: it shows that this script runs, and nothing
else. Without an accelerator it exits with an error.

    python -m benchmarks.accelerator speed --models resnet50,gpt2_medium,llama_1b,vit_large
        [--shares 0.7,0.5,0.3] [--rounds 5] [--device cuda] [--json FILE]
    python -m benchmarks.accelerator walls --walls 8GiB,16GiB,24GiB
    python -m benchmarks.accelerator batch --walls 8GiB
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import checkpoint

import delta_runtime as delta
from benchmarks.common import BLOCKS, console, machine, words, write_json
from delta_runtime.core.units import format_bytes, parse_bytes
from delta_runtime.growing_segments import let_segments_grow
from delta_runtime.report.step_report import StepTotals
from scripts.workloads import Batch, byte_windows, digit_images

OURS = ("recompute", "swap", "auto")
PEERS = ("checkpoint", "offloaded checkpoint", "save_on_cpu")
WALL_STEPS = 3
WARM_STEPS = 8
"""Steps before the first timed one: calibration, the last plan, and the plans that are tried after it."""
MOST_BATCH = 1 << 14
NO_ROOM = ("OutOfMemoryError", "BudgetInfeasible")
"""How a failure behind a wall begins that may be: nothing else may go wrong with us."""


# ------------------------------------------------------------------------------------------- devices


class Device:
    """The accelerator that everything runs on.

    Args:
        name: "cuda" or another device type of torch; "fake" for the simulated one.

    Raises:
        RuntimeError: there is none of that type.
    """

    def __init__(self, name: str) -> None:
        self._fake: Any = None
        if name == "fake":
            from tests.support import fake_accelerator

            self._fake = fake_accelerator.load()
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is None or current.type != name:
            raise RuntimeError(f"no {name} here; torch finds {current or 'no accelerator'}")
        self.torch = torch.device(name, 0)

    @property
    def simulated(self) -> bool:
        return self._fake is not None

    @contextlib.contextmanager
    def wall(self, wall_bytes: int) -> Iterator[None]:
        """Give the device so many bytes, what the allocator caches included."""
        free_memory()
        if self._fake is not None:
            self._fake.set_capacity(wall_bytes)
        else:
            total_bytes = torch.cuda.get_device_properties(self.torch).total_memory
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, wall_bytes / total_bytes), self.torch
            )
        try:
            yield
        finally:
            if self._fake is not None:
                self._fake.set_capacity(0)
            else:
                torch.cuda.set_per_process_memory_fraction(1.0, self.torch)

    def about(self) -> dict[str, Any]:
        """Return what a figure depends on: the card, its driver, and the versions of what drives it."""
        about = machine() | {"device": str(self.torch), "simulated": self.simulated}
        if self.torch.type == "cuda":
            properties = torch.cuda.get_device_properties(self.torch)
            about |= {
                "card": properties.name,
                "memory_bytes": properties.total_memory,
                "cuda": torch.version.cuda,
                "cudnn": torch.backends.cudnn.version(),
            }
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
                done = subprocess.run(query, capture_output=True, text=True, timeout=20)
                about["driver"] = done.stdout.strip()
        return about


def free_memory() -> None:
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


# -------------------------------------------------------------------------------------------- models


@dataclass(frozen=True, slots=True)
class Model:
    """A training job on the accelerator.

    Args:
        title: one line for people.
        build: -> the module, on torch's default device.
        batch: (index, batch size) -> one batch on the CPU.
        batch_size: of the speed and walls parts.
        dtype: of the weights.
        autocast: whether forward runs under bfloat16 autocast.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    batch_size: int
    dtype: torch.dtype = torch.float32
    autocast: bool = True


def _resnet(**sizes: Any) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=10, **sizes))


def _gpt2(**sizes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **sizes)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def _llama(**sizes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes))


def _vit(**sizes: Any) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_labels=10, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **sizes
    )
    return ViTForImageClassification(config)


def _pictures(pixels: int) -> Callable[[int, int], Batch]:
    return lambda index, size: digit_images(0, index, size, pixels)


def _bytes(length: int) -> Callable[[int, int], Batch]:
    return lambda index, size: byte_windows(0, index, size, length)


MODELS: dict[str, Model] = {
    "resnet50": Model("ResNet-50, 224 x 224", _resnet, _pictures(224), 128),
    "resnet101": Model(
        "ResNet-101, 224 x 224",
        functools.partial(_resnet, depths=[3, 4, 23, 3]),
        _pictures(224),
        128,
    ),
    "gpt2_medium": Model(
        "GPT-2 medium, 1,024 bytes",
        functools.partial(_gpt2, n_embd=1024, n_layer=24, n_head=16),
        _bytes(1024),
        8,
    ),
    "gpt2_large": Model(
        "GPT-2 large, 1,024 bytes",
        functools.partial(_gpt2, n_embd=1280, n_layer=36, n_head=20),
        _bytes(1024),
        4,
    ),
    "llama_1b": Model(
        "Llama 1B, 4,096 bytes, bfloat16",
        functools.partial(
            _llama,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=4096,
        ),
        _bytes(4096),
        2,
        torch.bfloat16,
        autocast=False,
    ),
    "vit_large": Model(
        "ViT-L/16, 224 x 224",
        functools.partial(
            _vit,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
        ),
        _pictures(224),
        64,
    ),
    "tiny_resnet": Model(
        "4 bottlenecks: to try the script with",
        functools.partial(_resnet, embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2]),
        _pictures(32),
        8,
        autocast=False,
    ),
    "tiny_gpt2": Model(
        "GPT-2 3 x 64: to try the script with",
        functools.partial(_gpt2, vocab_size=256, n_positions=64, n_embd=64, n_layer=3, n_head=2),
        _bytes(64),
        8,
    ),
}


class Job:
    """A model with its optimizer on the device, and its steps."""

    def __init__(self, device: Device, model: Model) -> None:
        torch.manual_seed(0)
        self.device = device.torch
        self.model = model
        with self.device:  # the CPU would take longer to fill a large model than it then trains
            module = model.build()
        self.module = module.train().to(self.device, model.dtype)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-5)
        self.index = 0

    def step(self, around: contextlib.AbstractContextManager[Any], batch_size: int) -> float:
        """Seconds of a whole step, the device's work included; forward and backward inside of `around`."""
        self.index += 1
        batch = self.model.batch(self.index, batch_size)
        there = {name: tensor.to(self.device) for name, tensor in batch.items()}
        gc.collect()
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        with around:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.model.autocast):
                loss = self.module(**there).loss
            loss.backward()
        del loss
        self.optimizer.step()
        torch.accelerator.synchronize()
        return time.perf_counter() - begin

    def recover(self) -> None:
        """After a step that ran out of memory."""
        self.optimizer.zero_grad(set_to_none=True)
        free_memory()


# ---------------------------------------------------------------------------------------- contenders


@contextlib.contextmanager
def offloaded_checkpoints(module: nn.Module) -> Iterator[None]:
    """Checkpoints every block and keeps the blocks' inputs, and nothing else, in pinned host memory.

    The reentrant kind: it saves its inputs through autograd, where hooks see them. What backward saves
    while it runs a block again is out of the hooks' reach.
    """
    blocks = [each for each in module.modules() if type(each).__name__ in BLOCKS_HERE]

    def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.save_on_cpu(pin_memory=True):
                return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=True)

        return run

    for block in blocks:
        block.forward = wrapped(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward  # the class's own is seen again


BLOCKS_HERE = (*BLOCKS, "LlamaDecoderLayer")


def peer(name: str, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Return what a step of a peer runs in."""
    from benchmarks.common import checkpointed

    if name == "checkpoint":
        return checkpointed(module, BLOCKS_HERE)
    if name == "offloaded checkpoint":
        return offloaded_checkpoints(module)
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


@dataclass(slots=True)
class Row:
    """One contender.

    Args:
        share: of the activations that the budget leaves; None where there is no budget.
        peak_bytes: the allocator's highest of all timed steps.
        replayed_ops, swapped_bytes: of the last timed step.
        failure: why it has no more steps; "" if it has.
    """

    model: str
    name: str
    share: float | None = None
    budget_bytes: int = 0
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    replayed_ops: int = 0
    swapped_bytes: int = 0
    failure: str = ""

    def take(self, last: StepTotals) -> None:
        self.replayed_ops = last.replayed_ops
        self.swapped_bytes = last.swapped_in_bytes


def inwords(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def attempt(row: Row, job: Job, run: Callable[[], None]) -> None:
    """Take a contender out that fails; the others go on."""
    try:
        run()
    except (torch.OutOfMemoryError, delta.DeltaError, RuntimeError) as error:
        row.failure = inwords(error)
    if row.failure:  # the error, and with it whoever holds the step's tensors, is gone by now
        job.recover()


# --------------------------------------------------------------------------------------------- speed


@dataclass(frozen=True, slots=True)
class Needs:
    """Of an ordinary step: its peak, and what autograd saves in it."""

    peak_bytes: int
    activation_bytes: int


def needs(job: Job, batch_size: int) -> Needs:
    """Run two ordinary steps, and one that is only observed."""
    for _ in range(2):
        torch.accelerator.reset_peak_memory_stats()
        job.step(contextlib.nullcontext(), batch_size)
    peak_bytes = torch.accelerator.max_memory_allocated()
    runtime = delta.Runtime(policy="off", device=str(job.device))
    job.step(runtime.step(), batch_size)
    activation_bytes = runtime.graph().activation_bytes
    runtime.close()
    return Needs(peak_bytes, activation_bytes)


def speed(device: Device, name: str, shares: list[float], rounds: int) -> list[Row]:
    """Time all contenders of one model, in turns."""
    job = Job(device, MODELS[name])
    size = job.model.batch_size
    need = needs(job, size)
    console.print(
        f"[bold]{job.model.title}[/], batch {size}: ordinary peak {format_bytes(need.peak_bytes)}, "
        f"activations {need.activation_bytes / need.peak_bytes:.1%} of it"
    )
    rows = [Row(name, "ordinary")] + [Row(name, each) for each in PEERS]
    runtimes: dict[int, delta.Runtime] = {}

    def warm(row: Row) -> None:
        runtimes[id(row)] = runtime = delta.Runtime(
            row.budget_bytes, device=str(job.device), policy=row.name
        )
        for _ in range(WARM_STEPS):
            job.step(runtime.step(), size)

    for share in shares:
        budget_bytes = need.peak_bytes - int((1 - share) * need.activation_bytes)
        for policy in OURS:
            row = Row(name, policy, share, budget_bytes)
            rows.append(row)
            attempt(row, job, functools.partial(warm, row))

    def around(row: Row) -> contextlib.AbstractContextManager[Any]:
        if id(row) in runtimes:
            return runtimes[id(row)].step()
        return contextlib.nullcontext() if row.name == "ordinary" else peer(row.name, job.module)

    def timed(row: Row) -> None:
        # Memory moves when another kind of step begins, which no training run does at each step.
        job.step(around(row), size)
        torch.accelerator.reset_peak_memory_stats()
        row.seconds.append(job.step(around(row), size))
        row.peak_bytes = max(row.peak_bytes, torch.accelerator.max_memory_allocated())
        if id(row) in runtimes:
            row.take(runtimes[id(row)].report().last)

    for _ in range(rounds):
        for row in rows:
            if not row.failure:
                attempt(row, job, functools.partial(timed, row))
    for runtime in runtimes.values():
        runtime.close()
    return rows


def show_speed(rows: list[Row]) -> None:
    table = Table(
        title="Step time over an ordinary step, least of all rounds", title_justify="left"
    )
    for heading in ("model", "", "% of act.", "ratio", "peak", "of budget", "ops again", "swapped"):
        table.add_column(heading, justify="left" if heading in ("model", "") else "right")
    ordinary = {
        row.model: min(row.seconds) for row in rows if row.name == "ordinary" and row.seconds
    }
    for row in rows:
        base = ordinary.get(row.model)
        ratio = f"{min(row.seconds) / base:.3f}" if row.seconds and base else row.failure[:40]
        table.add_row(
            row.model,
            row.name,
            "" if row.share is None else f"{row.share:.0%}",
            ratio,
            format_bytes(row.peak_bytes),
            f"{row.peak_bytes / row.budget_bytes:.3f}" if row.budget_bytes else "",
            f"{row.replayed_ops}" if row.budget_bytes else "",
            format_bytes(row.swapped_bytes) if row.budget_bytes else "",
        )
    Console(highlight=False, width=max(console.width, 140)).print(table)


# ------------------------------------------------------------------------------------ walls and batches


def _budget(wall_bytes: int) -> int:
    """Return what a user would ask for behind a wall: a twentieth of it for what the allocator cannot use."""
    return int(0.95 * wall_bytes)


def trains(device: Device, name: str, way: str, wall_bytes: int, batch_size: int) -> str:
    """Whether a fresh model trains a few steps behind a wall; "" or what failed.

    Args:
        way: "ordinary", a peer, or "delta".
    """
    free_memory()
    failure = ""
    with device.wall(wall_bytes):
        try:
            job = Job(device, MODELS[name])
            runtime = None
            if way == "delta":
                runtime = delta.Runtime(_budget(wall_bytes), device=str(job.device))
            for _ in range(WALL_STEPS):
                if runtime is not None:
                    around: Any = runtime.step()
                else:
                    around = (
                        contextlib.nullcontext() if way == "ordinary" else peer(way, job.module)
                    )
                job.step(around, batch_size)
            if runtime is not None:
                runtime.close()
        except (torch.OutOfMemoryError, delta.DeltaError, RuntimeError) as error:
            failure = inwords(error)
    job = runtime = None  # type: ignore[assignment]
    free_memory()
    return failure


def walls(device: Device, name: str, wall_bytes: list[int]) -> list[dict[str, Any]]:
    """Who trains behind each wall."""
    rows = []
    for each in wall_bytes:
        for way in ("ordinary", *PEERS, "delta"):
            failure = trains(device, name, way, each, MODELS[name].batch_size)
            rows.append({"model": name, "wall_bytes": each, "way": way, "failure": failure})
            console.print(
                f"  {name}, wall {format_bytes(each)}, {way}: {failure or 'trains'}", markup=False
            )
    return rows


def largest_batch(device: Device, name: str, way: str, wall_bytes: int, most: int) -> int:
    """Return the largest batch that trains, to an eighth; 0 if none does. None above `most` is tried."""
    fits, too_large = 0, 1
    while too_large <= most and not trains(device, name, way, wall_bytes, too_large):
        fits, too_large = too_large, 2 * too_large
    if too_large > most:
        return fits
    while fits and too_large - fits > max(1, fits // 8):
        middle = (fits + too_large) // 2
        if trains(device, name, way, wall_bytes, middle):
            too_large = middle
        else:
            fits = middle
    return fits


def batch(
    device: Device, name: str, wall_bytes: list[int], rounds: int, most: int
) -> list[dict[str, Any]]:
    """Largest batches, and what a budget costs that never binds."""
    rows = []
    for each in wall_bytes:
        ordinary, ours = (
            largest_batch(device, name, way, each, most) for way in ("ordinary", "delta")
        )
        rows.append(
            {"model": name, "wall_bytes": each, "ordinary_batch": ordinary, "delta_batch": ours}
        )
        console.print(
            f"  {name}, wall {format_bytes(each)}: batch {ordinary} ordinary, {ours} with us"
        )
    job = Job(device, MODELS[name])
    runtime = delta.Runtime("100%", device=str(job.device))
    plain, observed = [], []
    for index in range(rounds + WARM_STEPS):
        pair = [job.step(contextlib.nullcontext(), job.model.batch_size)]
        pair.append(job.step(runtime.step(), job.model.batch_size))
        if index >= WARM_STEPS:
            plain.append(pair[0])
            observed.append(pair[1])
    runtime.close()
    ratio = min(observed) / min(plain)
    rows.append(
        {"model": name, "never_binds_ratio": ratio, "ordinary_s": plain, "delta_s": observed}
    )
    console.print(f"  {name}: a budget that never binds: step time x {ratio:.4f}")
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["speed", "walls", "batch"])
    parser.add_argument(
        "--models", type=words, default=["resnet50", "gpt2_medium", "llama_1b", "vit_large"]
    )
    parser.add_argument(
        "--shares", type=lambda text: [float(w) for w in words(text)], default=[0.7, 0.5, 0.3]
    )
    parser.add_argument(
        "--walls",
        type=lambda text: [parse_bytes(w) for w in words(text)],
        default=[parse_bytes(text) for text in ("8GiB", "16GiB", "24GiB")],
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each contender")
    parser.add_argument("--most", type=int, default=MOST_BATCH, help="largest batch tried")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    for name in arguments.models:
        if name not in MODELS:
            parser.error(f"--models: {name!r} is none of {', '.join(MODELS)}")
    try:
        device = Device(arguments.device)
    except RuntimeError as error:
        parser.exit(2, f"{error}\n")
    let_segments_grow(device.torch)
    results: list[Any] = []
    for name in arguments.models:
        if arguments.part == "speed":
            results += speed(device, name, arguments.shares, arguments.rounds)
        elif arguments.part == "walls":
            results += walls(device, name, arguments.walls)
        else:
            results += batch(device, name, arguments.walls, arguments.rounds, arguments.most)
        free_memory()
        rows = [asdict(each) if isinstance(each, Row) else each for each in results]
        write_json(arguments.json, {"about": device.about(), "rows": rows})
    bad: list[str] = []
    if arguments.part == "speed":
        show_speed(results)
        for row in (each for each in results if each.budget_bytes):
            if row.failure or row.peak_bytes > row.budget_bytes:
                bad.append(
                    f"{row.model}, {row.name}, {row.share:.0%}: "
                    + (row.failure or "its peak is above the budget")
                )
    elif arguments.part == "walls":
        bad = [
            f"{each['model']}, wall {format_bytes(each['wall_bytes'])}: {each['failure']}"
            for each in results
            if each["way"] == "delta"
            and each["failure"]
            and not each["failure"].startswith(NO_ROOM)
        ]
    for line in bad:
        console.print(line, markup=False, style="bold red")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

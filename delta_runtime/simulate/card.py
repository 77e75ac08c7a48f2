"""Devices as data: what they hold, how fast they compute and copy; and how long a step takes on one.

The files lie in cards/, each with its sources. Seconds of an op are those of the roofline (Williams, Waterman and
Patterson, CACM 2009): what its operations take or what its bytes take, whichever is more, and never less than it takes
to launch it. That is an estimate; `Reach` says what is assumed, and between what it may lie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from delta_runtime.core.errors import UsageError
from delta_runtime.core.step_graph import Floats, Ints, RecordedOn, StepGraph
from delta_runtime.core.transfer import Links

FOLDER = Path(__file__).resolve().parent / "cards"
_COMPLEX = MappingProxyType({"complex64": "float32", "complex128": "float64"})


@dataclass(frozen=True, slots=True)
class Reach:
    """Which share of a card's nominal rates ops reach, and how long it takes to launch one.

    Args:
        flops: of the rate of products.
        bytes: of the memory's bandwidth.
        launch: times the card's seconds for one op.
    """

    flops: float
    bytes: float
    launch: float


LIKELY = Reach(flops=0.65, bytes=0.8, launch=1.0)
"""What `on_card` assumes: large products of half precision reach 60 to 75 % on cards of today, copies 80 to 90 %."""
FAST, SLOW = Reach(0.9, 0.95, 0.7), Reach(0.4, 0.55, 1.5)
"""Between what the truth may be expected."""


@dataclass(frozen=True, slots=True)
class Card:
    """A device that steps may be imagined on.

    Args:
        title: its name in full.
        memory_bytes: of the device.
        usable_share: of that, which tensors can have.
        flops_per_s: nominal rate of products, by dtype; "tf32" is that of convolutions in float32.
        bytes_per_s: nominal bandwidth of its memory.
        out_bytes_per_s, in_bytes_per_s: what copies to host memory and back reach.
        launch_s: of the host, for one op.
        sources: where the figures are from.
        device: of PyTorch; the CPU's allocator rounds in its own way.
    """

    title: str
    memory_bytes: int
    usable_share: float
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float
    launch_s: float
    sources: Mapping[str, str]
    device: str = "cuda"

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors can have."""
        return int(self.memory_bytes * self.usable_share)

    @property
    def links(self) -> Links:
        """Speed of its lanes."""
        return Links(self.out_bytes_per_s, self.in_bytes_per_s)

    def rate(self, dtype: str) -> float:
        """Return the nominal rate of products in a dtype; of one that it has no rate for, that of float32."""
        if dtype in _COMPLEX:  # a multiplication is four, with two additions
            return self.rate(_COMPLEX[dtype]) / 4
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


def names() -> list[str]:
    """Return the names of the cards that there are files for."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load_card(name: str) -> Card:
    """Return a card: by its name, or from a file of one's own (a path that ends with .json).

    Raises:
        UsageError: there is no such card, or the file is not one.
    """
    path = Path(name) if name.endswith(".json") else FOLDER / f"{name.lower()}.json"
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        card = Card(**told)
        _check(card)
    except OSError as error:
        raise UsageError(
            f"There is no card {name!r}.",
            change=f"Choose among {', '.join(names())}, or give a file like theirs.",
        ) from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"{str(path)!r} is not a card.", found=str(error)) from error
    return card


def _check(card: Card) -> None:
    if "float32" not in card.flops_per_s:
        raise ValueError("flops_per_s has no rate of float32")
    numbers: dict[str, Any] = {
        each.name: getattr(card, each.name)
        for each in fields(card)
        if each.name not in ("title", "flops_per_s", "sources", "device")
    }
    numbers |= {f"flops_per_s of {dtype}": rate for dtype, rate in card.flops_per_s.items()}
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(f"{name} is no number")
        if not 0 < number < float("inf"):
            raise ValueError(f"{name} is not above 0, and finite")
    if card.device not in ("cpu", "cuda"):
        raise ValueError("device is neither cpu nor cuda")
    if card.usable_share > 1:
        raise ValueError("usable_share is above 1")


def op_seconds(
    graph: StepGraph, card: Card, reach: Reach = LIKELY, measured: StepGraph | None = None
) -> Floats:
    """Return the seconds that each op of a step takes on a card.

    Args:
        graph: the step.
        card: the card.
        reach: what is assumed of ops that were not measured.
        measured: a record that was made on the card, of the same model with a smaller batch, say. Ops take so many
            times what the roofline says as those of their name took there; others, as all did together.

    Raises:
        UsageError: a record does not say what its ops have to do.
    """
    seconds = _roofline(graph, card, reach)
    if measured is None:
        return seconds
    there = _roofline(measured, card, LIKELY)
    whole = measured.seconds / max(float(there.sum()), 1e-12)
    of_name: dict[str, list[float]] = {}
    for name, took_s, said_s in zip(
        measured.op_name, measured.op_seconds.tolist(), there.tolist(), strict=True
    ):
        both = of_name.setdefault(name, [0.0, 0.0])
        both[0] += took_s
        both[1] += said_s
    times = {name: took_s / said_s for name, (took_s, said_s) in of_name.items()}
    ratio = np.array([times.get(name, whole) for name in graph.op_name])
    said: Floats = _roofline(graph, card, LIKELY) * ratio
    return said


def _watermarks(graph: StepGraph, measured: StepGraph | None) -> Ints:
    own = graph.op_watermark_bytes
    if measured is None or graph.work is None or measured.work is None:
        return own
    n = min(
        graph.n_ops, measured.n_ops
    )  # of what follows backward (an optimizer) one may have less
    if graph.op_name[:n] != measured.op_name[:n]:
        return own
    moved, moved_there = graph.work.moved_bytes[:n], measured.work.moved_bytes[:n]
    seen = measured.op_watermark_bytes[:n] * (moved / np.maximum(moved_there, 1))
    return np.append(np.maximum(own[:n], seen.astype(np.int64)), own[n:])


def _roofline(graph: StepGraph, card: Card, reach: Reach) -> Floats:
    work = graph.work
    if work is None:
        raise UsageError(
            "This record does not say what its ops have to do.",
            change="Record the step again with this version of delta_runtime; a contracted step never says it.",
        )
    rates = {dtype: card.rate(dtype) for dtype in set(work.dtype) - {""}}
    rate = np.array([rates.get(dtype, np.inf) for dtype in work.dtype])
    in_tf32 = np.array(
        [
            dtype == "float32" and "convolution" in name
            for dtype, name in zip(work.dtype, graph.op_name, strict=True)
        ],
        bool,
    )
    rate[in_tf32] = card.rate("tf32")
    computing = work.flops / (rate * reach.flops)
    moving = work.moved_bytes / (card.bytes_per_s * reach.bytes)
    seconds: Floats = np.maximum(np.maximum(computing, moving), card.launch_s * reach.launch)
    return seconds


def on_card(
    graph: StepGraph, card: Card, reach: Reach = LIKELY, measured: StepGraph | None = None
) -> StepGraph:
    """Return the step with the seconds that it would take on a card, and the speed of its lanes.

    Bytes are those of the record; what an op needs while it runs (workspaces) may be another amount on the card. Where
    `measured` is a record of the same ops, they need what was seen there, in the measure of the bytes that they move.
    Arguments are those of `op_seconds`.

    Raises:
        UsageError: the record does not say what its ops have to do.
    """
    return replace(
        graph,
        op_seconds=op_seconds(graph, card, reach, measured),
        op_replay_seconds=np.full(graph.n_ops, np.nan),
        op_watermark_bytes=_watermarks(graph, measured),
        recorded_on=RecordedOn(
            device=card.device,
            threads=1,
            torch=graph.recorded_on.torch if graph.recorded_on is not None else "",
            out_bytes_per_s=card.out_bytes_per_s,
            in_bytes_per_s=card.in_bytes_per_s,
        ),
    )

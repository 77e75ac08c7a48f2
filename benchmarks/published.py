"""Estimates of LoRA fine-tuning at 7B beside what others measured and published.

A benchmark without a clock: steps of the published sizes are recorded dry. Two sources, both on A100 cards: LitGPT's
resource tables (Llama 2 7B, without checkpointing) and the README of Qwen (Qwen-7B, with checkpointing, whose steps
accumulate 8 times). What a library has of its own (other kernels, casts of its own, the CUDA context, fragments) is in
the published figures alone. Takes a minute; needs no GPU, but transformers and peft.

    python -m benchmarks.published [--docs docs/estimates.md] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.common import console, machine, write_docs, write_json
from delta_runtime.dry_step import record_dry_step
from delta_runtime.simulate.card import FAST, LIKELY, SLOW, load_card, op_seconds
from scripts.card_models import Step, llama_lora

_ATTENTION = ("q_proj", "v_proj")
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_GB = 1e9
_ACCUMULATED = 8
LITGPT = "https://github.com/Lightning-AI/litgpt/blob/main/tutorials/resource-tables.md"
QWEN = "https://github.com/QwenLM/Qwen#profiling-of-memory-and-speed"


@dataclass(frozen=True, slots=True)
class Row:
    """One published figure, and what is estimated.

    Args:
        source: where it was published.
        text: of what.
        published_gb: memory, in 10^9 bytes.
        told_gb: highest live bytes of a step, in the same unit.
        published_s: seconds of one forward and backward; None where none were published.
        told_s: the same, estimated: likely, and between what it may lie.
        record_s: that the recording took, building the model included.
    """

    source: str
    text: str
    published_gb: float
    told_gb: float
    published_s: float | None
    told_s: tuple[float, float, float]
    record_s: float


def litgpt(batch: int, published_gb: float) -> Row:
    """Llama 2 7B with LoRA of rank 8 on queries and values, at the longest example of Alpaca."""
    build = llama_lora(batch=batch, tokens=1304, rank=8, targets=_ATTENTION, dropout=0.05)
    text = f"Llama 2 7B, {batch} x 1,304 tokens, no checkpointing"
    return _row(LITGPT, text, "a100", build, published_gb, None)


def qwen(tokens: int, published_gb: float, published_s: float) -> Row:
    """Return a row of a Llama of Qwen-7B's sizes, with LoRA of rank 64 on all products and checkpointing."""
    build = llama_lora(
        batch=1,
        tokens=tokens,
        rank=64,
        targets=_ALL,
        dropout=0.05,
        checkpointing=True,
        vocabulary=151_936,
    )
    text = f"Qwen 7B, 1 x {tokens:,} tokens, checkpointing"
    return _row(QWEN, text, "a100-80gb", build, published_gb, published_s / _ACCUMULATED)


def _row(
    source: str,
    text: str,
    card_name: str,
    build: Callable[[], Step],
    published_gb: float,
    published_s: float | None,
) -> Row:
    begin = time.perf_counter()
    dry = record_dry_step(build)
    record_s = time.perf_counter() - begin
    card = load_card(card_name)
    work = dry.graph
    likely, least, most = (
        float(op_seconds(work, card, each).sum()) for each in (LIKELY, FAST, SLOW)
    )
    return Row(
        source,
        text,
        published_gb,
        dry.graph.peak_bytes / _GB,
        published_s,
        (likely, least, most),
        record_s,
    )


def table(rows: list[Row]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [
        "| step | memory published | live bytes, estimated | forward and backward published | estimated |",
        "|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        name = "LitGPT" if row.source == LITGPT else "Qwen"
        likely, least, most = row.told_s
        published = "" if row.published_s is None else f"{row.published_s:.2f} s"
        lines.append(
            f"| {row.text} ([{name}]({row.source})) | {row.published_gb:.1f} GB | {row.told_gb:.1f} GB "
            f"({row.told_gb / row.published_gb - 1:+.0%}) | {published} | {likely:.2f} s ({least:.2f} to {most:.2f}) |"
        )
    return lines


def main() -> int:
    """Record, and show beside the published figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    rows = [litgpt(1, 21.30), litgpt(2, 29.07)]
    for tokens, gb, seconds in (
        (256, 20.1, 1.2),
        (512, 20.4, 1.5),
        (1024, 21.5, 2.8),
        (2048, 23.8, 5.2),
        (4096, 29.7, 10.1),
        (8192, 36.6, 21.3),
    ):
        rows.append(qwen(tokens, gb, seconds))
    console.print("\n".join(table(rows)))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    console.print(
        f"Recorded in at most {max(row.record_s for row in rows):.1f} s each; this process held at most "
        f"{most / _GB:.2f} GB."
    )
    write_json(options.json, {"machine": machine(), "rows": [asdict(row) for row in rows]})
    write_docs(options.docs, {"published": table(rows)})
    return 0


if __name__ == "__main__":
    sys.exit(main())

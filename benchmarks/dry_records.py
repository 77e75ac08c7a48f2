"""How far is the record of a dry step from that of a real one, and by which ops?

A benchmark without a clock. Each model of tests/zoo takes one real step and one dry one. Compared are the ops, the
bytes that autograd saves, the highest live bytes, and what each kind of op holds while it runs. What a dry op holds is
its results; a kernel's workspace is not among them. Takes about a minute; needs no GPU. Exits 1 where saved bytes
differ without that being known, or a peak is off by more than 5 %.

    python -m benchmarks.dry_records [--models resnet,gpt2_sdpa,...] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

import delta_runtime as delta
import tests.zoo.test_zoo  # noqa: F401 - fills the zoo
from benchmarks.common import console, machine, words, write_json
from delta_runtime import cpu_pool
from delta_runtime.core.errors import NeedsValues
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.units import format_bytes
from delta_runtime.record.dry_run import dry_run
from tests.zoo.registry import ZOO

KNOWN = ("lstm",)
"""Models with an op that saves a workspace whose size only its kernel knows."""
_MOST_PEAK_ERROR = 0.05
_LITTLE_BYTES = 4096  # less is rounding of the allocator


@dataclass(frozen=True, slots=True)
class Row:
    """One model.

    Args:
        model: its name.
        why_not: why there is no dry record; "" where there is one.
        same_ops: whether the same ops ran, in the same order.
        saved_bytes, dry_saved_bytes: what autograd saved.
        peak_bytes, dry_peak_bytes: highest live bytes.
    """

    model: str
    why_not: str = ""
    same_ops: bool = False
    saved_bytes: int = 0
    dry_saved_bytes: int = 0
    peak_bytes: int = 0
    dry_peak_bytes: int = 0

    @property
    def holds(self) -> bool:
        """Whether all is as it should be, or known not to be."""
        close = abs(self.dry_peak_bytes / max(self.peak_bytes, 1) - 1) <= _MOST_PEAK_ERROR
        same = self.same_ops and self.saved_bytes == self.dry_saved_bytes
        return bool(self.why_not) or self.model in KNOWN or (same and close)


def record(model: str, *, dry: bool) -> StepGraph:
    """Return the record of a step of a model."""
    built = ZOO[model].build()
    runtime = delta.Runtime(policy="off", device="cpu")
    with dry_run() if dry else contextlib.nullcontext(), runtime:
        built.loss(built.batch(0)).backward()
    graph = runtime.graph()
    runtime.close()
    return graph


def compare(model: str, missing: dict[str, list[int]]) -> Row:
    """Compare two records; bytes that ops of a name held more than a dry one are added to `missing`."""
    real = record(model, dry=False)
    try:
        dry = record(model, dry=True)
    except NeedsValues as error:
        return Row(model, why_not=str(error).splitlines()[0])
    same = real.op_name == dry.op_name
    if same:
        more = real.op_watermark_bytes - dry.op_watermark_bytes
        for name, bytes_, of in zip(
            real.op_name, more.tolist(), real.op_watermark_bytes.tolist(), strict=True
        ):
            if bytes_ > _LITTLE_BYTES:
                missing.setdefault(name, []).append(round(100 * bytes_ / of))
    return Row(
        model,
        same_ops=same,
        saved_bytes=real.activation_bytes,
        dry_saved_bytes=dry.activation_bytes,
        peak_bytes=real.peak_bytes,
        dry_peak_bytes=dry.peak_bytes,
    )


def show(rows: list[Row], missing: dict[str, list[int]]) -> None:
    """Print the tables."""
    table = Table(padding=(0, 0, 0, 1))
    for name in ("model", "same ops", "saved", "dry", "peak", "dry", "off by"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for row in rows:
        if row.why_not:
            table.add_row(row.model, "needs values")
            continue
        table.add_row(
            row.model,
            "yes" if row.same_ops else "no",
            format_bytes(row.saved_bytes),
            "the same"
            if row.saved_bytes == row.dry_saved_bytes
            else format_bytes(row.dry_saved_bytes),
            format_bytes(row.peak_bytes),
            format_bytes(row.dry_peak_bytes),
            f"{row.dry_peak_bytes / row.peak_bytes - 1:+.1%}",
        )
    console.print(table)
    by_op = Table(title="Ops that hold a workspace beside their results", padding=(0, 0, 0, 1))
    for name in ("op", "of them", "workspace: % of what they hold, middle and most"):
        by_op.add_column(name, justify="left" if name == "op" else "right")
    for op, shares in sorted(missing.items(), key=lambda item: -len(item[1])):
        middle = sorted(shares)[len(shares) // 2]
        by_op.add_row(op, str(len(shares)), f"{middle} {max(shares)}")
    console.print(by_op)
    for row in rows:
        if row.why_not:
            console.print(f"{row.model}: {row.why_not}")


def main() -> int:
    """Record, compare and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=words, default=list(ZOO))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cpu_pool.install()
    missing: dict[str, list[int]] = {}
    rows = [compare(model, missing) for model in options.models]
    show(rows, missing)
    write_json(
        options.json,
        {"machine": machine(), "rows": [asdict(row) for row in rows], "workspaces": missing},
    )
    wrong = [row.model for row in rows if not row.holds]
    console.print(f"Not as it should be: {', '.join(wrong)}." if wrong else "All as it should be.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

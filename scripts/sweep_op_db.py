"""Do gradients of all of PyTorch's ops and modules have the same bits when what autograd saved is dropped and rebuilt?

Runs every row (op x function or in-place variant) of op_db in float64, float32, complex128 and bfloat16, and every
module of module_db in float64 and float32, with all their sample inputs, under drop-everything and under a seeded
random choice. Prints a table and all failures; exits 1 if there is one. A stress run, not a benchmark.
Takes about 10 minutes on one core, 1 minute with --samples 3. Needs no GPU.

    python scripts/sweep_op_db.py [--dtypes float64 ...] [--modes drop_all random] [--samples N] [--only TEXT]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.sweeps.rows import Outcome, Result, Row, failures, module_rows, op_rows, run_row

DTYPES = {
    "op_db": ("float64", "float32", "complex128", "bfloat16"),
    "module_db": ("float64", "float32"),
}
SHOWN = (
    Outcome.REBUILT,
    Outcome.NOTHING_TO_REBUILD,
    Outcome.NO_SAMPLE,
    Outcome.NOT_REPEATABLE,
    Outcome.MISMATCH,
    Outcome.ERROR,
)


def sweep(rows: list[Row], mode: str, samples: int, label: str) -> dict[str, Result]:
    """Run all rows and shows how far it is where a terminal watches."""
    results = {}
    for index, row in enumerate(rows):
        if sys.stderr.isatty():
            print(f"\r{label} {index + 1}/{len(rows)} {row.name:60.60}", end="", file=sys.stderr)
        results[row.name] = run_row(row, mode, samples)
    if sys.stderr.isatty():
        print("\r" + " " * 120 + "\r", end="", file=sys.stderr)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES["op_db"]))
    parser.add_argument("--modes", nargs="+", default=["drop_all", "random"])
    parser.add_argument("--samples", type=int, default=1_000_000, help="most samples of a row")
    parser.add_argument("--only", default="", help="rows whose name has this text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    print(f"{'':44}" + "".join(f"{outcome.name.lower():>19}" for outcome in SHOWN) + "   seconds")
    messages = []
    for database, make in (("op_db", op_rows), ("module_db", module_rows)):
        for name in arguments.dtypes:
            if name not in DTYPES[database]:
                continue
            rows = [row for row in make(getattr(torch, name)) if arguments.only in row.name]
            for mode in arguments.modes:
                label = f"{database} {name} {mode}, {len(rows)} rows"
                begin = time.perf_counter()
                results = sweep(rows, mode, arguments.samples, label)
                counts = Counter(result.outcome for result in results.values())
                print(
                    f"{label:44}"
                    + "".join(f"{counts[outcome]:19}" for outcome in SHOWN)
                    + f"{time.perf_counter() - begin:10.0f}",
                    flush=True,
                )
                if message := failures(results):
                    messages.append(f"{label}: {message}")
    print("\n".join(messages) or "no mismatch")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())

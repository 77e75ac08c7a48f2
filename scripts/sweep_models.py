"""Do real models train inside a budget with the same numbers, bit for bit?

Trains every model of tests/zoo for three steps at 80, 60 and 40 % of its ordinary peak, with and without bfloat16
autocast, with AdamW and with SGD, and compares losses, gradients and random state of each step and parameters and
buffers at the end with an ordinary run. Prints a table; exits 1 on a mismatch. A stress run, not a benchmark.
Takes about 3 minutes on one core. Needs no GPU.

    python scripts/sweep_models.py [--only NAME ...] [--budgets 0.8 0.6 0.4] [--steps 3]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.support.bitwise import difference
from tests.support.training import Recipe, train
from tests.zoo import ZOO


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.8, 0.6, 0.4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)

    print(
        f"seed {arguments.seed}; {len(arguments.only)} models; peaks in MB above what lived before"
    )
    print(f"{'model':30}{'optimizer':10}{'autocast':9}{'ordinary':>9}{'budget':>9}{'peak':>9}{'':>6}"
          f"{'rebuilt':>9}  result")  # fmt: skip
    wrong = over = idle = runs = 0
    begin = time.perf_counter()
    for name, autocast, optimizer in itertools.product(
        arguments.only, (False, True), ("adamw", "sgd")
    ):
        recipe = Recipe(arguments.steps, optimizer, autocast, arguments.seed)
        ordinary = train(ZOO[name], recipe)
        ordinary_bytes = ordinary.peak_bytes - ordinary.base_bytes
        for share in arguments.budgets:
            runs += 1
            budget = ordinary.budget_bytes(share)
            row = (
                f"{name:30}{optimizer:10}{'bf16' if autocast else '-':9}{ordinary_bytes / 1e6:9.2f}"
            )
            try:
                inside = train(ZOO[name], recipe, "budget", budget_bytes=budget)
            except Exception:
                wrong += 1
                print(f"{row}  ERROR at {share:.0%}\n{traceback.format_exc(limit=-3)}", flush=True)
                continue
            inside_bytes = inside.peak_bytes - inside.base_bytes
            found = difference(inside.snapshot, ordinary.snapshot)
            notes = []
            if found:
                wrong += 1
                notes.append(f"MISMATCH {found}")
            if inside.peak_bytes > budget:
                over += 1
                notes.append("over budget")
            if not inside.probe.rebuilt:
                idle += 1
                notes.append("nothing rebuilt")
            print(
                f"{row}{share * ordinary_bytes / 1e6:9.2f}{inside_bytes / 1e6:9.2f}"
                f"{inside_bytes / ordinary_bytes:6.0%}{inside.probe.rebuilt:9}  "
                f"{'; '.join(notes) or 'same bits'}",
                flush=True,
            )
    print(
        f"{runs} runs in {time.perf_counter() - begin:.0f} s: {wrong} mismatches or errors, "
        f"{idle} with nothing rebuilt, {over} over their budget"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

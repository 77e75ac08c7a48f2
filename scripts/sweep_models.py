"""Do real models train inside a budget, or with everything evicted, with the same numbers, bit for bit?

Trains every model of tests/zoo for three steps, with and without bfloat16 autocast, with AdamW and with SGD, and
compares losses, gradients and random state of each step and parameters and buffers at the end with an ordinary run.
Mode "budget" (the default) is policy "recompute" at 80, 60 and 40 % of the ordinary peak; "drop_all", "swap_all",
"disk_all" and "mix" drop everything, swap everything to host memory or to disk, or do either at random. Prints a table;
exits 1 on a mismatch, an error, or with nothing compared. A stress run, not a benchmark. Takes about 3 minutes on one
core. Needs no GPU; DELTA_TEST_DEVICE=fake or cuda takes the simulated accelerator or a card instead of the CPU, and
leaves out models whose ordinary run does not repeat on a card.

    python scripts/sweep_models.py [--only NAME ...] [--modes budget drop_all swap_all disk_all mix]
        [--budgets 0.8 0.6 0.4] [--steps 3] [--seed 0]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
import warnings
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tests.support.bitwise import difference
from tests.support.device import TYPE
from tests.support.training import Recipe, Run, train
from tests.zoo import ZOO

MODES = ("budget", "drop_all", "swap_all", "disk_all", "mix")


def ordinary_run(name: str, recipe: Recipe) -> Run | str:
    """Return an ordinary run, or why there is none to compare with; on the CPU there always is one.

    Raises:
        RuntimeError: there should be one: all models repeat on the CPU and on the simulated accelerator.
    """
    if TYPE == "cpu":
        return train(ZOO[name], recipe)
    first, again = train(ZOO[name], recipe), train(ZOO[name], recipe)
    found = difference(again.snapshot, first.snapshot)
    if found and TYPE == "fake":
        raise RuntimeError(f"{name} by itself: {found}")
    return f"does not repeat by itself: {found}" if found else first


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(ZOO), default=list(ZOO))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["budget"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.8, 0.6, 0.4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)

    places = [
        (mode, share)
        for mode in arguments.modes
        for share in (arguments.budgets if mode == "budget" else [None])
    ]
    print(
        f"device {TYPE}; seed {arguments.seed}; {len(arguments.only)} models; "
        "peaks in MB above what lived before"
    )
    print(f"{'model':30}{'optimizer':10}{'autocast':9}{'mode':9}{'ordinary':>9}{'budget':>9}{'peak':>9}{'':>6}"
          f"{'rebuilt':>9}  result")  # fmt: skip
    wrong = over = idle = runs = left_out = 0
    begin = time.perf_counter()
    for name, autocast, optimizer in itertools.product(
        arguments.only, (False, True), ("adamw", "sgd")
    ):
        recipe = Recipe(arguments.steps, optimizer, autocast, arguments.seed)
        head = f"{name:30}{optimizer:10}{'bf16' if autocast else '-':9}"
        try:
            ordinary = ordinary_run(name, recipe)
        except Exception:
            wrong += 1
            print(f"{head}  ORDINARY RUN FAILED\n{traceback.format_exc(limit=-3)}", flush=True)
            continue
        if isinstance(ordinary, str):
            left_out += 1
            print(f"{head}  {ordinary}", flush=True)
            continue
        ordinary_bytes = ordinary.peak_bytes - ordinary.base_bytes
        for mode, share in places:
            runs += 1
            budget = None if share is None else ordinary.budget_bytes(share)
            row = f"{head}{mode:9}{ordinary_bytes / 1e6:9.2f}"
            seed = zlib.crc32(f"{arguments.seed} {head} {mode}".encode())
            try:
                inside = train(ZOO[name], recipe, mode, managed_seed=seed, budget_bytes=budget)
            except Exception:
                wrong += 1
                print(
                    f"{row}  ERROR at {share or mode}\n{traceback.format_exc(limit=-3)}", flush=True
                )
                continue
            inside_bytes = inside.peak_bytes - inside.base_bytes
            found = difference(inside.snapshot, ordinary.snapshot)
            notes = []
            if found:
                wrong += 1
                notes.append(f"MISMATCH {found}")
            if budget is not None and inside.peak_bytes > budget:
                over += 1
                notes.append("over budget")
            if not inside.probe.rebuilt:
                idle += 1
                notes.append("nothing rebuilt")
            print(
                f"{row}{'-' if share is None else f'{share * ordinary_bytes / 1e6:.2f}':>9}"
                f"{inside_bytes / 1e6:9.2f}{inside_bytes / ordinary_bytes:6.0%}"
                f"{inside.probe.rebuilt:9}  {'; '.join(notes) or 'same bits'}",
                flush=True,
            )
    print(
        f"{runs} runs in {time.perf_counter() - begin:.0f} s: {wrong} mismatches or errors, "
        f"{idle} with nothing rebuilt, {over} over their budget; "
        f"{left_out} of {4 * len(arguments.only)} recipes without a run to compare with"
    )
    return 1 if wrong or not runs else 0


if __name__ == "__main__":
    sys.exit(main())

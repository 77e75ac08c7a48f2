"""How much dearer have training steps become? The models of scripts/workloads.py in two trees, in turns.

Each tree trains in a process of its own, with the budget at the same share of the activations, and the processes take
turns: while one runs its steps, the other waits. Steady steps: after some to warm up, each turn runs a few and counts
the shortest. First steps: each turn is a new process, whose first two steps are counted together. Takes about
20 minutes on two idle cores; needs no GPU. Both trees have their extension built, for the same PyTorch.

    python -m benchmarks.compare_trees BASE [TREE] [--models resnet50,gpt,vit] [--what steady,first] [--rounds 10]
        [--share 0.5] [--json FILE]

Printed are the medians of TREE's seconds over BASE's, turn by turn, with an interval that holds the true median at 95 %
or more (order statistics; David and Nagaraja, Order Statistics, 7.1), or all of the range where there are fewer than
six rounds. TREE is this one where it is not named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parents[1]
WARM_UP = 16
"""Steps that calibrate, and that try plans, before steps are called steady."""
STEPS_IN_TURN = 3
WHAT = ("steady", "first")


class Trainer:
    """A model that a process of its own trains with one tree's code.

    Args:
        tree: the project's folder, built.
        model: one of BENCH_WORKLOADS of benchmarks/common.py.
        share: of the activations, that the budget leaves.
    """

    def __init__(self, tree: Path, model: str, share: float) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("DELTA_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--train", model, "--share", str(share), str(tree)],
            env={**inherited, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()  # it is ready

    def _answer(self) -> list[float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args}: exit status {self._process.wait()}")
        answer: list[float] = json.loads(line)
        return answer

    def train(self, steps: int) -> list[float]:
        """Run steps, and return the seconds of each.

        Raises:
            RuntimeError: the process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def train(tree: str, model: str, share: float) -> None:
    """In a process of its own: train as many steps as each line of stdin says, and print their seconds."""
    import torch

    import delta_runtime as delta
    from delta_runtime import cpu_pool

    try:
        from benchmarks import common
    except ImportError:  # a tree from before there was this folder
        from scripts import bench_recompute as common

    assert Path(delta.__file__).is_relative_to(tree), delta.__file__
    torch.set_num_threads(os.cpu_count() or 1)
    cpu_pool.install()
    state = common.BENCH_WORKLOADS[model].build(common.SEED)
    runtime = delta.Runtime(common.measure(state).budget_bytes(share), device="cpu")
    print([], flush=True)
    index = 0
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            batch = state.batch(index)
            begin = time.perf_counter()
            common.train_step(state, batch, runtime)
            seconds.append(time.perf_counter() - begin)
            index += 1
        print(json.dumps(seconds), flush=True)


def interval(numbers: Sequence[float]) -> tuple[float, float]:
    """Return the narrowest two of the numbers, as far from either end, that hold the median at 95 % or more.

    Fewer than six cannot: the least and the greatest of them.
    """
    n, ranked = len(numbers), sorted(numbers)
    rank = 1
    while 2 * sum(math.comb(n, i) for i in range(rank + 1)) <= 0.05 * 2**n:
        rank += 1
    return ranked[rank - 1], ranked[n - rank]


def steady(trees: Sequence[Path], model: str, share: float, rounds: int) -> list[list[float]]:
    """Of each round, the seconds of a steady step in each tree."""
    trainers = [Trainer(tree, model, share) for tree in trees]
    try:
        for trainer in trainers:
            trainer.train(WARM_UP)
        return [[min(each.train(STEPS_IN_TURN)) for each in trainers] for _ in range(rounds)]
    finally:
        for trainer in trainers:
            trainer.close()


def first(trees: Sequence[Path], model: str, share: float, rounds: int) -> list[list[float]]:
    """Of each round, the seconds of a process's first two steps in each tree."""
    result = []
    for _ in range(rounds):
        result.append([])
        for tree in trees:
            trainer = Trainer(tree, model, share)
            try:
                result[-1].append(sum(trainer.train(2)))
            finally:
                trainer.close()
    return result


def main() -> None:
    """Print a line for each model and kind of step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="+", type=Path, metavar="TREE")
    parser.add_argument("--models", default="resnet50,gpt,vit", help="of benchmarks/common.py")
    parser.add_argument("--what", default=",".join(WHAT), help="of " + ", ".join(WHAT))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.5, help="of the activations (0.5)")
    parser.add_argument("--json", type=Path, help="where the seconds of all turns go")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    trees = [tree.resolve() for tree in arguments.trees]
    if arguments.train:
        train(str(trees[0]), arguments.train, arguments.share)
        return
    trees = [*trees, HERE][:2]
    ways = {"steady": steady, "first": first}
    turns = {}
    for model in arguments.models.split(","):
        for what in arguments.what.split(","):
            taken = ways[what](trees, model, arguments.share, arguments.rounds)
            ratios = [new / old for old, new in taken]
            low, high = interval(ratios)
            turns[f"{model} {what}"] = taken
            print(
                f"{model:9} {what:6} x {median(ratios):.3f} [{low:.3f}, {high:.3f}]",
                f"  {median(old for old, _ in taken):.3f} s, {median(new for _, new in taken):.3f} s",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(turns, indent=1) + "\n")


if __name__ == "__main__":
    main()

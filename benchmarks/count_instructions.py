"""Instructions of a training step of tiny ops, counted by callgrind: what times on a shared machine cannot resolve.

24 tiny blocks are trained on one thread, as in bench_overhead.py, in four ways: "plain", without a runtime;
"observer", where each op is recorded; "hooks", where saved tensors are packed and unpacked too; and "step", a whole
runtime.step(). Only STEPS steps after some to warm up are counted. With two trees (each with its extension built, for
the same PyTorch) the counts are compared. They repeat within some parts in ten thousand; they say nothing of caches.

Needs valgrind. Takes about a minute a tree and way.

    python -m benchmarks.count_instructions [--ways observer,hooks] [TREE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
WAYS = ("plain", "observer", "hooks", "step")
STEPS = 20
_WARM_UP = 24
_COUNTED = re.compile(r"Collected : (\d+)")


def count(tree: Path, way: str) -> int:
    """Instructions of one step.

    Args:
        tree: the project's folder, built.
        way: one of WAYS.

    Raises:
        RuntimeError: the program or valgrind failed; its message is what they printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            [
                *("valgrind", "--tool=callgrind", "--instr-atstart=no"),
                *(f"--callgrind-out-file={folder}/out", sys.executable, __file__),
                *("--train", way, str(tree)),
            ],
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
        )
    counted = _COUNTED.search(ran.stderr)
    if ran.returncode != 0 or counted is None:
        raise RuntimeError(f"{tree}, {way}:\n{ran.stderr[-2000:]}")
    return int(counted[1]) // STEPS


def train(way: str) -> None:
    """In a process under callgrind: train, and have it count the last steps."""
    import torch
    from torch import nn

    import delta_runtime as delta
    from delta_runtime import _C, cpu_pool

    try:
        from benchmarks import overhead
    except ImportError:  # a tree from before there was this folder
        from scripts import bench_overhead as overhead

    torch.set_num_threads(1)
    torch.manual_seed(0)
    cpu_pool.install()
    model = nn.Sequential(*(overhead.TinyBlock() for _ in range(overhead.BLOCKS)))
    x = torch.randn(overhead.ROWS, overhead.WIDTH)
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0) if way == "step" else None
    if runtime is not None:
        with contextlib.suppress(ImportError):  # a tree from before there were idle steps
            from delta_runtime.idle_steps import IdleSteps

            runtime.steps.idle = IdleSteps(0)  # which no step fits: all are observed
    session = _C.Session(device="cpu", budget_bytes=1 << 50, min_bytes=0)
    hooks = (session.pack_hook(), session.unpack_hook())

    def step() -> None:
        for p in model.parameters():
            p.grad = None
        if runtime is None:
            model(x).sum().backward()
            return
        with runtime.step():
            model(x).sum().backward()

    def steps(n: int) -> None:
        if way in ("observer", "hooks"):
            session.begin_step()
            session.enter()
        if way == "hooks":
            torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
        for _ in range(n):
            step()
        if way == "hooks":
            torch._C._autograd._pop_saved_tensors_default_hooks()
        if way in ("observer", "hooks"):
            session.leave()
            session.drain_events()

    def switch(on: str) -> None:
        subprocess.run(
            ["callgrind_control", "-i", on, str(os.getpid())], check=True, stdout=subprocess.DEVNULL
        )

    gc.collect()
    gc.freeze()
    gc.disable()
    steps(_WARM_UP)
    switch("on")
    steps(STEPS)
    switch("off")


def main() -> None:
    """Print a line for each way, with the ratio to the first tree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path, default=[HERE], metavar="TREE")
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    parser.add_argument("--train", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train)
        return
    for way in arguments.ways.split(","):
        counts = [count(tree.resolve(), way) for tree in arguments.trees]
        ratios = [f"x {each / counts[0]:.4f}" for each in counts[1:]]
        print(f"{way:9}", *(f"{each:,}" for each in counts), *ratios, flush=True)


if __name__ == "__main__":
    main()

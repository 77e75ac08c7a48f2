"""How large a batch trains in the memory that an ordinary step takes, and how fast?

A stress run. For models of `SIZED` in scripts/workloads.py the capacity is the ordinary peak at the ordinary batch.
The largest batch that trains within it is found by doubling and halving: the ordinary way, with checkpoints around each
block, and by the runtime. Gradient accumulation takes any batch, in parts that fit beside their sum of gradients: the
rival for speed. The largest batch, and 2, 4 and 8 times the ordinary one where they fit, are timed, with ordinary steps
before and after, and around each one of the runtime. Takes two to three hours on an idle machine; needs no GPU.

    python scripts/stress_max_batch.py [--models resnet50,...] [--contenders ordinary,accumulation,checkpoint,recompute]
        [--link pcie5] [--steps 2] [--threads 1] [--bound-s 20] [--only 2,4 [--rounds 3]] [--out FILE] [--docs PAGE]

`--contenders` takes peers of benchmarks/contenders.py and policies and planners too; with `--link` they, and what
offloads, have a host behind that link. With `--only` these growths alone are timed, in turns, and the median of all
steps is told, each over the ordinary steps around it: a few minutes for each. `--out` appends each trial to FILE, and a
run that was cut goes on from there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

from scripts.equal_capacity import Question, arguments_of, run_and_tell

MODELS = ("resnet50", "resnet101", "gpt", "llama", "vit", "unet")
QUESTION = Question(
    name="batch",
    start=lambda workload: workload.batch_size,
    step=lambda workload: max(1, workload.batch_size // 4),
    sizes=lambda workload, n: (n, workload.size),
    growth=lambda workload, n: n / workload.batch_size,
    factors=(2, 4, 8),
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(__doc__, argv, MODELS)
    return run_and_tell(QUESTION, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""How long a sequence, or how large an image, trains in the memory that an ordinary step takes?

A stress run: what gradient accumulation cannot do. As scripts/stress_max_batch.py, but the input grows: the length of
sequences, or the side of images, whose growth is told in pixels. Checkmate claims 5.1 times. Takes about 20 minutes on
an idle machine; needs no GPU.

    python scripts/stress_max_input.py [--models gpt,llama,vit,resnet101] [--contenders ordinary,checkpoint,recompute]
        [--link pcie5] [--steps 2] [--threads 1] [--bound-s 20] [--only 4 [--rounds 3]] [--out FILE] [--docs PAGE]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
for _name in [name for name in os.environ if name.startswith("DELTA_")]:
    del os.environ[_name]  # read when torch is imported: a budget from outside would disturb

from scripts.equal_capacity import ACCUMULATION, Question, arguments_of, run_and_tell

MODELS = ("gpt", "llama", "vit", "resnet101")
QUESTION = Question(
    name="input",
    start=lambda workload: workload.size,
    step=lambda workload: workload.size_step,
    sizes=lambda workload, n: (workload.batch_size, n),
    growth=lambda workload, n: (n / workload.size) ** (2 if workload.unit == "pixels" else 1),
    factors=(2,),
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(__doc__, argv, MODELS)
    arguments.contenders = [name for name in arguments.contenders if name != ACCUMULATION]
    return run_and_tell(QUESTION, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Records the step graphs on which the tests pin what the planners choose, and what they choose today.

Question: none by itself; `tests/planners/test_recorded_steps.py` asks whether a change of the planners changes a
plan. Trains M1, M2 and M3 of scripts/workloads.py for a few steps without pressure, and writes the record of each
with the least seconds of all of them as JSON, and beside it the plans at three budgets. No GPU; about a minute.

    python scripts/record_step_graphs.py              # records the steps anew, and their plans
    python scripts/record_step_graphs.py --plans      # only the plans, of the records that are there

A record holds times of the machine that made it: recording anew changes the plans too. After a change that is meant
to change plans, run it with `--plans` and look at the difference before it is committed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.recorded_steps import FOLDER, WORKLOADS, choices_of, plans_file

STEPS = 6


def record(name: str) -> None:
    """Trains a workload for a few steps, and writes its record."""
    import delta_runtime
    from scripts import workloads

    workload = next(
        each for each in (workloads.M1, workloads.M2, workloads.M3) if each.name == name
    )
    state = workload.build(0)
    runtime = delta_runtime.Runtime(budget="100%")
    for index in range(STEPS):
        with runtime.step():
            state.train_step(index)
    text = runtime.graph().to_json()
    runtime.close()
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def written(choices: dict[str, object]) -> str:
    """JSON with a line for each choice."""
    lines = [f"{json.dumps(name)}: {json.dumps(choice)}" for name, choice in choices.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--plans", action="store_true", help="keep the records, and write their plans alone"
    )
    options = parser.parse_args()
    if not options.plans:
        for name in WORKLOADS:
            record(name)
    for name in WORKLOADS:
        plans_file(name).write_text(written(choices_of(name)))


if __name__ == "__main__":
    main()

"""The verb `record`: runs a training script with nothing evicted, and writes the graph of its step as JSON.

The file is what `plan` reads. It holds the last step that was seen whole, with the least seconds of all runs of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from delta_runtime.cli import PROGRAM
from delta_runtime.cli.run import cannot_start, run_target, start_runtime, wrong_target
from delta_runtime.config import VARIABLES
from delta_runtime.core.errors import DeltaError

_USAGE = f"{PROGRAM} record --out step.json [options] (script.py | -m module) [its arguments]"


def add_parser(commands: Any) -> None:
    """Add the verb and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "record",
        help="run a training script, and write the graph of its step",
        usage=_USAGE,
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="FILE", required=True, help="where the graph is written")
    parser.add_argument("--device", metavar="X", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--min-bytes", metavar="X", help="smaller saved tensors are left out")


def record(options: argparse.Namespace, target: list[str]) -> str:
    """Run the target, and write what its step was like, even where it ends with an error.

    Args:
        options: of the verb.
        target: a script, or ``-m`` and a module, and its arguments.

    Returns:
        What is wrong with the call, or that no step was seen; "" when the graph is written.
    """
    if problem := wrong_target(target, "record", _USAGE):
        return problem
    out = Path(options.out)
    if out.is_dir() or not out.parent.is_dir():
        return f"{PROGRAM} record: {str(out)!r} cannot be written: it is a directory, or has none\n"
    asked = {"budget": "100%", "policy": "off", "report": "off"}
    asked |= {"device": options.device, "min_bytes": options.min_bytes}
    try:
        runtime = start_runtime({name: asked.get(name) for name in VARIABLES})
    except (DeltaError, ImportError) as error:
        return cannot_start("record", error)
    assert runtime is not None  # there is a budget
    try:
        run_target(target)
    except SystemExit as leaving:
        if leaving.code:
            raise
    finally:
        runtime.close()
        seen = runtime.steps.graph is not None
        if seen:
            out.write_text(runtime.graph().to_json(), encoding="utf-8")
    if not seen:
        return f"{PROGRAM} record: no step was seen: the script ran no forward and backward\n"
    return ""

"""The verb `estimate`: what a training script would come to on a card that is not there, without computing it.

The script runs until its second step is over; its ops compute nothing, and its tensors take no memory.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from delta_runtime.cli import PROGRAM
from delta_runtime.cli.recorded import card_names, read_graph
from delta_runtime.cli.run import cannot_start, run_target, wrong_target
from delta_runtime.core.errors import DeltaError

_USAGE = f"{PROGRAM} estimate --card rtx4090 [options] (script.py | -m module) [its arguments]"


def add_parser(commands: Any) -> None:
    """Add the verb and its options to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "estimate",
        help="say what a training script would come to on a card, without computing it",
        usage=_USAGE,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--card",
        metavar="A,B",
        default="rtx4090",
        help=f"of {', '.join(card_names())}; here (this machine), or a file like theirs (default: %(default)s)",
    )
    parser.add_argument(
        "--budget",
        metavar="X,Y",
        help="10GiB, or a share of what tensors can have on the card: 50%%; several if not given",
    )
    parser.add_argument(
        "--policy", metavar="X", default="auto", help="by which values leave (default: auto)"
    )
    parser.add_argument(
        "--measured",
        metavar="FILE",
        help="a step that `record` wrote on that card, of a smaller batch, say: ops take as long as there",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="where the recorded step is written: plan and simulate read it",
    )


def estimate(options: argparse.Namespace, target: list[str]) -> str:
    """Run the target dry, and print what its step would come to.

    Args:
        options: of the verb.
        target: a script, or ``-m`` and a module, and its arguments.

    Returns:
        What is wrong with the call or the script; "" when the estimate is printed.
    """
    if problem := wrong_target(target, "estimate", _USAGE):
        return problem
    out = None if options.out is None else Path(options.out)
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        return (
            f"{PROGRAM} estimate: {str(out)!r} cannot be written: it is a directory, or has none\n"
        )
    try:
        import delta_runtime_autoload

        delta_runtime_autoload.hold()  # no runtime that the environment asks for beside this one
        from delta_runtime.dry_step import budgets_of, card_of, record_dry_script
        from delta_runtime.simulate.estimate import estimate_of
        from delta_runtime.simulate.under_policy import check_policy
    except ImportError as error:
        return cannot_start("estimate", error)
    try:
        check_policy(options.policy)
        cards = [card_of(name.strip()) for name in options.card.split(",")]
        asked = None if options.budget is None else options.budget.split(",")
        budgets = [budgets_of(asked, card) for card in cards]
        measured = None if options.measured is None else read_graph(Path(options.measured))
        dry = record_dry_script(partial(run_target, target))
        if out is not None:
            out.write_text(dry.graph.to_json(), encoding="utf-8")
        for index, (card, each) in enumerate(zip(cards, budgets, strict=True)):
            told = estimate_of(
                dry.graph,
                card,
                each,
                policy=options.policy,
                optimizer_peak_bytes=dry.optimizer_peak_bytes,
                measured=measured,
            )
            print("\n" * (index > 0) + str(told))
    except DeltaError as error:
        return f"{PROGRAM} estimate: {error}\n"
    return ""

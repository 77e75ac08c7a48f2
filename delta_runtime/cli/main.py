"""The command line: ``python -m delta_runtime`` and a verb.

Covers which verb is called. What each does, and which options it has, is in the file of its name.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from delta_runtime.cli import PROGRAM, doctor, estimate, plan, record, run, simulate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments after the program's name; None for the process's own.

    Returns:
        The exit status: 0, 1 when doctor finds something missing, 2 for a wrong call.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A script's own arguments are cut off before argparse could take them for ours.
    target: list[str] = []
    if arguments[:1] in (["run"], ["record"], ["estimate"]):
        cut = run.find_target(arguments)
        arguments, target = arguments[:cut], arguments[cut:]
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Train inside a memory budget.")
    commands = parser.add_subparsers(dest="command", required=True)
    run.add_parser(commands)
    doctor.add_parser(commands)
    record.add_parser(commands)
    plan.add_parser(commands)
    simulate.add_parser(commands)
    estimate.add_parser(commands)
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return doctor.doctor()
    if options.command == "run":
        problem = run.run(options, target)
    elif options.command == "record":
        problem = record.record(options, target)
    elif options.command == "estimate":
        problem = estimate.estimate(options, target)
    elif options.command == "simulate":
        problem = simulate.simulate(options)
    else:
        problem = plan.plan(options)
    if problem:
        parser.exit(2, problem)
    return 0

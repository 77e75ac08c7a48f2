"""What the verbs `plan` and `simulate` share: a recorded step, a card, a budget, and the speed of lanes."""

from __future__ import annotations

import argparse
import contextlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from delta_runtime.core.errors import UsageError
from delta_runtime.core.units import parse_budget, parse_bytes

if TYPE_CHECKING:  # numpy is imported where it is needed: the other verbs work without it
    from delta_runtime.core.step_graph import StepGraph
    from delta_runtime.core.transfer import Links


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which a step, a budget and lanes are asked for."""
    parser.add_argument("graph", help="a file that `record` wrote")
    parser.add_argument(
        "--budget",
        metavar="X",
        help="10GiB, or a share of the step's peak: 50%%; with --card what tensors can have there, if not given",
    )
    parser.add_argument(
        "--card",
        metavar="NAME",
        help=f"have ops take what they would on a card: {', '.join(card_names())}, or a file like theirs",
    )
    parser.add_argument(
        "--link-bytes-per-s",
        metavar="X",
        help="speed of the lanes, each way: 12GB; as recorded if not given",
    )


def load_extension() -> None:
    """Let planners run their inner loops in C++, where that is installed; Python finds the same, more slowly."""
    with contextlib.suppress(ImportError):
        importlib.import_module("delta_runtime.extension")


def read_graph(path: Path) -> StepGraph:
    """Return the step of a file.

    Raises:
        UsageError: it cannot be read, or is no such file.
    """
    from delta_runtime.core.step_graph import StepGraph

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read.", found=str(error)) from error
    return StepGraph.from_json(text)


def card_names() -> list[str]:
    """Return the names of the cards, without importing what reads them."""
    folder = Path(__file__).resolve().parents[1] / "simulate" / "cards"
    return sorted(path.stem for path in folder.glob("*.json"))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options of `add_step_options` ask for.

    Args:
        graph: the recorded step; its seconds are those of the card, where one is asked for.
        budget_bytes: what may be live at any moment.
        links: speed of the lanes; None where nothing tells.
    """

    graph: StepGraph
    budget_bytes: int
    links: Links | None


def read_asked(options: argparse.Namespace) -> Asked:
    """Read what the options of `add_step_options` ask for.

    Raises:
        UsageError: the file cannot be read, or an option makes no sense.
    """
    graph = read_graph(Path(options.graph))
    if options.card is not None:
        from delta_runtime.simulate.card import load_card, on_card

        card = load_card(options.card)
        graph = on_card(graph, card)
        if options.budget is None:
            links = links_of(options.link_bytes_per_s, graph)
            return Asked(graph, card.usable_bytes, links)
    elif options.budget is None:
        raise UsageError("There is no budget.", change="Give --budget 10GiB, 50%, or --card NAME.")
    budget_bytes = budget_of(options.budget, graph)
    return Asked(graph, budget_bytes, links_of(options.link_bytes_per_s, graph))


def budget_of(spec: str, graph: StepGraph) -> int:
    """Read bytes, of which there may be more than the step takes, or a share of its peak."""
    budget_bytes = parse_budget(spec) or parse_budget(spec, graph.peak_bytes)
    if budget_bytes is None:
        raise UsageError(
            "--budget auto needs a device.", change="Give bytes, or a share of the peak."
        )
    return budget_bytes


def links_of(asked: str | None, graph: StepGraph) -> Links | None:
    """Return the lanes that are asked for, else those of the record; None where neither tells."""
    from delta_runtime.core.transfer import Links

    if asked is not None:
        speed = float(parse_bytes(asked, allow_zero=False, name="--link-bytes-per-s"))
        return Links(speed, speed)
    on = graph.recorded_on
    if on is None or not (on.out_bytes_per_s > 0 and on.in_bytes_per_s > 0):
        return None
    return Links(on.out_bytes_per_s, on.in_bytes_per_s)

"""Who wins where on cards: policies and planners, simulated; and what estimates look like.

A benchmark without a clock: steps of scripts/card_models.py are recorded dry, and simulated on cards. First,
estimates at three budgets of each card. Then, at eight budgets between the least and the ordinary peak: the rules of
DTR, Capuchin and DELTA, swapping and recomputing alone, Rotor, and auto, which follows joint. Asked is who is fastest
where, whether auto is ever slower than another, and the question of DELTA's paper: is swapping first best?
Takes about half an hour; needs no GPU. Exits 1 where auto is slower than another by more than 1 %.

    python -m benchmarks.cards [--models ...] [--cards rtx3060,rtx4090,h100] [--json FILE] [--docs docs/estimates.md]
        [--plot docs/plots/cards.png]

`--docs` writes the tables between the markers of that page. With `--again` the points that FILE holds already are kept,
and only models and cards that it lacks are simulated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import delta_runtime.extension  # noqa: F401 - the loops of planners
from benchmarks.common import console, machine, words, write_docs, write_json
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.dry_step import DryStep, record_dry_step
from delta_runtime.simulate.card import load_card, on_card
from delta_runtime.simulate.estimate import Estimate, estimate_of
from delta_runtime.simulate.under_policy import under_policy
from scripts.card_models import MODELS, TEXTS

POLICIES = ("auto", "recompute", "swap", "delta", "capuchin", "dtr", "rotor")
POINTS = 8
SHOWN = ("llama7b_lora", "gpt2_medium", "vit_large", "resnet50")
SIMULATED = (*SHOWN, "bert_large", "t5_large")
CARDS = ("rtx3060", "rtx4090", "h100")
_SLOWER = 0.01
_TEXT: Mapping[str, str] = MappingProxyType(
    {"delta": "DELTA's rule", "capuchin": "Capuchin's rule", "dtr": "DTR's rule"}
)


@dataclass(frozen=True, slots=True)
class Point:
    """A model on a card at a budget, under a policy.

    Args:
        model, card, policy: their names.
        share: of what lies between the least budget and the ordinary peak.
        budget_bytes: the budget.
        ratio: step time over the ordinary one's; None where it does not fit, or there is no plan.
        dropped_bytes, swapped_bytes: that left, by either way.
    """

    model: str
    card: str
    policy: str
    share: float
    budget_bytes: int
    ratio: float | None
    dropped_bytes: int = 0
    swapped_bytes: int = 0


def simulated(model: str, graph: StepGraph, card_name: str, least_bytes: int) -> list[Point]:
    """Simulate a step at budgets between its least and its peak, under each policy."""
    card = load_card(card_name)
    there = on_card(graph, card)
    points = []
    for number in range(1, POINTS + 1):
        share = number / (POINTS + 1)
        budget = least_bytes + int(share * (graph.peak_bytes - least_bytes))
        for policy in POLICIES:
            step = under_policy(policy, there, budget, card.links).step
            if step is None or step.peak_bytes > budget:
                points.append(Point(model, card_name, policy, share, budget, None))
                continue
            points.append(
                Point(
                    model,
                    card_name,
                    policy,
                    share,
                    budget,
                    step.seconds / there.seconds,
                    step.dropped_bytes,
                    step.swapped_out_bytes,
                )
            )
    return points


# ---------------------------------------------------------------------------------------------------- tables


def estimates_table(told: Mapping[tuple[str, str], Estimate]) -> list[str]:
    """Return the lines of a table in Markdown: what steps come to on cards."""
    lines = [
        "| step | card | as it is | least budget | budget | step time | recomputing | waiting | swapped | dropped |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (model, card), each in told.items():
        first = [model, card, format_bytes(each.peak_bytes), format_bytes(each.least_budget_bytes)]
        for row in each.budgets:
            cells = [*first, format_bytes(row.budget_bytes)]
            if row.seconds is None:
                cells += ["does not fit", "", "", "", ""]
            else:
                cells += [
                    str(row.seconds),
                    format_seconds(row.rebuild_s),
                    format_seconds(row.stall_s),
                    format_bytes(row.swapped_bytes),
                    format_bytes(row.dropped_bytes),
                ]
            lines.append("| " + " | ".join(cells) + " |")
            first = [""] * len(first)
    return lines


def _at(points: Sequence[Point]) -> dict[tuple[str, str, int], dict[str, Point]]:
    by_place: dict[tuple[str, str, int], dict[str, Point]] = {}
    for point in points:
        by_place.setdefault((point.model, point.card, point.budget_bytes), {})[point.policy] = point
    return by_place


def policies_table(points: Sequence[Point]) -> list[str]:
    """Return the lines of a table in Markdown: step times of policies, by card and share of the budget."""
    lines = []
    by_place = _at(points)
    for card in dict.fromkeys(point.card for point in points):
        lines += [
            "",
            f"**{load_card(card).title}.** Step time over the ordinary one's, middle of the models; in brackets how "
            "many of them do not fit.",
            "",
            "| budget, of what can leave | " + " | ".join(POLICIES) + " |",
            "|--:|" + "--:|" * len(POLICIES),
        ]
        for share in dict.fromkeys(point.share for point in points):
            cells = []
            for policy in POLICIES:
                here = [
                    found[policy]
                    for (_, on, _), found in by_place.items()
                    if on == card and found[policy].share == share
                ]
                ratios = sorted(each.ratio for each in here if each.ratio is not None)
                missing = len(here) - len(ratios)
                middle = f"{ratios[len(ratios) // 2]:.3f}" if ratios else ""
                cells.append(f"{middle} ({missing})" if missing else middle)
            lines.append(f"| {share:.0%} | " + " | ".join(cells) + " |")
    return lines


def wins_table(points: Sequence[Point]) -> list[str]:
    """Return the lines of a table in Markdown: how often each of the others comes closest to auto, and how close."""
    lines = [
        "| card | fastest beside auto | auto faster by, at the middle | auto slower by, at most |",
        "|---|---|--:|--:|",
    ]
    for card in dict.fromkeys(point.card for point in points):
        wins: Counter[str] = Counter()
        gains, losses = [], [0.0]
        for (_, on, _), found in _at(points).items():
            others = {
                name: each.ratio
                for name, each in found.items()
                if name != "auto" and each.ratio is not None
            }
            own = found["auto"].ratio
            if on != card or not others or own is None:
                continue
            best = min(others, key=lambda name: others[name])
            wins[best] += 1
            gains.append(others[best] / own - 1)
            losses.append(own / others[best] - 1)
        told = ", ".join(f"{_TEXT.get(name, name)} {count}" for name, count in wins.most_common())
        gain = sorted(gains)[len(gains) // 2] if gains else 0.0
        lines.append(f"| {load_card(card).title} | {told} | {gain:.1%} | {max(losses):.1%} |")
    return lines


def worst(points: Sequence[Point]) -> tuple[float, str]:
    """Return by how much auto is slower than the fastest other, at most, and where."""
    found = [(0.0, "nowhere")]
    for (model, card, budget), each in _at(points).items():
        ratios = [p.ratio for name, p in each.items() if name != "auto" and p.ratio is not None]
        own = each["auto"].ratio
        if ratios:
            slower = float("inf") if own is None else own / min(ratios) - 1
            found.append((slower, f"{model} on {card} within {format_bytes(budget)}"))
    return max(found)


def draw(points: Sequence[Point], path: Path) -> None:
    """Draw step time against budget: a row of pictures for each card, one for each model."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(point.model for point in points))
    cards = list(dict.fromkeys(point.card for point in points))
    figure = Figure(figsize=(3.2 * len(models), 2.6 * len(cards)), layout="constrained")
    axes = figure.subplots(len(cards), len(models), squeeze=False)
    for row, card in enumerate(cards):
        for column, model in enumerate(models):
            ax = axes[row][column]
            for policy in POLICIES:
                here = [
                    p
                    for p in points
                    if (p.model, p.card, p.policy) == (model, card, policy) and p.ratio is not None
                ]
                xs, ys = (
                    [100 * p.share for p in here],
                    [p.ratio for p in here if p.ratio is not None],
                )
                ax.plot(xs, ys, marker=".", label=policy, linewidth=2.5 if policy == "auto" else 1)
            ax.set_ylim(0.98, 1.8)
            ax.set_title(f"{model}, {card}", fontsize=8)
            ax.tick_params(labelsize=7)
    axes[-1][0].set_xlabel("budget, % of what can leave", fontsize=8)
    axes[0][0].set_ylabel("step time / ordinary", fontsize=8)
    axes[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=90)


def main() -> int:
    """Record, estimate, simulate and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=words, default=list(SIMULATED))
    parser.add_argument("--cards", type=words, default=list(CARDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true", help="keep the points of --json")
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    told: dict[tuple[str, str], Estimate] = {}
    points: list[Point] = []
    if options.again:
        points += [Point(**each) for each in json.loads(options.json.read_text())["points"]]
    known = {(each.model, each.card) for each in points}
    for model in options.models:
        dry = record_dry_step(MODELS[model])
        for card in options.cards:
            begin = time.perf_counter()
            told[model, card] = _estimate(dry, card)
            if (model, card) not in known:
                points += simulated(model, dry.graph, card, told[model, card].least_budget_bytes)
            took = format_seconds(time.perf_counter() - begin)
            console.print(f"\n{TEXTS[model]} ({took})\n{told[model, card]}")
            if (model, card) not in known:
                write_json(
                    options.json,
                    {"machine": machine(), "points": [asdict(each) for each in points]},
                )
    shown = {key: each for key, each in told.items() if key[0] in SHOWN}
    tables = {
        "estimates": estimates_table(shown),
        "policies": policies_table(points),
        "wins": wins_table(points),
    }
    console.print("\n".join([*tables["policies"], "", *tables["wins"]]))
    write_docs(options.docs, tables)
    if options.plot:
        draw(points, options.plot)
    slower, where = worst(points)
    console.print(f"\nauto is slower than the fastest other by at most {slower:.2%}: {where}.")
    return 0 if slower <= _SLOWER else 1


def _estimate(dry: DryStep, card: str) -> Estimate:
    return estimate_of(dry.graph, load_card(card), optimizer_peak_bytes=dry.optimizer_peak_bytes)


if __name__ == "__main__":
    sys.exit(main())

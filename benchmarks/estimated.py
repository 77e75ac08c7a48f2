"""Does an estimate tell what really happens?

A benchmark. Of six models, M1 to M3 of scripts/workloads.py and three more of today's kinds: the least budget that the
runtime really trains within is looked for (recomputing alone, on the CPU pool), and beside it the step is estimated,
from a dry record of it and a real record of half its batch. Asked is whether the estimate tells 0.9, 1.1 and 1.5 times
the really least budget rightly, and the step time there over the ordinary one's. Managed and ordinary steps take turns.
Takes about half an hour on two idle cores (`--models tiny_gpt --rounds 3`: a minute); needs no GPU. Exits 1 where a
budget is told wrongly.

    python -m benchmarks.estimated [--models resnet50,gpt,vit,llama,bert,unet] [--rounds 7] [--json FILE]
        [--docs docs/estimates.md]
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import delta_runtime as delta
from benchmarks.common import (
    BENCH_WORKLOADS,
    MIB,
    SEED,
    Spread,
    keep_memory,
    machine,
    measure,
    train_step,
    words,
    write_docs,
    write_json,
)
from benchmarks.planned import settle, timed
from delta_runtime import cpu_pool
from delta_runtime.core.step_graph import StepGraph
from delta_runtime.dry_step import record_dry_step
from delta_runtime.measured_card import measured_card
from delta_runtime.simulate.card import Card
from delta_runtime.simulate.estimate import Estimate, estimate_of
from scripts.train_plain import THREADS
from scripts.workloads import Batch, TrainState, Workload, allocate_adamw_state
from tests.zoo.diffusion import UNet

_WIDTH = 140
SHARES = (0.9, 1.1, 1.5)
_FINE = 0.01  # the search for the least budget ends there
_MOST_ERROR = 0.10


@dataclass(frozen=True, slots=True)
class Row:
    """A model at a budget.

    Args:
        model: its name.
        share: of the really least budget.
        budget_bytes: the budget.
        really_least_bytes, told_least_bytes: the least budgets.
        really_fits, told_fits: whether the step trains within the budget.
        ratio: step time over the ordinary one's; None where it was not run.
        told_ratio: the same, estimated; None where it is told not to fit.
        told_peak_bytes, peak_bytes: of the ordinary step.
    """

    model: str
    share: float
    budget_bytes: int
    really_least_bytes: int
    told_least_bytes: int
    really_fits: bool
    told_fits: bool
    ratio: Spread | None
    told_ratio: float | None
    peak_bytes: int
    told_peak_bytes: int

    @property
    def error(self) -> float | None:
        """Of the step time; None where it was not run, or is told not to fit."""
        if self.ratio is None or self.told_ratio is None:
            return None
        return self.told_ratio / self.ratio.median - 1


# ------------------------------------------------------------------------------------------------ more models


def _transformer(kind: str) -> Callable[[int], TrainState]:
    def build(seed: int) -> TrainState:
        from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        sizes = {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4}
        if kind == "llama":
            model: nn.Module = LlamaForCausalLM(
                LlamaConfig(vocab_size=512, intermediate_size=688, use_cache=False, **sizes)
            )
        else:
            model = BertForMaskedLM(BertConfig(vocab_size=512, intermediate_size=1024, **sizes))
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        allocate_adamw_state(optimizer)

        def batch(index: int) -> Batch:
            source = torch.Generator().manual_seed(seed + index)
            ids = torch.randint(0, 512, (8, 256), generator=source)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

        return TrainState(model, optimizer, batch)

    return build


class _Denoiser(nn.Module):
    """The U-Net of the zoo, wider, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = UNet(32)

    def forward(self, images: torch.Tensor, times: torch.Tensor) -> _Loss:
        return _Loss(self.net(images, times).square().mean())


@dataclass
class _Loss:
    loss: torch.Tensor


def _unet(seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = _Denoiser().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    allocate_adamw_state(optimizer)

    def batch(index: int) -> Batch:
        source = torch.Generator().manual_seed(seed + index)
        return {
            "images": torch.randn(16, 3, 32, 32, generator=source),
            "times": torch.randint(0, 1000, (16,), generator=source),
        }

    return TrainState(model, optimizer, batch)


MODELS: dict[str, Workload] = BENCH_WORKLOADS | {
    "llama": Workload("llama", "Llama 6 x 256, 8 x 256 tokens", _transformer("llama")),
    "bert": Workload("bert", "BERT 6 x 256, 8 x 256 tokens", _transformer("bert")),
    "unet": Workload("unet", "a U-Net for diffusion, 16 images", _unet),
}


# -------------------------------------------------------------------------------------------------- the truth


def trains_within(state: TrainState, budget_bytes: int) -> bool:
    """Return whether a step under the final plan stays within the budget, the optimizer's part too."""
    runtime = delta.Runtime(budget=budget_bytes, policy="recompute", device="cpu")
    try:
        settle(state, runtime)
        cpu_pool.reset_peak()
        train_step(state, state.batch(1), runtime)
        return cpu_pool.peak_bytes() <= budget_bytes
    finally:
        runtime.close()
        gc.collect()


def really_least(state: TrainState, low_bytes: int, high_bytes: int) -> int:
    """Return the least budget that the runtime trains within, by halves.

    Args:
        state: what is trained.
        low_bytes: no choice of drops holds less.
        high_bytes: the ordinary peak.
    """
    while high_bytes - low_bytes > _FINE * high_bytes:
        middle = (low_bytes + high_bytes) // 2
        if trains_within(state, middle):
            high_bytes = middle
        else:
            low_bytes = middle
    return high_bytes


def half_record(state: TrainState) -> StepGraph:
    """Return a real record of the step with half of its batch, with the least seconds of a few steps."""
    runtime = delta.Runtime(policy="off", device="cpu")
    for index in range(4):
        batch = {name: t[: len(t) // 2] for name, t in state.batch(index).items()}
        train_step(state, batch, runtime)
    graph = runtime.graph()
    runtime.close()
    return graph


# ------------------------------------------------------------------------------------------------ the estimate


def estimated(state: TrainState, card: Card, measured: StepGraph, budgets: list[int]) -> Estimate:
    """Return the estimate of a step, which is not computed for it."""

    def step() -> None:
        train_step(state, state.batch(0))

    dry = record_dry_step(step)
    return estimate_of(
        dry.graph,
        card,
        budgets,
        policy="recompute",
        optimizer_peak_bytes=dry.optimizer_peak_bytes,
        measured=measured,
    )


def run(model: str, rounds: int, card: Card) -> list[Row]:
    """Measure a model, and estimate it."""
    state = MODELS[model].build(SEED)
    ordinary = measure(state)
    least_bytes = really_least(state, ordinary.least_bytes, ordinary.peak_bytes)
    budgets = [int(share * least_bytes) for share in SHARES]
    told = estimated(state, card, half_record(state), budgets)
    rows = []
    for share, budget_bytes, each in zip(SHARES, budgets, told.budgets, strict=True):
        ratio = None
        fits = share >= 1
        if fits:
            runtime = delta.Runtime(budget=budget_bytes, policy="recompute", device="cpu")
            settle(state, runtime)
            cpu_pool.reset_peak()
            train_step(state, state.batch(1), runtime)
            fits = cpu_pool.peak_bytes() <= budget_bytes
            managed, plain = zip(
                *((timed(state, i, runtime), timed(state, i, None)) for i in range(rounds)),
                strict=True,
            )
            runtime.close()
            ratio = Spread.of([a / b for a, b in zip(managed, plain, strict=True)])
        rows.append(
            Row(
                model=model,
                share=share,
                budget_bytes=budget_bytes,
                really_least_bytes=least_bytes,
                told_least_bytes=told.least_budget_bytes,
                really_fits=fits,
                told_fits=each.fits,
                ratio=ratio,
                told_ratio=None
                if each.seconds is None
                else each.seconds.likely / told.seconds.likely,
                peak_bytes=ordinary.peak_bytes,
                told_peak_bytes=told.peak_bytes,
            )
        )
    return rows


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(padding=(0, 0, 0, 1))
    for name in ("model", "of least", "budget", "least", "told", "peak", "told", "fits", "told"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name in ("step time", "told", "error"):
        table.add_column(name, justify="right")
    for row in rows:
        error = row.error
        table.add_row(
            row.model,
            f"{row.share:.1f}",
            f"{row.budget_bytes / MIB:.0f}",
            f"{row.really_least_bytes / MIB:.0f}",
            f"{row.told_least_bytes / row.really_least_bytes - 1:+.1%}",
            f"{row.peak_bytes / MIB:.0f}",
            f"{row.told_peak_bytes / row.peak_bytes - 1:+.1%}",
            "yes" if row.really_fits else "no",
            "yes" if row.told_fits else "no",
            "" if row.ratio is None else row.ratio.text(),
            "" if row.told_ratio is None else f"{row.told_ratio:.3f}",
            "" if error is None else f"{error:+.1%}",
        )
    console = Console(width=_WIDTH, highlight=False)
    console.print(table)
    right = sum(row.really_fits == row.told_fits for row in rows)
    errors = [abs(row.error) for row in rows if row.error is not None]
    console.print(
        f"{right} of {len(rows)} budgets told rightly; step times off by at most {max(errors, default=0):.1%}, "
        f"{sum(each <= _MOST_ERROR for each in errors)} of {len(errors)} within {_MOST_ERROR:.0%}."
    )


def docs_table(rows: list[Row]) -> list[str]:
    """Return the lines of a table in Markdown."""
    lines = [
        "| model | really least, told | at | fits: really, told | step / ordinary step: measured | told | off by |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        least = f"{row.really_least_bytes / MIB:.0f} MiB, {row.told_least_bytes / row.really_least_bytes - 1:+.1%}"
        fits = ", ".join("yes" if each else "no" for each in (row.really_fits, row.told_fits))
        cells = [row.model, least, f"{row.share:.1f}", fits]
        cells += [
            "" if row.ratio is None else row.ratio.text(),
            "" if row.told_ratio is None else f"{row.told_ratio:.3f}",
            "" if row.error is None else f"{row.error:+.1%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> int:
    """Measure, estimate, and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=words, default=words("resnet50,gpt,vit,llama,bert,unet"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    cpu_pool.install()
    keep_memory()
    warnings.simplefilter("ignore")  # of budgets that are passed: that is what is asked
    card = measured_card()
    rows: list[Row] = []
    for model in options.models:
        rows += run(model, options.rounds, card)
        show(rows)
        write_json(options.json, {"machine": machine(), "rows": [asdict(row) for row in rows]})
    write_docs(options.docs, {"estimated": docs_table(rows)})
    return 0 if all(row.really_fits == row.told_fits for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

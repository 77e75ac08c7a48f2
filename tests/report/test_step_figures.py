"""The last step in a few figures, and the report as a notebook shows it."""

from __future__ import annotations

import html
import random

import torch
from torch import nn

import delta_runtime as delta
from delta_runtime.report.step_figures import metrics, status
from delta_runtime.report.step_report import StepTotals
from tests.support.fixtures import one_thread  # noqa: F401

LAST = StepTotals(
    peak_bytes=3 << 20,
    dropped_bytes=1 << 20,
    rebuild_s=0.25,
    out_stall_s=0.5,
    in_stall_s=0.125,
    swapped_out_bytes=7,
)


def test_the_figures_are_the_last_steps():
    totals = StepTotals(steps=4, over_budget_steps=2, rebuild_s=9.0)
    assert metrics(LAST, totals, 4 << 20) == {
        "delta/budget_bytes": 4 << 20,
        "delta/peak_bytes": 3 << 20,
        "delta/dropped_bytes": 1 << 20,
        "delta/swapped_out_bytes": 7,
        "delta/recompute_s": 0.25,
        "delta/stall_s": 0.625,
        "delta/over_budget_steps": 2,
    }
    assert "delta/budget_bytes" not in metrics(LAST, totals, 0)
    text = status(LAST, totals, 4 << 20)
    assert (
        text
        == "peak 3.00 MiB of 4.00 MiB, recompute 250 ms, waits 625 ms, over the budget in 2 steps"
    )


def test_before_the_first_step_there_are_none():
    assert metrics(None, StepTotals(), 1) == {}
    assert status(None, StepTotals(), 1) == "no step yet"


def test_a_runtime_tells_its_own():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0)
    assert runtime.metrics() == {} and runtime.status() == "no step yet"
    with runtime.step():
        model(torch.ones(64, 64)).mean().backward()
    told = runtime.metrics()
    runtime.close()
    assert told["delta/peak_bytes"] == runtime.report().last.peak_bytes > 0
    assert told["delta/budget_bytes"] == runtime.budget_bytes
    assert runtime.status().startswith("peak ")


def test_a_notebook_gets_the_same_table_and_random_numbers_go_on():
    model = nn.Linear(64, 64)
    runtime = delta.Runtime("100%", device="cpu", min_bytes=0)
    with runtime.step():
        model(torch.ones(64, 64)).mean().backward()
    runtime.close()
    report = runtime.report()
    random.seed(5)
    wanted = random.random()
    random.seed(5)
    text = report._repr_html_()
    assert random.random() == wanted
    assert text.count("<tr>") == text.count("</tr>") > 8
    assert "<td>peak (allocator)</td>" in text and "<th>last step</th>" in text
    assert html.escape(report.verdict()) in text

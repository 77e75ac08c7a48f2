"""The benchmarks' own arithmetic: what they say of a step, and of one policy beside another.

Covers: the sum of least pieces of disturbed steps (benchmarks/piecewise.py), by property and on a real model; verdicts,
turns that fail and turns that are cut short (benchmarks/swap.py); how often the interval of a comparison holds the
true median (benchmarks/compare_trees.py); that the committed results can be read.
Does not cover: how long anything takes.
"""

from __future__ import annotations

import dataclasses
import gc
import time
import weakref
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import delta_runtime as delta
from benchmarks import swap as swap_benchmark
from benchmarks.common import Spread
from benchmarks.compare_trees import interval
from benchmarks.piecewise import PieceTimer, quiet_seconds
from benchmarks.swap import Bench, Cell, Contender, Findings, judged, quiet_by_rounds
from delta_runtime import cpu_pool
from tests.support.fixtures import one_thread  # noqa: F401

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_disturbed_steps_are_put_together(pieces: int, steps: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    undisturbed = rng.uniform(0.01, 0.02, pieces)
    spells = rng.uniform(0.0, 0.01, (steps, pieces))
    spells[rng.integers(0, steps, pieces), np.arange(pieces)] = 0.0  # each piece is quiet once
    assert quiet_seconds(list(undisturbed + spells)) == pytest.approx(undisturbed.sum())


def test_steps_of_other_pieces_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\] pieces"):
        quiet_seconds([np.array([1.0, 3.0]), np.array([2.0, 0.5, 1.0])])


@pytest.mark.parametrize("n", [6, 10, 25])
def test_intervals_of_medians_hold_them(n: int) -> None:
    samples = np.random.default_rng(n).exponential(size=(4000, n))
    bounds = np.array([interval(list(sample)) for sample in samples])
    held = ((bounds[:, 0] <= np.log(2)) & (np.log(2) <= bounds[:, 1])).mean()
    assert held > 0.94
    assert all(low in sample and high in sample for (low, high), sample in zip(bounds, samples))
    if n == 25:  # not wider than it must be
        assert held < 0.97


def test_few_numbers_give_their_range() -> None:
    assert interval([3.0]) == (3.0, 3.0)
    assert interval([2.0, 5.0, 1.0]) == (1.0, 5.0)


class Slow(nn.Module):
    """Sleeps in forward, and counts."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        time.sleep(0.05)
        return x.sin()


def test_pieces_of_a_model() -> None:
    cpu_pool.install()
    slow = Slow()
    model = nn.Sequential(nn.Linear(64, 64), slow, nn.ReLU(inplace=True), nn.Linear(64, 8))
    timer = PieceTimer(model)
    x = torch.randn(256, 64)
    runtime = delta.Runtime("90%", device="cpu", policy="stress_drop_all", min_bytes=0)
    steps, outer = [], []
    try:
        for managed in (False, False, True, True):
            begin = time.perf_counter()
            timer.begin()
            if managed:
                with runtime.step():
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
            steps.append(timer.end())
            outer.append(time.perf_counter() - begin)
    finally:
        runtime.close()
    assert runtime.report().totals.rebuilds > 0
    assert slow.calls == len(steps)
    assert {len(pieces) for pieces in steps} == {2 * len(model) + 1}  # one after the last gradient
    assert all(pieces.sum() <= seconds for pieces, seconds in zip(steps, outer, strict=True))
    assert all(pieces[1] >= 0.05 for pieces in steps)


def test_no_output_is_held() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    timer = PieceTimer(model)
    out = model(torch.randn(2, 4))
    watch = weakref.ref(out)
    del out
    gc.collect()
    assert watch() is None
    assert len(timer.end()) == 2


def cell(policy: str, step_s: float, **changed: object) -> Cell:
    """Of a step of 1 s, of which two rounds of two steps were timed."""
    made = Cell(
        model="m",
        link="" if policy == "recompute" else "c2c",
        share=0.5,
        policy=policy,
        budget_bytes=1,
        ratio=Spread.of([step_s]),
        floor=1.0,
        ordinary_s=1.0,
        recompute_s=step_s - 1,
        stall_s=0.0,
        swapped_bytes=0,
        dropped_bytes=0,
        peak_bytes=1,
        host_waste=0.0,
        rounding_waste=0.0,
        failure="",
        seconds=(step_s,) * 4,
        ordinaries=(1.0,) * 4,
        quiet_s=(step_s, step_s + 0.002, step_s),
        quiet_ordinary_s=(1.0, 1.0, 1.0),
    )
    return dataclasses.replace(made, **changed)


def findings(*cells: Cell) -> dict[str, Findings | None]:
    by_policy = {p: [c for c in cells if c.policy == p] for p in ("auto", "recompute", "swap")}
    return {p: Findings.of(some) if some else None for p, some in by_policy.items()}


@pytest.mark.parametrize(
    ("auto", "wait_s", "by_ratio", "by_count"),
    [
        (1.00, 0.0, "clearly better -4.0 (-4.0, -4.0)", "clearly better"),
        (1.035, 0.0, "as good -0.5 (-0.5, -0.5)", "as good"),
        (1.049, 0.0, "as good +0.9 (+0.9, +0.9)", "as good"),
        (1.06, 0.0, "worse +2.0 (+2.0, +2.0)", "worse"),
        (1.00, 0.06, "worse +2.0 (+2.0, +2.0)", "worse"),  # pieces do not see a wait that moves
    ],
)
def test_verdicts(auto: float, wait_s: float, by_ratio: str, by_count: str) -> None:
    found = findings(cell("auto", auto, stall_s=wait_s), cell("recompute", 1.04), cell("swap", 1.2))
    assert judged(found) == (by_ratio, by_count)


def test_several_runs_are_averaged() -> None:
    runs = [(1.06, 1.04, 1.2), (1.02, 1.05, 1.2), (1.00, 1.03, 1.2)]
    found = findings(
        *(
            cell(policy, step_s, run=run)
            for run, each in enumerate(runs)
            for policy, step_s in zip(("auto", "recompute", "swap"), each, strict=True)
        ),
        cell("auto", 3.0, quiet_s=(), run=3),  # whole steps only: of no use beside the others
    )
    assert judged(found)[0] == "clearly better -1.3 (+2.0, -3.0, -3.0)"
    assert found["auto"] is not None
    assert found["auto"].text() == "2.7 (1.027)"
    apart = findings(cell("auto", 1.02, run=0), cell("recompute", 1.05, run=1))
    assert judged(apart)[0] == "clearly better -3.0"


def test_verdicts_without_a_rival_or_after_a_failure() -> None:
    failed = cell("auto", 1.0, ratio=None, seconds=(), quiet_s=(), failure="OutOfMemoryError: x")
    recompute = cell("recompute", 1.04)
    assert judged(findings(failed, recompute)) == ("worse: failed",) * 2
    assert judged(findings(cell("auto", 1.0))) == ("", "")
    # A rival that was given up after fewer rounds has no halves to compare with.
    cut = cell("recompute", 1.6, seconds=(1.6,) * 2)
    verdicts = judged(findings(cell("auto", 1.0), cut))
    assert verdicts == ("clearly better -60.0", "clearly better")


class Stub(Bench):
    """Takes steps of given lengths; the plan over pcie5 changes in the middle of one turn or more."""

    def __init__(
        self, seconds: dict[tuple[str, str], float], unsettled: Iterable[int] = ()
    ) -> None:
        self.unsettled = set(unsettled)  # steps after which no plan over pcie5 stays
        self.name, self.rounds, self.steps_per_turn = "stub", 4, 2
        self.seconds, self.ordinaries = seconds, 0
        self.measured = type("Measured", (), {"budget_bytes": lambda _, share: 1 << 34})()
        self.measured.activation_bytes = 1

    def ordinary(self) -> np.ndarray:
        self.ordinaries += 1
        third_round = 2 * 3 < self.ordinaries <= 3 * 3  # each round has one that is not timed
        return np.array([0.5, 0.49 if third_round else 0.5])

    def start(self, link: str, policy: str, budget_bytes: int) -> Contender:
        runtime = delta.Runtime(1 << 34, device="cpu", policy="recompute")
        runtime.steps.plans = SimpleNamespace(
            settled=True,
            plan=None,
            steps=0,
            bounds=None,
            last_graph=None,
            yielded=False,
            margin_bytes=0,
        )
        seconds = self.seconds[link, policy]
        return Contender(link, policy, runtime, failure="" if seconds else "OutOfMemoryError: x")

    def managed(self, contender: Contender, budget_bytes: int) -> np.ndarray:
        seconds = self.seconds[contender.link, contender.policy]
        if len(contender.turns) == 3 and contender.policy == "delta":
            contender.failure = "OutOfMemoryError: y"
        known = contender.runtime.steps.plans
        known.steps += 1
        if contender.link == "pcie5":
            known.settled = known.steps not in self.unsettled
        return np.array([0.5, seconds - 0.5])


@pytest.fixture
def _no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swap_benchmark, "bytes_per_s", lambda link: 1.0)


@pytest.mark.usefixtures("_no_link")
def test_turns() -> None:
    seconds = {
        ("", "recompute"): 1.1,
        ("pcie3", "auto"): 1.3,  # slow beside c2c's only
        ("pcie3", "swap"): 2.0,
        ("c2c", "auto"): 1.0,
        ("c2c", "delta"): 1.0,
        ("pcie5", "auto"): 1.2,
    }
    cells = {(c.link, c.policy): c for c in Stub(seconds, [5]).cells(0.5, list(seconds))}
    steps = {place: len(c.seconds) for place, c in cells.items()}
    assert steps == dict.fromkeys(seconds, 8) | {
        ("pcie3", "swap"): 4,
        ("c2c", "delta"): 0,
        ("pcie5", "auto"): 4,  # of the plan that stayed
    }
    assert cells["c2c", "delta"].failure
    assert cells["pcie3", "swap"].quiet_ratio == 2.0
    assert cells["c2c", "auto"].quiet_s == pytest.approx((1.0, 1.0, 1.0))
    # Ordinary steps of the same rounds stand beside it: the third's and the fourth's.
    assert cells["pcie5", "auto"].quiet_ordinary_s == pytest.approx((0.99, 0.99, 1.0))


@pytest.mark.usefixtures("_no_link")
def test_whose_plan_changes_in_the_last_turn_has_another() -> None:
    seconds = {("", "recompute"): 1.1, ("pcie5", "auto"): 1.2}
    recompute, auto = Stub(seconds, [1, 4, 7, 10]).cells(0.5, list(seconds))
    assert len(recompute.seconds) == 8
    assert len(auto.seconds) == 2 and not auto.failure
    assert len(recompute.ordinaries) == len(auto.ordinaries) == 10
    _, never = Stub(seconds, range(10_000)).cells(0.5, list(seconds))
    assert never.failure == "no plan stayed for a turn"


@pytest.mark.usefixtures("_no_link")
def test_nobody_can_train() -> None:
    cells = Stub({("", "recompute"): 0.0, ("c2c", "auto"): 0.0}).cells(
        0.5, [("", "recompute"), ("c2c", "auto")]
    )
    assert [Findings.of([c]).text() for c in cells] == ["failed", "failed"]


def test_how_far_runs_lie_apart() -> None:
    told = ["as good +0.4 (+1.0, -0.5, +0.7)", "", "worse +2.0", "clearly better -3.0 (-3.0, -3.0)"]
    assert swap_benchmark.apart(told) == pytest.approx([0.0, 1.5])


def test_rounds() -> None:
    turns = [[np.array([3.0, 1.0])], [np.array([1.0, 4.0])], [np.array([2.0, 3.0])]]
    assert quiet_by_rounds(turns) == (2.0, 3.0, 5.0)
    assert quiet_by_rounds(turns[:1]) == (4.0, 4.0)
    assert quiet_by_rounds([]) == ()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("swap_cpu_*.json")), ids=lambda p: p.stem)
def test_committed_results_can_be_read(path: Path) -> None:
    cells = swap_benchmark.read([path])
    assert cells
    places = {(c.model, c.link, c.share) for c in cells if c.link}
    assert swap_benchmark.markdown(cells).count("\n") == len(places) + 2

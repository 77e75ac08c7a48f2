"""What stress_max_batch.py and stress_max_input.py find, on a model of milliseconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_runtime import cpu_pool
from scripts import equal_capacity, stress_max_batch, stress_max_input
from scripts.equal_capacity import (
    ACCUMULATION,
    ORDINARY_STEPS,
    AtCapacity,
    Record,
    Trial,
    again_of,
    answer,
    largest,
    speed_of,
)
from scripts.points_file import OtherOptions
from tests.benchmarks.test_contenders import TINY
from tests.support.fixtures import one_thread, short_search  # noqa: F401

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("short_search"),
]


@given(st.integers(1, 40), st.integers(1, 10), st.integers(0, 3000))
@settings(max_examples=200, deadline=None)
def test_the_largest_that_fits(start: int, step: int, beyond: int) -> None:
    start *= step
    limit = start + beyond
    asked = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= limit

    found = largest(fits, start, step, 64 * start)
    assert found <= min(limit, 64 * start) and found % step == 0
    assert found + step > limit or found + step > 64 * start
    assert len(asked) < 30


def test_at_equal_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_pool.install()
    monkeypatch.setitem(equal_capacity.SIZED, "tiny", TINY)
    monkeypatch.setattr(equal_capacity, "_MOST_FACTOR", 3)
    record = Record(tmp_path / "out.jsonl", Trial, {"steps": 1})
    at = AtCapacity(TINY, None, 1, bound_s=0.1)
    batch = stress_max_batch.QUESTION
    ordinary, *_ = answer(batch, at, "ordinary", record)
    assert ordinary.batch_size < 2 * TINY.batch_size
    ours = answer(batch, at, "recompute", record)
    assert ours[-1].batch_size >= 2 * TINY.batch_size
    assert all(each.samples_per_s > 0 and each.ordinary_samples_per_s > 0 for each in ours)
    assert all(each.peak_bytes <= each.capacity_bytes for each in ours)
    assert ours[-1].least_extra > 0
    assert ordinary.least_extra == 0
    last = f"{ours[-1].batch_size / TINY.batch_size:.3g}x "
    told = equal_capacity.speeds_of(batch, ours).split(", ")[-1]
    assert told.startswith(last) and told.endswith(f" of {1 / (1 + ours[-1].least_extra):.0%}")
    assert " of " not in equal_capacity.speeds_of(batch, [ordinary])
    tokens = answer(stress_max_input.QUESTION, at, "recompute", record)
    assert tokens[-1].size >= 2 * TINY.size
    added = answer(batch, at, ACCUMULATION, record)
    assert [each.batch_size for each in added] == [32, 64, 128]
    assert added[0].samples_per_s > 0

    def never(*_: object, **__: object) -> None:
        raise AssertionError("what is in the file is not run again")

    monkeypatch.setattr(AtCapacity, "trial", never)
    again = answer(batch, at, "recompute", Record(tmp_path / "out.jsonl", Trial, {"steps": 1}))
    assert again == ours
    with pytest.raises(OtherOptions, match="'steps': 1"):
        Record(tmp_path / "out.jsonl", Trial, {"steps": 2})


def test_accumulation_adds_up_to_the_whole_batch() -> None:
    gradients = []
    for parts in (1, 5):  # of which some are larger
        state = TINY.build(0)
        state.model.eval()  # no dropout
        step = equal_capacity.accumulated(state, parts)
        state.optimizer.step = lambda: None
        seen: list[torch.Tensor] = []
        zero = state.optimizer.zero_grad

        def zero_grad(set_to_none: bool = True, seen=seen, state=state, zero=zero) -> None:
            seen[:] = [p.grad.clone() for p in state.model.parameters() if p.grad is not None]
            zero(set_to_none=set_to_none)

        state.optimizer.zero_grad = zero_grad
        step(0)
        gradients.append(seen)
    assert len(gradients[0]) == len([*TINY.build_model(32).parameters()])
    for whole, parts_ in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, parts_, rtol=1e-3, atol=1e-5)


def test_what_is_asked_for_is_known() -> None:
    for argv in (
        ["--models", "resnet49"],
        ["--contenders", "magic"],
        ["--contenders", "offloaded"],
        ["--only", "2,0"],
        ["--only", "2", "--rounds", "0"],
        ["--bound-s", "-1"],
    ):
        with pytest.raises(SystemExit):
            stress_max_batch.main(argv)


def test_growths_alone_are_timed_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(equal_capacity.SIZED, "tiny", TINY)
    out, page = tmp_path / "again.jsonl", tmp_path / "page.md"
    page.write_text("before <!-- max_batch_again: begin --><!-- max_batch_again: end --> behind")
    given = ["--models", "tiny", "--contenders", "recompute", "--steps", "1", "--out", str(out)]
    given += ["--bound-s", "0.1", "--docs", str(page)]
    assert stress_max_batch.main([*given, "--only", "2,3", "--rounds", "1"]) == 0
    assert stress_max_batch.main([*given, "--only", "2,3", "--rounds", "2"]) == 0
    options = {"link": None, "steps": 1, "threads": 1}
    trials = Record(out, Trial, options | ORDINARY_STEPS).points
    assert [each.batch_size // TINY.batch_size for each in trials] == [2, 3, 2, 3]
    assert all(not each.failure and each.ordinary_samples_per_s > 0 for each in trials)
    assert all(len(each.speeds) == 4 and each.bound_s == 0.1 for each in trials)
    given[given.index("0.1")] = "0.2"  # of new trials alone
    assert stress_max_batch.main([*given, "--only", "2,3", "--rounds", "2"]) == 0
    speeds = [speed for each in trials[::2] for speed in each.speeds]
    told = f"{statistics.median(speeds):.1%}"
    assert told in capsys.readouterr().out
    assert f"| tiny | recompute | 2x | {told} | " in page.read_text()
    page.write_text("no place")
    with pytest.raises(SystemExit, match="no place for max_batch_again"):
        stress_max_batch.main([*given, "--only", "2,3", "--rounds", "2"])


def test_speeds_are_over_the_rows_before_and_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(equal_capacity.SIZED, "tiny", TINY)
    batch, rows_s = stress_max_batch.QUESTION, iter([2.0, 4.0, 6.0, 2.0, 2.0])
    at = AtCapacity(TINY, None, 1, bound_s=0.0)

    def timed(step: Callable[[int], None], index: int) -> float:
        step(index)
        return next(rows_s) if step.__name__ == "row" else 5.0

    monkeypatch.setattr(AtCapacity, "_ordinary_s", lambda *_: 9.0)
    monkeypatch.setattr(AtCapacity, "_timed", staticmethod(timed))
    trial = at.trial("recompute", 2 * TINY.batch_size, TINY.size, timed=True)
    assert trial.failure == ""
    assert trial.speeds == pytest.approx([3 / 5, 5 / 5, 4 / 5, 2 / 5])
    assert speed_of(batch, trial) == pytest.approx(0.7)
    other = replace(trial, speeds=[0.1, 0.2, 0.9], least_extra=0.25)
    growth, middle, quartiles, most = again_of(batch, [replace(trial, least_extra=0.25), other])
    assert (growth, middle, quartiles, most) == ("2x", "60.0%", "30.0% to 85.0%", "80.0%")
    failed = again_of(batch, [trial, replace(trial, failure="OutOfMemoryError")])
    assert failed == ("2x", "did not train in 1 of 2 rounds", "", "")

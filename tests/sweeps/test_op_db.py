"""Gradients of PyTorch's op database have the same bits when what autograd saved is dropped or swapped.

Each op and its in-place variant, float32 and float64, a few samples: everything dropped, everything swapped out, and
seeded random choices dropped, swapped out or brought back at random op boundaries (swapping in float32 only: it moves
bytes, whatever they mean). Random choices that are only dropped are marked slow. scripts/sweep_op_db.py runs more
dtypes and all samples.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.support.fixtures import one_thread  # noqa: F401
from tests.sweeps.rows import Outcome, Result, failures, op_rows, run_row

CHUNKS = 16
SAMPLES = 3

# How many of the 667 rows have something to rebuild; a few less than were measured, since op_db changes with torch.
LEAST_REBUILT = {torch.float64: 440, torch.float32: 440}

RUNS = [(dtype, mode) for dtype in LEAST_REBUILT for mode in ("drop_all", "random")]
RUNS += [(torch.float32, mode) for mode in ("swap_all", "disk_all", "mix")]
LONG = [pytest.param(*run, marks=[pytest.mark.slow] * (run[1] == "random")) for run in RUNS]
"""In `make test` random choices are those of "mix", in float32, where a value is dropped or swapped."""

_results: dict[tuple[torch.dtype, str], dict[str, Result]] = {}


@pytest.fixture(scope="module")
def rows() -> dict:
    return {dtype: op_rows(dtype) for dtype in LEAST_REBUILT}


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize(("dtype", "mode"), LONG, ids=str)
def test_same_bits(rows: dict, dtype: torch.dtype, mode: str, chunk: int) -> None:
    results = {row.name: run_row(row, mode, SAMPLES) for row in rows[dtype][chunk::CHUNKS]}
    _results.setdefault((dtype, mode), {}).update(results)
    message = failures(results)
    assert not message, f"{dtype}, {mode}: {message}"


@pytest.mark.parametrize(("dtype", "mode"), [run for run in RUNS if "all" in run[1]], ids=str)
def test_enough_rows_really_rebuilt_something(rows: dict, dtype: torch.dtype, mode: str) -> None:
    results = _results.get((dtype, mode), {})
    if len(results) < len(rows[dtype]):
        pytest.skip("only after all chunks, in one process")
    outcomes = Counter(result.outcome for result in results.values())
    assert outcomes[Outcome.REBUILT] >= LEAST_REBUILT[dtype], outcomes


@pytest.mark.parametrize(
    ("dtype", "mode"), [run for run in LONG if "all" not in run.values[1]], ids=str
)
def test_random_choices_rebuilt_something_too(rows: dict, dtype: torch.dtype, mode: str) -> None:
    results = _results.get((dtype, mode), {})
    if len(results) < len(rows[dtype]):
        pytest.skip("only after all chunks, in one process")
    outcomes = Counter(result.outcome for result in results.values())
    assert outcomes[Outcome.REBUILT] >= LEAST_REBUILT[dtype] // 4, outcomes

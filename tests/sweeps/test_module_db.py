"""Gradients and buffers of PyTorch's modules have the same bits when what autograd saved is dropped or swapped.

Each module of module_db in training and in evaluation mode; everything dropped, everything swapped out, and seeded
random choices of either.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.support.fixtures import one_thread  # noqa: F401
from tests.sweeps.rows import Outcome, Result, failures, module_rows, run_row

CHUNKS = 8
SAMPLES = 3
LEAST_REBUILT = 205  # of 228; embeddings and paddings save nothing that could be dropped

_results: dict[str, dict[str, Result]] = {}


@pytest.fixture(scope="module")
def rows() -> list:
    return module_rows(torch.float32)


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("mode", ["drop_all", "random", "swap_all", "mix"])
def test_same_bits(rows: list, mode: str, chunk: int) -> None:
    results = {row.name: run_row(row, mode, SAMPLES) for row in rows[chunk::CHUNKS]}
    _results.setdefault(mode, {}).update(results)
    message = failures(results)
    assert not message, f"{mode}: {message}"


@pytest.mark.parametrize("mode", ["drop_all", "swap_all"])
def test_enough_rows_really_rebuilt_something(rows: list, mode: str) -> None:
    results = _results.get(mode, {})
    if len(results) < len(rows):
        pytest.skip("only after all chunks, in one process")
    outcomes = Counter(result.outcome for result in results.values())
    assert outcomes[Outcome.REBUILT] >= LEAST_REBUILT, outcomes
